"""Where every chunk of every sequence lies, so that one launch can serve many sequences.

Kernels work in one row buffer: first the rows as the caller holds them, then a copy of each
chunk that mixes replay rows with own rows. All other chunks are read in place.

Shapes: R rows of the caller's tensors · E copied rows · Q sequences of all rounds · U pieces ·
L slots of the state bank · B chunk length · Z chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from harts.ops.stretches import stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive buffer rows that are consecutive rows of one sequence, from a chunk start on."""

    row: int
    length: int
    copied: bool
    """Whether `row` counts from the first copied row instead of from row 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequencePlan:
    """One sequence: its rows, the state it starts from and the states it hands out."""

    spans: Sequence[Span]
    initial_slot: int
    """Bank slot of the initial state; -1 is the zero state."""
    cuts: Mapping[int, int]
    """Bank slot of the state after so many rows: a multiple of B, or the whole length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkList:
    """Chunks of one part of the buffer, for kernels that take each chunk by itself."""

    cu_seqlens: Tensor
    """[n+1] int32 rows, relative to the part, that cut it into segments; some are in no chunk."""
    chunks: Tensor
    """[Z, 2] int32 pairs (segment, chunk of that segment)."""
    rows: int
    """Rows that the segments cover."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """Sequences as runs of pieces: what a state pass reads. All int32."""

    initial_slots: Tensor
    """[n] bank slot at which each walk starts; -1 is the zero state."""
    piece_offsets: Tensor
    """[n+1] where each walk's pieces start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Rows between two places where a state is read, handed out or where rows jump. All int32."""

    rows: Tensor
    """[U] first buffer row."""
    lengths: Tensor
    """[U] rows; 0 where the initial state itself is asked for."""
    chunks: Tensor
    """[U] number of its first chunk, among the chunks in place and then the copied ones."""
    slots: Tensor
    """[U] bank slot of the state at its end; -1 for none."""
    consumer_offsets: Tensor
    """[U+1] where its consumers start."""
    consumers: Tensor
    """Sequences that start from the state at its end, in ascending order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatePlan:
    """The sequential part: all sequences in order of rounds, and their states."""

    chunk_size: int
    chunks: int
    """Z, chunks in place and copied."""
    slots: int
    """L, states in the bank."""
    copied_from: int
    """R, the buffer row at which copied rows start."""
    pieces: Pieces
    sequences: Walk
    """The Q sequences."""
    round_offsets: tuple[int, ...]
    """Sequences [a, b) of each round; a round needs the states of earlier rounds only."""
    segments: Walk
    """The same pieces, cut wherever a state is in the bank: all start at once in a second pass."""


def segment_list(spans: Sequence[Span], rows: int, chunk_size: int) -> ChunkList:
    """Cut [0, rows) at the spans, which ascend and do not overlap; rows between have no chunk."""
    cuts, segments, covered = [0], [], 0
    for span in spans:
        if span.row > covered:
            cuts.append(span.row)
        covered = span.row + span.length
        segments.append(len(cuts) - 1)
        cuts.append(covered)
    if covered < rows:
        cuts.append(rows)
    counts = -(-np.diff(cuts)[segments] // chunk_size)
    chunks = np.stack([np.repeat(segments, counts), stretches(np.zeros_like(counts), counts)], 1)
    return ChunkList(cu_seqlens=_integers(cuts), chunks=_integers(chunks), rows=rows)


def state_plan(
    rounds: Sequence[Sequence[SequencePlan]],
    *,
    slots: int,
    copied_from: int,
    chunk_size: int,
) -> StatePlan:
    """Lay out the pieces of all sequences; copied rows start at buffer row `copied_from`."""
    sequences = [sequence for one_round in rounds for sequence in one_round]
    in_place = sum(
        -(-span.length // chunk_size) for s in sequences for span in s.spans if not span.copied
    )
    walker = _Walker(chunk_size, copied_from, in_place)
    lists = [walker.pieces(sequence) for sequence in sequences]
    pieces = [piece for one in lists for piece in one]
    consumers = _consumers(sequences, slots)
    per_piece = [consumers[slot] if slot >= 0 else [] for *_, slot in pieces]
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    rows, lengths, chunks, ends = (_integers(column) for column in columns)
    return StatePlan(
        chunk_size=chunk_size,
        chunks=walker.copied_chunk,
        slots=slots,
        copied_from=copied_from,
        pieces=Pieces(
            rows=rows,
            lengths=lengths,
            chunks=chunks,
            slots=ends,
            consumer_offsets=_offsets([len(one) for one in per_piece]),
            consumers=_integers([c for one in per_piece for c in one]),
        ),
        sequences=Walk(
            initial_slots=_integers([s.initial_slot for s in sequences]),
            piece_offsets=_offsets([len(one) for one in lists]),
        ),
        round_offsets=tuple(accumulate((len(one) for one in rounds), initial=0)),
        segments=_segments(sequences, lists),
    )


class _Walker:
    """Numbers chunks while it cuts sequences into pieces (row, length, first chunk, slot)."""

    def __init__(self, chunk_size: int, copied_from: int, in_place_chunks: int) -> None:
        self.chunk_size = chunk_size
        self.copied_from = copied_from
        self.chunk = 0
        self.copied_chunk = in_place_chunks

    def pieces(self, sequence: SequencePlan) -> list[tuple[int, int, int, int]]:
        cuts = sorted(sequence.cuts.items())
        found = []
        begin = position = taken = 0
        for span in sequence.spans:
            first_row, first_chunk = self._place(span)
            end = begin + span.length
            stops = []
            while taken < len(cuts) and cuts[taken][0] <= end:
                stops.append(cuts[taken])
                taken += 1
            if position < end and (not stops or stops[-1][0] < end):
                stops.append((end, -1))
            for stop, slot in stops:
                ahead = position - begin
                piece = (
                    first_row + ahead,
                    stop - position,
                    first_chunk + ahead // self.chunk_size,
                    slot,
                )
                found.append(piece)
                position = stop
            begin = end
        return found

    def _place(self, span: Span) -> tuple[int, int]:
        count = -(-span.length // self.chunk_size)
        if span.copied:
            self.copied_chunk += count
            return self.copied_from + span.row, self.copied_chunk - count
        self.chunk += count
        return span.row, self.chunk - count


def _consumers(sequences: Sequence[SequencePlan], slots: int) -> list[list[int]]:
    consumers: list[list[int]] = [[] for _ in range(slots)]
    for number, sequence in enumerate(sequences):
        if sequence.initial_slot >= 0:
            consumers[sequence.initial_slot].append(number)
    return consumers


def _segments(
    sequences: Sequence[SequencePlan],
    lists: Sequence[Sequence[tuple[int, int, int, int]]],
) -> Walk:
    initial, counts = [], []
    for sequence, pieces in zip(sequences, lists, strict=True):
        slot, count = sequence.initial_slot, 0
        for *_, end_slot in pieces:
            count += 1
            if end_slot >= 0:
                initial.append(slot)
                counts.append(count)
                slot, count = end_slot, 0
        if count:
            initial.append(slot)
            counts.append(count)
    return Walk(initial_slots=_integers(initial), piece_offsets=_offsets(counts))


def _integers(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


def _offsets(counts: Sequence[int]) -> Tensor:
    return _integers(list(accumulate(counts, initial=0)))
