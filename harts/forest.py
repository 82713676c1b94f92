"""The prefix forest: which tokens of which trajectories are one computation.

Shapes: S semantic positions · C compact tokens · N trajectories · V segments.
Paper: sections 2.1 and 3.1.

Trajectories are sorted lexicographically; adjacent longest common prefixes (LCP) then say
everything about sharing. Contracting fork-free paths of the prefix trie gives *segments*.
Compact tokens are numbered depth first: segment after segment, in lexicographic order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.trajectories import TrajectoryBatch

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixForest:
    """Prefix sharing among some trajectories of a batch.

    A segment is a maximal path without a fork; a trajectory that ends inside another's path
    makes no boundary. Segments are listed depth first, parents before children and children in
    lexicographic order of their tokens.
    """

    members: Int
    """[N] row of each trajectory in its batch, in lexicographic order (equal ones: input order)."""
    lengths: Int
    """[N] tokens of each trajectory, in the order of ``members``."""
    lcp: Int
    """[N] longest common prefix with the predecessor in ``members``; ``lcp[0] == 0``."""
    segment_parent: Int
    """[V] parent segment, -1 for a root; always smaller than the segment's own number."""
    segment_start: Int
    """[V] position of the segment's first token in its trajectories."""
    segment_end: Int
    """[V] position behind the segment's last token: the fork position of an inner segment."""
    segment_member: Int
    """[V] index into ``members`` of a trajectory that runs through the whole segment."""

    @classmethod
    def build(cls, batch: TrajectoryBatch, *, share: bool = True) -> "PrefixForest":
        """Find what the trajectories of ``batch`` share.

        Two positions share a compact token if and only if their whole prefixes are equal in
        tokens and, where the batch has one, in the ``identity`` key. With ``share=False`` every
        trajectory, also an exact duplicate, is a tree of its own: trajectory-wise training.
        """
        order, lcp = sorted_prefixes(batch)
        if not share:
            lcp = np.zeros_like(lcp)
        return cls.from_lcp(order, batch.lengths[order], lcp)

    @classmethod
    def from_lcp(cls, members: Int, lengths: Int, lcp: Int) -> "PrefixForest":
        """Build the segments from lexicographically sorted lengths and adjacent LCPs."""
        parent, start, end, member = _segments(lengths, lcp)
        return cls(
            members=members,
            lengths=lengths,
            lcp=lcp,
            segment_parent=parent,
            segment_start=start,
            segment_end=end,
            segment_member=member,
        )

    def subset(self, sorted_positions: Int) -> "PrefixForest":
        """Restrict to some trajectories, given as ascending indices into ``members``."""
        at = np.asarray(sorted_positions, dtype=np.int64)
        # The LCP of two sorted trajectories is the minimum of the adjacent LCPs between them.
        padded = np.append(self.lcp, 0)
        lcp = np.zeros(len(at), dtype=np.int64)
        if len(at) > 1:
            between = np.stack([at[:-1] + 1, at[1:] + 1], axis=1).ravel()
            lcp[1:] = np.minimum.reduceat(padded, between)[::2]
        return PrefixForest.from_lcp(self.members[at], self.lengths[at], lcp)

    @property
    def segment_lengths(self) -> Int:
        """[V] tokens of each segment."""
        return self.segment_end - self.segment_start

    @property
    def segment_offset(self) -> Int:
        """[V] compact token (depth-first number) of each segment's first token."""
        lengths = self.segment_lengths
        return np.cumsum(lengths) - lengths

    @property
    def compact_tokens(self) -> int:
        """C: unique tokens of the trie, the compact work of Eq. 5."""
        return int(self.lengths.sum() - self.lcp.sum())

    @property
    def raw_tokens(self) -> int:
        """S: all token occurrences."""
        return int(self.lengths.sum())

    def compact_map(self, numbers: Int | None = None) -> list[Int]:
        """The map m: S -> C of Eq. 3: one array [length] of compact tokens a member.

        Compact tokens are called by ``numbers`` [C], in depth-first order, and 0..C-1 if there are
        none; equal prefixes hold equal numbers.
        """
        if numbers is None:
            numbers = np.arange(self.compact_tokens)
        rows: list[Int] = []
        fresh = 0
        previous = np.empty(0, dtype=np.int64)
        for length, shared in zip(self.lengths.tolist(), self.lcp.tolist(), strict=True):
            own = np.empty(length, dtype=np.int64)
            own[:shared] = previous[:shared]
            own[shared:] = numbers[fresh : fresh + length - shared]
            fresh += length - shared
            rows.append(own)
            previous = own
        return rows


def sorted_prefixes(batch: TrajectoryBatch) -> tuple[Int, Int]:
    """Sort trajectories lexicographically; return (order [N], adjacent LCP [N]).

    The order is stable: equal trajectories keep their input order. A strict prefix precedes its
    extensions. A merge sort that keeps the LCP with the latest output of each run: a token is
    compared again only where two runs may still be equal, so long shared prefixes cost once, not
    with every comparison (Ng and Kakehi, Merging string sequences by longest common prefixes).
    Runs are merged as soon as there are two of one size, while their tokens are still cached.
    """
    common = _Comparison(batch)
    runs: list[_Run] = []
    for row in range(len(batch)):
        run: _Run = [row], [0]
        merges = row + 1  # halved as often as it is even: so many equal runs end here
        while merges % 2 == 0:
            run, merges = _merge(runs.pop(), run, common), merges // 2
        runs.append(run)
    while len(runs) > 1:
        run = runs.pop()
        runs.append(_merge(runs.pop(), run, common))
    order, lcp = runs[0] if runs else ([], [])
    return np.array(order, dtype=np.int64), np.array(lcp, dtype=np.int64)


