"""Which rows the GPU form reads in place, which it copies, and where their gradients go.

Shapes: R physical rows · C compact rows · E copied rows · Q sequences · M boundary states ·
L slots of the state bank · F physical rows with copies · B chunk length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.errors import InputError
from harts.ops.delta_rule.gpu.chunk_lists import (
    ChunkList,
    SequencePlan,
    Span,
    StatePlan,
    segment_list,
    state_plan,
)
from harts.ops.device_copy import on_device
from harts.ops.index_cache import on_host
from harts.ops.tree_index import RoundIndex, TreeIndex


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopiedRows:
    """Chunks that mix replay with own rows, gathered behind the rows in place."""

    rows: Tensor
    """[E] physical row behind each copied row."""
    own: Tensor
    """Copied rows that are not replay."""
    own_targets: Tensor
    """Physical row of each of `own`; no other copy of it is own."""
    targets: Tensor
    """[F] int32 physical rows that have copies, ascending."""
    fresh: Tensor
    """[F] int32, 1 where the physical row itself lies in no chunk: all it gets is copies."""
    offsets: Tensor
    """[F+1] int32 where each target's copies start in `copies`."""
    copies: Tensor
    """[E] int32 copied rows, by target, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPlan:
    """Everything the GPU form needs to know of one call or one tree; holds no values."""

    rows: int
    """R, rows of the caller's tensors."""
    used_rows: int
    """Rows before the padding."""
    in_place: ChunkList
    copied_chunks: ChunkList
    copied: CopiedRows
    states: StatePlan

    @property
    def copied_rows(self) -> int:
        """E."""
        return self.copied.rows.numel()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedPlan:
    """A `RowPlan` of one packed call, and where its states lie in the bank."""

    plan: RowPlan
    final_slots: Tensor
    """[Q] bank slot of each sequence's final state; slots 0..Q-1 are the initial states."""
    boundary_slots: Tensor
    """[M] bank slot of each requested boundary state."""


@lru_cache(maxsize=64)
def plan_packed(
    starts: tuple[int, ...],
    boundaries: tuple[tuple[int, int], ...],
    *,
    rows: int,
    chunk_size: int,
    device: torch.device,
) -> PackedPlan:
    """Plan one packed call; `boundaries` are pairs (sequence, chunk) that exist.

    Kept for the last few calls, since every layer asks again.
    """
    sequences = len(starts) - 1
    slots = sequences
    cuts: list[dict[int, int]] = [{} for _ in range(sequences)]
    lengths = [end - start for start, end in pairwise(starts)]
    places = [(s, min(chunk * chunk_size, lengths[s])) for s, chunk in boundaries]
    ends = list(enumerate(lengths))
    for sequence, row in places + ends:
        if row not in cuts[sequence]:
            cuts[sequence][row] = slots
            slots += 1
    plans = [
        SequencePlan(
            spans=[Span(row=start, length=end - start, copied=False)],
            initial_slot=sequence,
            cuts=cuts[sequence],
        )
        for sequence, (start, end) in enumerate(pairwise(starts))
    ]
    plan = _row_plan(
        [plans],
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
        rows,
        starts[-1],
        slots,
        chunk_size,
    )
    packed = PackedPlan(
        plan=plan,
        final_slots=torch.tensor([cuts[s][row] for s, row in ends]),
        boundary_slots=torch.tensor([cuts[s][row] for s, row in places], dtype=torch.int64),
    )
    return on_device(packed, device)


@lru_cache(maxsize=8)
def plan_tree(index: TreeIndex) -> RowPlan:
    """Plan all rounds of a tree; kept for the last few trees, since every layer asks again."""
    builder = _TreeBuilder(index.chunk_size)
    for packed in on_host(index).rounds:
        if packed.initial_state.numel():
            builder.add_round(packed)
    copied = np.concatenate([np.zeros(0, np.int64), *builder.copied])
    own = np.concatenate([np.zeros(0, np.int64), *builder.own])
    plan = _row_plan(
        builder.rounds,
        copied,
        own,
        index.rows,
        index.compact_rows,
        builder.slots,
        index.chunk_size,
    )
    return on_device(plan, index.sequence_offsets.device)


