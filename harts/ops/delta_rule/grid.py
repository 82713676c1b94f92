"""Chunks of packed sequences as one tree: each chunk starts from the state after its parent.

Inside a sequence a chunk's parent is the chunk before it; a sequence that starts from a boundary
state of another has its parent there. The rounds of a compact tree, which are packed calls one
after the other, thus become levels, and there are only as many as the longest path has chunks.

Shapes: R physical rows · P packed rows · Q sequences · M initial states · Z chunks of all
sequences · B chunk length · L levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.errors import InputError
from harts.ops.index_cache import derived
from harts.ops.tree_index import TreeIndex

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Chunks whose parents all lie in earlier levels."""

    chunks: slice
    parents: slice | Tensor
    """States that they start from, in the state buffer; a slice where those are contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkGrid:
    """Z chunks by level, in each level those with most chunks of their sequence to come first.

    Grid row z * B + phase is a row of chunk z. The state buffer [M + Z] holds the initial states,
    then the state after each chunk.
    """

    chunk_size: int
    chunks: int
    """Z."""
    levels: tuple[Level, ...]
    parents: Tensor
    """[Z] state that each chunk starts from, in the state buffer."""
    rows: Tensor
    """[P] row of the caller's tensors behind each packed row."""
    grid_rows: Tensor
    """[P] grid row of each packed row."""
    own: Tensor
    """[C] grid row of each of the rows 0..C-1 of the caller's tensors; other packed rows replay."""
    replay: Tensor
    """[P - C] packed rows that repeat a row for the sake of the state."""
    final_states: Tensor
    """[Q] state after each sequence, in the state buffer."""
    boundary_states: Tensor
    """[all boundaries] states that were asked for, in the state buffer, in the order asked."""