_Run = tuple[list[int], list[int]]
"""Rows in order, and the LCP of each with the one before; 0 for the first."""


def _merge(left: _Run, right: _Run, common: "_Comparison") -> _Run:
    rows, lcps = list[int](), list[int]()
    (a_rows, a_lcps), (b_rows, b_lcps) = left, right
    i = j = a_lcp = b_lcp = 0  # LCPs of the two heads with the latest output
    while i < len(a_rows) and j < len(b_rows):
        # The head that shares more with the latest output comes first; the other keeps its LCP.
        take_left, other = a_lcp > b_lcp, min(a_lcp, b_lcp)
        if a_lcp == b_lcp:
            take_left, other = common(a_rows[i], b_rows[j], a_lcp)
        if take_left:
            rows.append(a_rows[i])
            lcps.append(a_lcp)
            i += 1
            a_lcp, b_lcp = a_lcps[i] if i < len(a_rows) else 0, other
        else:
            rows.append(b_rows[j])
            lcps.append(b_lcp)
            j += 1
            a_lcp, b_lcp = other, b_lcps[j] if j < len(b_rows) else 0
    if i < len(a_rows):
        return rows + a_rows[i:], [*lcps, a_lcp, *a_lcps[i + 1 :]]
    return rows + b_rows[j:], [*lcps, b_lcp, *b_lcps[j + 1 :]]


class _Comparison:
    """Compares two trajectories that share a known prefix."""

    def __init__(self, batch: TrajectoryBatch) -> None:
        self._columns: list[NDArray[np.generic]] = [batch.tokens]
        if batch.identity is not None:
            self._columns.append(batch.identity.view(np.uint64))
        self._bounds: list[int] = batch.offsets.tolist()

    def __call__(self, left: int, right: int, shared: int) -> tuple[bool, int]:
        """Whether ``left`` comes first (also if equal), and the LCP, at least ``shared``."""
        a, b = self._bounds[left], self._bounds[right]
        lengths = self._bounds[left + 1] - a, self._bounds[right + 1] - b
        most = min(lengths)
        for column in self._columns:
            most = _first_difference(column, a, b, shared, most)
        if most < min(lengths):
            for column in self._columns:
                if column[a + most] != column[b + most]:
                    return bool(column[a + most] < column[b + most]), most
        return lengths[0] <= lengths[1], most


def _first_difference(
    column: NDArray[np.generic], left: int, right: int, position: int, most: int
) -> int:
    """First position in [position, most) at which entries from two places differ, else ``most``."""
    width = 64
    while position < most:
        stop = min(position + width, most)
        differs = column[left + position : left + stop] != column[right + position : right + stop]
        first = int(differs.argmax())
        if differs[first]:
            return position + first
        position, width = stop, min(width * 16, 1 << 14)
    return most


def _segments(lengths: Int, lcp: Int) -> tuple[Int, Int, Int, Int]:
    """Contract fork-free paths: (parent, start, end, member) of every segment, depth first.

    Only a trajectory that is no prefix of its successor is a leaf; others end on its path.
    Leaves are inserted in order along a stack that holds the path to the latest leaf. A leaf
    that leaves this path inside a segment splits it; the lower part keeps its number, so the
    children that hang below stay valid. O(V) time, no recursion.
    """
    last = len(lengths) - 1
    is_leaf = np.append(lcp[1:] < lengths[:-1], True)
    parent: list[int] = []
    start: list[int] = []
    end: list[int] = []
    member: list[int] = []
    path: list[int] = []
    depth_of_leaf = np.minimum.reduceat(lcp, _run_starts(is_leaf)) if last >= 0 else lcp
    for leaf, fork in zip(np.flatnonzero(is_leaf).tolist(), depth_of_leaf.tolist(), strict=True):
        while path and start[path[-1]] >= fork:
            path.pop()
        if path and end[path[-1]] > fork:
            lower = path.pop()
            parent.append(parent[lower])
            start.append(start[lower])
            end.append(fork)
            member.append(member[lower])
            path.append(len(parent) - 1)
            parent[lower], start[lower] = path[-1], fork
        parent.append(path[-1] if path else -1)
        start.append(fork)
        end.append(int(lengths[leaf]))
        member.append(leaf)
        path.append(len(parent) - 1)
    return _depth_first(parent, start, end, member)


def _run_starts(is_leaf: NDArray[np.bool_]) -> Int:
    """First member of each run "prefixes of a leaf, then the leaf"."""
    return np.concatenate([[0], np.flatnonzero(is_leaf)[:-1] + 1]).astype(np.int64)


def _depth_first(
    parent: Sequence[int], start: Sequence[int], end: Sequence[int], member: Sequence[int]
) -> tuple[Int, Int, Int, Int]:
    """Renumber segments depth first: by the first leaf below, then by position."""
    old_parent = np.array(parent, dtype=np.int64)
    old_start = np.array(start, dtype=np.int64)
    old_member = np.array(member, dtype=np.int64)
    order = np.lexsort((old_start, old_member))
    number = np.empty(len(order) + 1, dtype=np.int64)
    number[order] = np.arange(len(order))
    number[-1] = -1
    new_parent = number[old_parent[order]]
    return new_parent, old_start[order], np.array(end, dtype=np.int64)[order], old_member[order]
