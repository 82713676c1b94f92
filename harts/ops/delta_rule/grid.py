"""Chunks of packed sequences as one tree: each chunk starts from the state after its parent.

Inside a sequence a chunk's parent is the chunk before it; a sequence that starts from a boundary
state of another has its parent there. The rounds of a compact tree, which are packed calls one
after the other, thus become levels, and there are only as many as the longest path has chunks.

Shapes: R physical rows · P packed rows · Q sequences · M initial states · Z chunks of all
sequences · B chunk length · L levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from harts.errors import InputError
from harts.ops.device_copy import on_device
from harts.ops.index_cache import derived, on_host
from harts.ops.stretches import Int, before, stretches
from harts.ops.tree_index import TreeIndex


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
    lengths: list[Int]
    parents: list[Int]
    """[Q] state that each sequence starts from."""
    levels: list[Int]
    """[Q] level of each sequence's first chunk."""
    bank: Int
    """States handed out so far."""
    bank_levels: Int
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

    def add(self, starts: list[int], parents: Int, levels: Int, boundaries: Tensor | None) -> None:
        """Add sequences [starts[i], starts[i+1]) and hand out the states before some chunks."""
        lengths = np.diff(np.array(starts))
        first = self.chunks + before(-(-lengths // self.chunk_size))
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

    def grid(self, rows: Int, own_packed: Int) -> ChunkGrid:
        """Order the chunks; ``rows`` [P] as in `ChunkGrid`, ``own_packed`` [C] its own ones.

        Its tensors are in host memory.
        """
        size, states = self.chunk_size, self.initial_states
        lengths = np.concatenate(self.lengths)
        counts = -(-lengths // size)
        sequence = np.repeat(np.arange(len(counts)), counts)
        first = before(counts)
        chunk = stretches(np.zeros_like(counts), counts)
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
        local = stretches(np.zeros_like(lengths), lengths)
        chunk_of_row = np.repeat(first, lengths) + local // size
        grid_rows = (place[states + chunk_of_row] - states) * size + local % size
        replays = np.ones(len(rows), dtype=bool)
        replays[own_packed] = False
        return ChunkGrid(
            chunk_size=size,
            chunks=self.chunks,
            levels=_levels(np.bincount(level), parents),
            parents=torch.from_numpy(parents),
            rows=torch.from_numpy(rows),
            grid_rows=torch.from_numpy(grid_rows),
            own=torch.from_numpy(grid_rows[own_packed]),
            replay=torch.from_numpy(np.flatnonzero(replays)),
            final_states=torch.from_numpy(place[states + first + counts - 1]),
            boundary_states=torch.from_numpy(place[self.bank]),
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
    rows = np.arange(starts[-1])
    return on_device(sequences.grid(rows, rows), device)


def tree_grid(index: TreeIndex) -> ChunkGrid:
    """All rounds of a tree that has any row; the one initial state is zero. Kept with the index."""
    return derived(index, "delta_rule_grid", _tree_grid)


def _tree_grid(index: TreeIndex) -> ChunkGrid:
    sequences = _Sequences.none(index.chunk_size, 1)
    rows, own, packed_before = [], [], 0
    for packed in on_host(index).rounds:
        if packed.initial_state.numel() == 0:
            continue
        source = packed.initial_state.numpy()
        # The zero state goes in front, so that source -1 is an ordinary entry.
        bank = np.concatenate([[0], sequences.bank])
        bank_levels = np.concatenate([[0], sequences.bank_levels])
        sequences.add(
            packed.cu_seqlens.tolist(), bank[source + 1], bank_levels[source + 1], packed.boundaries
        )
        rows.append(packed.packed_rows.numpy())
        own.append(packed.own_positions.numpy() + packed_before)
        packed_before += len(packed.packed_rows)
    grid = sequences.grid(np.concatenate(rows), np.concatenate(own))
    return on_device(grid, index.sequence_offsets.device)


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


def _levels(counts: Int, parents: Int) -> tuple[Level, ...]:
    """Levels of ``counts`` [L] chunks each; ``parents`` [Z] in grid order."""
    levels, first = [], 0
    for count in counts.tolist():
        of_level = parents[first : first + count]
        start = int(of_level[0])
        contiguous = bool((of_level == start + np.arange(count)).all())
        levels.append(
            Level(
                chunks=slice(first, first + count),
                parents=slice(start, start + count) if contiguous else torch.from_numpy(of_level),
            )
        )
        first += count
    return tuple(levels)
