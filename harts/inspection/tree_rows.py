"""Where each segment of a microbatch is drawn: one row a packed sequence, depth first.

Shapes: V segments · Q packed sequences, and as many rows.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from harts.forest import Int, PrefixForest
from harts.planning.calls import CallPlan
from harts.planning.step import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeRows:
    """Rows from the top; a branch lies below every branch that leaves its parent later.

    In this order the upright line from a fork down to its side branches crosses no other bar.
    """

    segment_row: Int
    """[V]"""
    segment_call: Int
    """[V] call that runs the segment, from 0."""
    last_child_row: Int
    """[V] lowest row of a segment's children; its own row where it has none below."""
    row_leaf: Int
    """[Q] last segment of each row; a leaf, since every fork has a direct continuation."""
    row_call: Int
    """[Q]"""
    row_start: Int
    """[Q] first position of the row's own tokens."""
    row_replay: Int
    """[Q] first replayed position; ``row_start`` where nothing is replayed."""
    root_rows: Int
    """Rows where a tree begins."""

    @classmethod
    def of(cls, microbatch: Microbatch) -> Self:
        """Place the segments of ``microbatch``."""
        forest, calls = microbatch.forest, microbatch.calls
        call_of, continues = _chains(calls, len(forest.segment_parent))
        row_of = _rows(forest, continues)
        last = row_of.copy()
        inner = forest.segment_parent >= 0
        np.maximum.at(last, forest.segment_parent[inner], row_of[inner])
        sequences = [(s, r) for r, packed in enumerate(calls.rounds) for s in packed]
        sequences.sort(key=lambda pair: int(row_of[pair[0].chain[0]]))
        first = np.array([s.chain[0] for s, _ in sequences], np.int64)
        start = forest.segment_start[first]
        replay = np.array([s.replay for s, _ in sequences], np.int64)
        return cls(
            segment_row=row_of,
            segment_call=call_of,
            last_child_row=last,
            row_leaf=np.array([s.chain[-1] for s, _ in sequences], np.int64),
            row_call=np.array([r for _, r in sequences], np.int64),
            row_start=start,
            row_replay=start - (replay[:, 1] - replay[:, 0]),
            root_rows=np.sort(row_of[~inner]),
        )

    def __len__(self) -> int:
        return len(self.row_leaf)


def _chains(calls: CallPlan, segments: int) -> tuple[Int, list[int]]:
    """Call of each segment, and the segment that goes on in its sequence (-1: none)."""
    call_of = np.zeros(segments, np.int64)
    continues = [-1] * segments
    for number, packed in enumerate(calls.rounds):
        for sequence in packed:
            call_of[list(sequence.chain)] = number
            for segment, following in zip(sequence.chain, sequence.chain[1:], strict=False):
                continues[segment] = following
    return call_of, continues


def _rows(forest: PrefixForest, continues: list[int]) -> Int:
    """Depth first with an explicit stack: a direct continuation keeps its parent's row."""
    children: list[list[int]] = [[] for _ in continues]
    roots: list[int] = []
    for segment, parent in enumerate(forest.segment_parent.tolist()):
        (children[parent] if parent >= 0 else roots).append(segment)
    row_of = np.full(len(continues), -1, np.int64)
    rows, stack = 0, roots[::-1]
    while stack:
        v = stack.pop()
        if row_of[v] < 0:
            row_of[v], rows = rows, rows + 1
        direct = continues[v]
        stack += [u for u in reversed(children[v]) if u != direct]
        if direct >= 0:
            row_of[direct] = row_of[v]
            stack.append(direct)
    return row_of


def early_ends(forest: PrefixForest) -> tuple[Int, Int]:
    """Trajectories that end inside a longer one's path: (segment, length) of each.

    The next leaf in lexicographic order runs through all of such a trajectory.
    """
    is_inner = np.zeros(len(forest.segment_parent), np.bool_)
    is_inner[forest.segment_parent[forest.segment_parent >= 0]] = True
    leaf_segment = {int(forest.segment_member[v]): int(v) for v in np.flatnonzero(~is_inner)}
    segments: list[int] = []
    ends: list[int] = []
    leaf = -1
    for member in range(len(forest.members) - 1, -1, -1):
        if member in leaf_segment:
            leaf = leaf_segment[member]
            continue
        length, at = int(forest.lengths[member]), leaf
        while forest.segment_start[at] >= length:
            at = int(forest.segment_parent[at])
        if length < forest.segment_end[at] or is_inner[at]:
            segments.append(at)
            ends.append(length)
    return np.array(segments, np.int64), np.array(ends, np.int64)