class _TreeBuilder:
    """Turns rounds of packed rows into spans in place and copied chunks."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.rounds: list[list[SequencePlan]] = []
        self.copied: list[NDArray[np.int64]] = []
        self.own: list[NDArray[np.int64]] = []
        self.slots = 0
        self._first_of_state: list[int] = []
        self._first_own = 0
        self._copied_rows = 0

    def add_round(self, packed: RoundIndex) -> None:
        starts = packed.cu_seqlens.tolist()
        rows = packed.packed_rows.numpy()
        own = np.zeros(len(rows), dtype=bool)
        own[packed.own_positions.numpy()] = True
        lengths = [end - start for start, end in pairwise(starts)]
        cuts, slots = self._cuts(packed.boundaries.tolist(), lengths)
        plans = []
        sources = packed.initial_state.tolist()
        for sequence, (start, end) in enumerate(pairwise(starts)):
            source = sources[sequence]
            plans.append(
                SequencePlan(
                    spans=self._spans(rows[start:end], own[start:end]),
                    initial_slot=self._first_of_state[source] if source >= 0 else -1,
                    cuts=cuts[sequence],
                )
            )
        self._first_of_state += slots
        self.rounds.append(plans)

    def _cuts(
        self, boundaries: list[list[int]], lengths: list[int]
    ) -> tuple[list[Mapping[int, int]], list[int]]:
        """Cuts of each sequence, and the bank slot of each state of this round in order."""
        cuts: list[dict[int, int]] = [{} for _ in lengths]
        slots = []
        for sequence, chunk in boundaries:
            row = min(chunk * self.chunk_size, lengths[sequence])
            if row not in cuts[sequence]:
                cuts[sequence][row] = self.slots
                self.slots += 1
            slots.append(cuts[sequence][row])
        return list(cuts), slots

    def _spans(self, rows: NDArray[np.int64], own: NDArray[np.bool_]) -> list[Span]:
        replay = int(len(own) - own.sum())
        if replay >= self.chunk_size or own[:replay].any():
            raise InputError(
                f"tree delta rule: a sequence has {replay} replay rows; expected fewer than the "
                f"chunk size {self.chunk_size}, all before its own rows. Plan the calls again."
            )
        spans = []
        in_copy = min(self.chunk_size, len(rows)) if replay else 0
        if in_copy:
            spans.append(Span(row=self._copied_rows, length=in_copy, copied=True))
            self.copied.append(rows[:in_copy])
            self.own.append(self._copied_rows + np.arange(replay, in_copy))
            self._copied_rows += in_copy
        if in_copy < len(rows):
            first = self._first_own + max(in_copy - replay, 0)
            spans.append(Span(row=first, length=len(rows) - in_copy, copied=False))
        self._first_own += len(rows) - replay
        return spans


def _row_plan(
    rounds: Sequence[Sequence[SequencePlan]],
    copied: NDArray[np.int64],
    own: NDArray[np.int64],
    rows: int,
    used_rows: int,
    slots: int,
    chunk_size: int,
) -> RowPlan:
    spans = [span for one_round in rounds for plan in one_round for span in plan.spans]
    parts = [[span for span in spans if span.copied is part] for part in (False, True)]
    return RowPlan(
        rows=rows,
        used_rows=used_rows,
        in_place=segment_list(parts[0], used_rows, chunk_size),
        copied_chunks=segment_list(parts[1], len(copied), chunk_size),
        copied=_copied_rows(copied, own),
        states=state_plan(rounds, slots=slots, copied_from=rows, chunk_size=chunk_size),
    )


def _copied_rows(copied: NDArray[np.int64], own: NDArray[np.int64]) -> CopiedRows:
    order = np.argsort(copied, kind="stable")
    targets, first = np.unique(copied[order], return_index=True)

    def tensor(values: NDArray[np.generic], dtype: type) -> Tensor:
        return torch.from_numpy(values.astype(dtype))

    return CopiedRows(
        rows=tensor(copied, np.int64),
        own=tensor(own, np.int64),
        own_targets=tensor(copied[own], np.int64),
        targets=tensor(targets, np.int32),
        fresh=tensor(np.isin(targets, copied[own]), np.int32),
        offsets=tensor(np.append(first, len(copied)), np.int32),
        copies=tensor(order, np.int32),
    )
