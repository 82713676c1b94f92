"""Index tensors through which every operator reads one compact tree of rows.

Shapes: R physical rows (padding included) · C compact rows · P packed rows (replay + own) of one
call · Q sequences in a call · M requested boundary states · B chunk length · N trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layout import CompactLayout
from harts.ops.device_copy import on_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundIndex:
    """One packed linear-attention call (paper section 3.4, round-wise execution).

    All tensors are int64. Each sequence is its replay rows followed by its own rows, and starts
    at chunk phase 0. The state bank is the list of boundary states of earlier rounds, in the
    order in which they were produced.
    """

    packed_rows: Tensor
    """[P] physical row behind each packed row."""

    cu_seqlens: Tensor
    """[Q+1] packed row at which each sequence starts; the last entry is P."""

    initial_state: Tensor
    """[Q] index into the state bank; -1 is the zero state."""

    boundaries: Tensor
    """[M, 2] pairs (sequence, chunk c): the state before chunk c, after c * B packed rows.

    c = ceil(n / B) asks for the state after all n rows; only where n is a multiple of B is that
    the state of a trajectory's own chunk grid. The states are appended to the bank in this order.
    """

    own_positions: Tensor
    """[own] packed positions of the rows that are not replay.

    Concatenated over all rounds these are the physical rows 0..C-1, in order.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeIndex:
    """Every index array the operators need for one microbatch; rows C..R-1 are padding.

    Operators write zeros to padding rows, and return zero gradients for them.
    """

    rows: int
    """R, physical rows with padding."""

    compact_rows: int
    """C, rows that hold a token."""

    chunk_size: int
    """B, the chunk length of linear attention."""

    rounds: tuple[RoundIndex, ...]
    """Packed linear-attention calls in order of execution."""

    sequence_offsets: Tensor
    """[Q_all+1] sequence i (over all rounds) owns physical rows offsets[i] .. offsets[i+1]-1."""

    ancestor_rows: Tensor
    """[sum of h] physical rows of all true ancestors of each sequence, root first."""

    ancestor_offsets: Tensor
    """[Q_all+1] where each sequence's ancestors start in `ancestor_rows`."""

    tokens: Tensor
    """[R] token of each row; 0 at padding."""

    positions: Tensor
    """[R] position of each row in its trajectories; 0 at padding."""

    multiplicity: Tensor
    """[R] number of semantic positions each row stands for (the paper's q); 0 at padding."""

    target_rows: Tensor
    """[P_sem] compact row that predicts each semantic log-prob position, in members' order."""

    targets: Tensor
    """[P_sem] next token at each semantic log-prob position."""

    trajectory_offsets: Tensor
    """[N+1] where each trajectory's semantic log-prob positions start."""

    host: TreeIndex | None = field(default=None, init=False)
    """The same index in host memory, for `index_cache.on_host`; `from_layout` alone knows one.

    No argument, so that an index made by replacing tensors of another has no twin that lies.
    """

    @classmethod
    def from_layout(
        cls, layout: CompactLayout, device: torch.device | str | None = None
    ) -> TreeIndex:
        """Copy a layout's index arrays to ``device``; on the CPU they are shared, not copied."""

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array))

        host = cls(
            rows=layout.rows,
            compact_rows=layout.compact_rows,
            chunk_size=layout.chunk_size,
            rounds=tuple(
                RoundIndex(
                    packed_rows=tensor(packed.packed_rows),
                    cu_seqlens=tensor(packed.cu_seqlens),
                    initial_state=tensor(packed.initial_state),
                    boundaries=tensor(packed.boundaries),
                    own_positions=tensor(packed.own_positions),
                )
                for packed in layout.rounds
            ),
            sequence_offsets=tensor(layout.sequence_offsets),
            ancestor_rows=tensor(layout.ancestor_rows),
            ancestor_offsets=tensor(layout.ancestor_offsets),
            tokens=tensor(layout.tokens),
            positions=tensor(layout.positions),
            multiplicity=tensor(layout.multiplicity),
            target_rows=tensor(layout.target_rows),
            targets=tensor(layout.targets),
            trajectory_offsets=tensor(layout.position_offsets),
        )
        index = on_device(host, device)
        if index is not host:
            object.__setattr__(index, "host", host)
        return index
