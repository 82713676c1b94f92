"""Where each packed row lies when every sequence is cut into chunks of B rows.

Shapes: P packed rows of one call · Q sequences in a call · M requested boundary states ·
B chunk length · Z chunks of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from harts.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkGrid:
    """Z chunks ordered by chunk index, then by sequence rank (longest sequence first).

    Chunk c of all sequences that have one is then a contiguous slice, and the sequences still
    alive at c + 1 are its first ranks, so the state pass needs no gather.
    """

    chunk_size: int
    rows: Tensor
    """[cu_seqlens[-1]] grid row (chunk * B + phase) of each packed row."""

    alive: tuple[int, ...]
    """Number of sequences that have a chunk c, for each c; the first is Q and they never rise."""

    order: Tensor
    """[Q] sequence at each rank."""

    rank: Tensor
    """[Q] rank of each sequence."""

    chunk_counts: tuple[int, ...]
    """[Q] chunks of each sequence."""

    lengths: tuple[int, ...]
    """[Q] rows of each sequence."""

    @property
    def chunks(self) -> int:
        """Z, the chunks of all sequences."""
        return sum(self.alive)

    @classmethod
    def build(cls, starts: list[int], chunk_size: int, device: torch.device) -> ChunkGrid:
        """Lay out sequences [starts[i], starts[i+1]), each starting at chunk phase 0.

        Raises:
            InputError: chunk_size is not a power of two, which halving a chunk needs.
        """
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            raise InputError(f"delta rule: chunk_size must be a power of two; got {chunk_size}.")
        lengths = tuple(end - start for start, end in pairwise(starts))
        counts = tuple(-(-length // chunk_size) for length in lengths)
        order = sorted(range(len(counts)), key=lambda i: -counts[i])
        rank = [0] * len(order)
        for position, sequence in enumerate(order):
            rank[sequence] = position
        alive = _alive_sequences(counts)
        first = torch.tensor([0, *accumulate(alive)], device=device)
        ranks = torch.tensor(rank, device=device)
        spans = torch.tensor(lengths, device=device)
        local = torch.arange(starts[-1], device=device) - torch.repeat_interleave(
            torch.tensor(starts[:-1], device=device), spans
        )
        chunk = local // chunk_size
        rows = (first[chunk] + ranks.repeat_interleave(spans)) * chunk_size + local % chunk_size
        return cls(
            chunk_size=chunk_size,
            rows=rows,
            alive=alive,
            order=torch.tensor(order, device=device),
            rank=ranks,
            chunk_counts=counts,
            lengths=lengths,
        )

    def scatter(self, rows: Tensor) -> Tensor:
        """Copy packed rows [P, G, ...] to [Z, G, B, ...]; phases past a sequence's end are zero."""
        trailing = rows.shape[1:]
        padded = rows.new_zeros((self.chunks * self.chunk_size, *trailing))
        padded = padded.index_copy(0, self.rows, rows[: self.rows.numel()])
        return padded.view(self.chunks, self.chunk_size, *trailing).transpose(1, 2).contiguous()

    def gather(self, chunks: Tensor, rows: int) -> Tensor:
        """Copy [Z, G, B, V] back to packed rows [P = rows, G, V]; rows past the last are zero."""
        flat = chunks.transpose(1, 2).flatten(0, 1)
        packed = flat.index_select(0, self.rows)
        if packed.shape[0] == rows:
            return packed
        return torch.cat([packed, packed.new_zeros((rows - packed.shape[0], *packed.shape[1:]))])

    def boundary_index(self, boundaries: Tensor) -> Tensor:
        """Turn pairs (sequence, chunk) [M, 2] into rows of the state buffer [Z + Q].

        The buffer holds the state before each chunk, in grid order, then the final states by rank.

        Raises:
            InputError: not [M, 2] integers, or a state the sequence never has.
        """
        first = [0, *accumulate(self.alive)]
        ranks = self.rank.tolist()
        index = []
        starts = [0, *accumulate(self.lengths)]
        for sequence, chunk in check_boundaries(boundaries, starts, self.chunk_size):
            row = self.chunks if chunk == self.chunk_counts[sequence] else first[chunk]
            index.append(row + ranks[sequence])
        return torch.tensor(index, device=self.rows.device, dtype=torch.int64)


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
        if not 0 <= chunk * chunk_size <= lengths[sequence]:
            raise InputError(
                f"delta rule: boundary asks for the state before chunk {chunk} (row "
                f"{chunk * chunk_size}) of sequence {sequence}, which has {lengths[sequence]} "
                f"rows. Only states at a multiple of the chunk size {chunk_size} within the "
                "sequence exist."
            )
        pairs.append((sequence, chunk))
    return pairs


def _alive_sequences(counts: tuple[int, ...]) -> tuple[int, ...]:
    """How many sequences have a chunk c, for each c."""
    ending = [0] * (max(counts) + 1)
    for count in counts:
        ending[count] += 1
    remaining, alive = len(counts), []
    for chunk in range(max(counts)):
        remaining -= ending[chunk]
        alive.append(remaining)
    return tuple(alive)
