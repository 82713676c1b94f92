"""The compact layout: one physical row order for every layer of the model (sections 3.4, 4.2).

Shapes: S semantic positions · C compact rows · R physical rows (C and padding) · P packed rows
(own and replay) of one call · N trajectories · Q sequences in a call · V segments · B chunk size.

Rows follow the call plan: round by round, sequence by sequence, each sequence's segments
contiguous. Every index array an operator needs is derived here once, on the host, from a fixed
plan; layers and recomputation only read it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.errors import PlanError
from harts.forest import PrefixForest
from harts.planning.calls import CallPlan, PackedSequence, StateRef
from harts.trajectories import TrajectoryBatch

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundLayout:
    """One packed linear-attention call in physical rows."""

    packed_rows: Int
    """[P] physical row behind each packed row; a sequence is its replay, then its own rows."""
    cu_seqlens: Int
    """[Q + 1] bounds of the sequences among the packed rows."""
    initial_state: Int
    """[Q] number of the initial state among all requested states so far; -1 is the zero state."""
    boundaries: Int
    """[M, 2] (sequence, chunk): the state before this chunk of the sequence is kept, in order; the
    number of chunks stands for the state after all rows."""
    own_positions: Int
    """[own] packed positions of own rows; over all rounds, in order, they are rows 0..C-1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompactLayout:
    """A microbatch in compact coordinates."""

    chunk_size: int
    tokens: Int
    """[R] token of each row; 0 in padding."""
    positions: Int
    """[R] position in the original trajectory; 0 in padding."""
    multiplicity: Int
    """[R] q of Eq. 20, occurrences of each row among the trajectories; 0 in padding."""
    rounds: tuple[RoundLayout, ...]
    sequence_offsets: Int
    """[Q_all + 1] own rows of sequence i are [offsets[i], offsets[i + 1])."""
    ancestor_rows: Int
    """All true ancestors of every sequence, root first, one sequence after the other."""
    ancestor_offsets: Int
    """[Q_all + 1] bounds of the sequences in ``ancestor_rows``."""
    members: Int
    """[N] rows of the trajectories in their batch, ascending."""
    member_rows: Int
    """[S] physical row m(s) of every semantic position, trajectory by trajectory."""
    member_offsets: Int
    """[N + 1] bounds of the trajectories in ``member_rows``."""
    target_rows: Int
    """[S - N] physical row that predicts each semantic next token."""
    targets: Int
    """[S - N] the next token of each semantic position but the last of a trajectory."""

    @property
    def compact_rows(self) -> int:
        """C: rows that carry a token."""
        return int(self.sequence_offsets[-1])

    @property
    def rows(self) -> int:
        """R: physical rows, padding included."""
        return len(self.tokens)

    @property
    def position_offsets(self) -> Int:
        """[N + 1] bounds of the trajectories in ``target_rows`` and ``targets``."""
        return self.member_offsets - np.arange(len(self.member_offsets))


