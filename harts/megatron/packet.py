"""One microbatch on its way through a Megatron model.

Megatron hands packed-sequence parameters from the model to every layer, on every pipeline stage,
and closes over them where it recomputes. A subclass of them therefore takes the tree to whoever
needs it, and a recomputed layer sees the plan of its own microbatch.

Shapes: R physical rows, a multiple of TP times CP · P log-prob positions of the microbatch.

Rows are cut contiguously: first among the ranks of context parallelism, then, between layers,
among the ranks of tensor parallelism (sequence parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from harts.errors import InputError, UnsupportedError
from harts.layout import CompactLayout
from harts.megatron.ranks import ParallelRanks
from harts.ops.device_copy import on_device
from harts.ops.router import TrajectoryRows
from harts.ops.tree_index import TreeIndex
from harts.training.step import RouterLosses, StepScale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterTask:
    """What the routers of a microbatch add to the step's losses."""

    losses: RouterLosses
    scale: StepScale
    trajectories: TrajectoryRows | None = None
    """Of the rows of this rank between layers, where the balancing form needs them."""
    only_counts: bool = False
    """A forward before all others, which learns the assignments of the step."""


@dataclass(kw_only=True)
class TreePacket(PackedSeqParams):  # type: ignore[misc]
    """The tree of one microbatch and this rank's share of its rows."""

    tree: TreeIndex | None = None
    context_rows: slice = field(default_factory=lambda: slice(0, 0))
    """Rows of this rank of context parallelism, R / CP."""
    sequence_rows: slice = field(default_factory=lambda: slice(0, 0))
    """Rows of this rank between layers, R / (CP TP)."""
    router: RouterTask | None = None
    """What routers add up; None for a filler, which adds nothing."""
    own_positions: Tensor | None = None
    """[P'] the positions whose row is among ``context_rows``."""

    @property
    def multiplicity(self) -> Tensor:
        """Occurrences q of the rows of this rank between layers; 0 in padding."""
        return tree_of(self).multiplicity[self.sequence_rows]

    def target_rows(self) -> Tensor:
        """[P'] row, counted from the first of ``context_rows``, that predicts each own position."""
        assert self.own_positions is not None
        rows: Tensor = tree_of(self).target_rows[self.own_positions] - self.context_rows.start
        return rows

    def targets(self) -> Tensor:
        """[P'] next token of each own position."""
        assert self.own_positions is not None
        return tree_of(self).targets[self.own_positions]


def make_packet(
    layout: CompactLayout,
    ranks: ParallelRanks,
    device: torch.device | str,
    *,
    router: RouterTask | None,
) -> TreePacket:
    """Cut one microbatch for this rank.

    Args:
        layout: laid out with ``row_multiple`` a multiple of TP times CP.
        ranks: where this process stands.
        device: where the index tensors go.
        router: what its routers do, trajectories aside; None for a filler.

    Raises:
        InputError: the rows cannot be cut into equal parts.
    """
    parts = ranks.tp_size * ranks.cp_size
    if layout.rows % parts:
        raise InputError(
            f"{layout.rows} rows cannot be cut into {parts} equal parts (tensor parallel size "
            f"{ranks.tp_size} times context parallel size {ranks.cp_size}); build the layout with "
            f"row_multiple={parts}"
        )
    tree = TreeIndex.from_layout(layout, device)
    first, last = _share(0, layout.rows, ranks.cp_rank, ranks.cp_size)
    between = slice(*_share(first, last, ranks.tp_rank, ranks.tp_size))
    if router is not None and router.losses.load_balancing == "sequence":
        rows = TrajectoryRows.from_layout(layout, device)
        router = replace(router, trajectories=replace(rows, runs=rows.runs[between]))
    own = np.flatnonzero((layout.target_rows >= first) & (layout.target_rows < last))
    return TreePacket(
        tree=tree,
        context_rows=slice(first, last),
        sequence_rows=between,
        router=router,
        own_positions=on_device(torch.from_numpy(own), device),
    )


def _share(first: int, last: int, rank: int, size: int) -> tuple[int, int]:
    rows = (last - first) // size
    return first + rank * rows, first + (rank + 1) * rows


def tree_of(packet: PackedSeqParams | None) -> TreeIndex:
    """The tree that a layer was called with.

    Raises:
        UnsupportedError: the layer was called without one.
    """
    tree = getattr(packet, "tree", None)
    if not isinstance(tree, TreeIndex):
        raise UnsupportedError(
            "a layer of harts.megatron was called without a rollout tree: pass a TreePacket as "
            "packed_seq_params, as MegatronEngine does. Inference through Megatron is not supported"
        )
    return tree