@dataclass(slots=True, kw_only=True)
class _Sequences:
    """Sequences as they are added. States are numbered as in the buffer, chunks not yet ordered."""

    chunk_size: int
    initial_states: int
    lengths: list[IntArray]
    parents: list[IntArray]
    """[Q] state that each sequence starts from."""
    levels: list[IntArray]
    """[Q] level of each sequence's first chunk."""
    bank: IntArray
    """States handed out so far."""
    bank_levels: IntArray
    """Level of a chunk that starts from each."""
    chunks: int = 0

    @classmethod
    def none(cls, chunk_size: int, initial_states: int) -> _Sequences:
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            raise InputError(f"delta rule: chunk_size must be a power of two; got {chunk_size}.")
        return cls(
            chunk_size=chunk_size,
            initial_states=initial_states,
            lengths=[],
            parents=[],
            levels=[],
            bank=np.zeros(0, np.int64),
            bank_levels=np.zeros(0, np.int64),
        )

    def add(
        self, starts: list[int], parents: IntArray, levels: IntArray, boundaries: Tensor | None
    ) -> None:
        """Add sequences [starts[i], starts[i+1]) and hand out the states before some chunks."""
        lengths = np.diff(np.array(starts))
        first = self.chunks + _before(-(-lengths // self.chunk_size))
        if boundaries is not None:
            pairs = check_boundaries(boundaries, starts, self.chunk_size)
            sequence, chunk = np.array(pairs, np.int64).reshape(-1, 2).T
            after = self.initial_states + first[sequence] + chunk - 1
            handed_out = np.where(chunk > 0, after, parents[sequence])
            self.bank = np.concatenate([self.bank, handed_out])
            self.bank_levels = np.concatenate([self.bank_levels, levels[sequence] + chunk])
        self.lengths.append(lengths)
        self.parents.append(parents)
        self.levels.append(levels)
        self.chunks = int(first[-1]) + -(-int(lengths[-1]) // self.chunk_size)

    def grid(self, rows: Tensor, own_packed: Tensor) -> ChunkGrid:
        """Order the chunks; ``rows`` [P] as in `ChunkGrid`, ``own_packed`` [C] its own ones."""
        size, states, device = self.chunk_size, self.initial_states, rows.device
        lengths = np.concatenate(self.lengths)
        counts = -(-lengths // size)
        sequence = np.repeat(np.arange(len(counts)), counts)
        first = _before(counts)
        chunk = np.arange(self.chunks) - first[sequence]
        level = np.concatenate(self.levels)[sequence] + chunk
        parents = np.where(
            chunk > 0,
            states + np.arange(self.chunks) - 1,
            np.concatenate(self.parents)[sequence],
        )
        order = np.lexsort((sequence, chunk - counts[sequence], level))
        place = np.empty(states + self.chunks, np.int64)
        place[:states] = np.arange(states)
        place[states + order] = states + np.arange(self.chunks)
        parents = place[parents[order]]
        local = np.arange(int(lengths.sum())) - np.repeat(_before(lengths), lengths)
        chunk_of_row = np.repeat(first, lengths) + local // size
        grid_rows = _tensor(
            (place[states + chunk_of_row] - states) * size + local % size, rows.device
        )
        replays = torch.ones(len(rows), dtype=torch.bool, device=device)
        replays[own_packed] = False
        return ChunkGrid(
            chunk_size=size,
            chunks=self.chunks,
            levels=_levels(np.bincount(level), parents, device),
            parents=_tensor(parents, device),
            rows=rows,
            grid_rows=grid_rows,
            own=grid_rows[own_packed],
            replay=replays.nonzero().squeeze(1),
            final_states=_tensor(place[states + first + counts - 1], device),
            boundary_states=_tensor(place[self.bank], device),
        )


def packed_grid(
    starts: list[int], boundaries: Tensor | None, chunk_size: int, device: torch.device
) -> ChunkGrid:
    """Sequences [starts[i], starts[i+1]) of one packed call; sequence i has initial state i.

    Raises:
        InputError: chunk_size is not a power of two, which halving a chunk needs, or a boundary
            that does not exist.
    """
    count = len(starts) - 1
    sequences = _Sequences.none(chunk_size, count)
    sequences.add(starts, np.arange(count), np.zeros(count, np.int64), boundaries)
    rows = torch.arange(starts[-1], device=device)
    return sequences.grid(rows, rows)


def tree_grid(index: TreeIndex) -> ChunkGrid:
    """All rounds of a tree that has any row; the one initial state is zero. Kept with the index."""
    return derived(index, "delta_rule_grid", _tree_grid)


def _tree_grid(index: TreeIndex) -> ChunkGrid:
    sequences = _Sequences.none(index.chunk_size, 1)
    rows, own, packed_before = [], [], 0
    for packed in index.rounds:
        if packed.initial_state.numel() == 0:
            continue
        source = packed.initial_state.cpu().numpy()
        # The zero state goes in front, so that source -1 is an ordinary entry.
        bank = np.concatenate([[0], sequences.bank])
        bank_levels = np.concatenate([[0], sequences.bank_levels])
        sequences.add(
            packed.cu_seqlens.tolist(), bank[source + 1], bank_levels[source + 1], packed.boundaries
        )
        rows.append(packed.packed_rows)
        own.append(packed.own_positions + packed_before)
        packed_before += len(packed.packed_rows)
    return sequences.grid(torch.cat(rows), torch.cat(own))


def check_boundaries(
    boundaries: Tensor, starts: list[int], chunk_size: int
) -> list[tuple[int, int]]:
    """Pairs (sequence, chunk) [M, 2] as integers; sequence i is rows [starts[i], starts[i+1]).

    Raises:
        InputError: not [M, 2] integers, or a state the sequence never has.
    """
    if boundaries.dim() != 2 or boundaries.shape[1] != 2 or boundaries.is_floating_point():
        raise InputError(
            "delta rule: boundaries must be integers [M, 2] (sequence, chunk); got "
            f"{boundaries.dtype} {tuple(boundaries.shape)}."
        )
    lengths = [end - start for start, end in pairwise(starts)]
    pairs = []
    for sequence, chunk in boundaries.tolist():
        if not 0 <= sequence < len(lengths):
            raise InputError(
                f"delta rule: boundary asks for sequence {sequence} of {len(lengths)}."
            )
        chunks = -(-lengths[sequence] // chunk_size)
        if not 0 <= chunk <= chunks:
            raise InputError(
                f"delta rule: boundary asks for the state before chunk {chunk} of sequence "
                f"{sequence}, whose {lengths[sequence]} rows are {chunks} chunks. States 0 to "
                f"{chunks} exist, the last after all rows."
            )
        pairs.append((sequence, chunk))
    return pairs


def _levels(counts: IntArray, parents: IntArray, device: torch.device) -> tuple[Level, ...]:
    """Levels of ``counts`` [L] chunks each; ``parents`` [Z] in grid order."""
    levels, first = [], 0
    for count in counts.tolist():
        of_level = parents[first : first + count]
        start = int(of_level[0])
        contiguous = bool((of_level == start + np.arange(count)).all())
        levels.append(
            Level(
                chunks=slice(first, first + count),
                parents=slice(start, start + count) if contiguous else _tensor(of_level, device),
            )
        )
        first += count
    return tuple(levels)


def _before(counts: IntArray) -> IntArray:
    """Sum of all earlier entries."""
    before: IntArray = np.cumsum(counts) - counts
    return before


def _tensor(values: IntArray | Sequence[int], device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.int64), device=device)