def build_layout(
    batch: TrajectoryBatch, forest: PrefixForest, calls: CallPlan, *, row_multiple: int = 1
) -> CompactLayout:
    """Lay out one microbatch.

    Args:
        batch: the trajectories that ``forest.members`` number.
        forest: prefix forest of the microbatch's trajectories.
        calls: call plan of the forest's segments.
        row_multiple: R is padded up to a multiple of this.

    Raises:
        PlanError: the plan uses a state that no earlier round made, or misses a segment.
    """
    sequences = calls.sequences
    chains = np.array([v for s in sequences for v in s.chain], dtype=np.int64)
    _check_every_segment_once(chains, len(forest.segment_parent))
    row_of = forest.compact_map(_physical_rows(forest, chains))
    own = np.array([forest.segment_lengths[list(s.chain)].sum() for s in sequences], dtype=np.int64)
    sequence_offsets = _offsets(own)
    ancestors = [_ancestors(forest, row_of, s) for s in sequences]
    rows = -(-forest.compact_tokens // row_multiple) * row_multiple
    by_input = np.argsort(forest.members, kind="stable")
    members = forest.members[by_input]
    member_rows = np.concatenate([row_of[i] for i in by_input])
    bounds = [(int(batch.offsets[i]), int(batch.offsets[i + 1])) for i in members]
    tokens, positions = _rows_of_segments(batch, forest, chains, rows)
    return CompactLayout(
        chunk_size=calls.chunk_size,
        tokens=tokens,
        positions=positions,
        multiplicity=np.bincount(member_rows, minlength=rows).astype(np.int64),
        rounds=tuple(_round_layouts(forest, calls, sequence_offsets, ancestors)),
        sequence_offsets=sequence_offsets,
        ancestor_rows=np.concatenate(ancestors),
        ancestor_offsets=_offsets(np.array([len(a) for a in ancestors], dtype=np.int64)),
        members=members,
        member_rows=member_rows,
        member_offsets=_offsets(forest.lengths[by_input]),
        target_rows=np.concatenate([row_of[i][:-1] for i in by_input]),
        targets=np.concatenate([batch.tokens[a + 1 : b] for a, b in bounds]).astype(np.int64),
    )


def _check_every_segment_once(chains: Int, segments: int) -> None:
    if not np.array_equal(np.sort(chains), np.arange(segments)):
        raise PlanError(
            f"the call plan runs {len(chains)} segments, expected each of {segments} exactly once; "
            "plan the calls anew for this forest"
        )


def _physical_rows(forest: PrefixForest, chains: Int) -> Int:
    """[C] physical row of every compact token, segments laid end to end in chain order."""
    lengths = forest.segment_lengths
    physical_start = np.empty(len(lengths), dtype=np.int64)
    physical_start[chains] = np.cumsum(lengths[chains]) - lengths[chains]
    rows: Int = np.arange(forest.compact_tokens)
    rows += np.repeat(physical_start - forest.segment_offset, lengths)
    return rows


def _rows_of_segments(
    batch: TrajectoryBatch, forest: PrefixForest, chains: Int, rows: int
) -> tuple[Int, Int]:
    """[R] token and position of every row, segments laid end to end in chain order."""
    tokens, positions = np.zeros((2, rows), dtype=np.int64)
    starts, ends = forest.segment_start[chains], forest.segment_end[chains]
    first = batch.offsets[forest.members[forest.segment_member[chains]]]
    of_segments = zip((first + starts).tolist(), (first + ends).tolist(), strict=True)
    compact = forest.compact_tokens
    tokens[:compact] = np.concatenate([batch.tokens[a:b] for a, b in of_segments])
    lengths = ends - starts
    positions[:compact] = np.arange(compact)
    positions[:compact] += np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return tokens, positions


def _ancestors(forest: PrefixForest, row_of: list[Int], sequence: PackedSequence) -> Int:
    head = sequence.chain[0]
    rows: Int = row_of[forest.segment_member[head]][: forest.segment_start[head]]
    return rows


def _round_layouts(
    forest: PrefixForest, calls: CallPlan, sequence_offsets: Int, ancestors: list[Int]
) -> Iterable[RoundLayout]:
    """Translate each round to packed rows; requested states are numbered as they are made."""
    bank: dict[StateRef, int] = {}
    number = 0
    for packed in calls.rounds:
        rows: list[Int] = []
        own: list[Int] = []
        initial: list[int] = []
        boundaries: list[tuple[int, int]] = []
        made: list[StateRef] = []
        lengths = np.zeros(len(packed), dtype=np.int64)
        filled = 0
        for i, sequence in enumerate(packed):
            lo, hi = sequence.replay
            first, last = sequence_offsets[number : number + 2]
            rows += [ancestors[number][lo:hi], np.arange(first, last)]
            lengths[i] = hi - lo + last - first
            own.append(np.arange(filled + hi - lo, filled + lengths[i]))
            filled += int(lengths[i])
            initial.append(_state_number(bank, sequence))
            boundaries += [(i, -(-(p - lo) // calls.chunk_size)) for p in sequence.boundaries]
            made += [_producer(forest, sequence, p) for p in sequence.boundaries]
            number += 1
        for state in made:
            bank[state] = len(bank)
        yield RoundLayout(
            packed_rows=np.concatenate(rows),
            cu_seqlens=_offsets(lengths),
            initial_state=np.array(initial, dtype=np.int64),
            boundaries=np.array(boundaries, dtype=np.int64).reshape(-1, 2),
            own_positions=np.concatenate(own),
        )


def _state_number(bank: dict[StateRef, int], sequence: PackedSequence) -> int:
    """Number of the state that a sequence starts from; it must stem from an earlier round."""
    state, lo = sequence.initial_state, sequence.replay[0]
    if (0 if state is None else state.position) != lo:
        raise PlanError(f"sequence {sequence} starts at position {lo} from the state {state}")
    if state is None:
        return -1
    if state not in bank:
        raise PlanError(f"no round before sequence {sequence} made the state {state}")
    return bank[state]


def _producer(forest: PrefixForest, sequence: PackedSequence, position: int) -> StateRef:
    """The segment of the sequence's chain that holds a boundary, (start, end]."""
    ends = forest.segment_end[list(sequence.chain)]
    return StateRef(segment=sequence.chain[int(np.searchsorted(ends, position))], position=position)


def _offsets(lengths: Int) -> Int:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
