"""Trie-aware greedy grouping: no fixed count, members anywhere in lexicographic order (Eq. 10).

Section 3.2, "Scale-independent trie-aware greedy". Four processing orders times two placement
policies give eight plans; each dissolves what small microbatches it can and is aligned to D.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np

from harts.planning.grouping import Membership, compact_works, in_order
from harts.planning.intervals import IntArray, IntervalWork


class Policy(Enum):
    """What a placement prefers among the microbatches that have room."""

    BEST_FIT = "most work after insertion"
    MAX_SHARED = "most shared tokens"


def greedy_plan(work: IntervalWork, replicas: int, capacity: int) -> list[IntArray] | None:
    """Of the eight plans the one of least count, then least total work, then first; or None.

    None means that no plan could be aligned to D. Every length must be within ``capacity``.
    """
    plans = list(greedy_plans(work, replicas, capacity))
    if not plans:
        return None
    return min(plans, key=lambda groups: (len(groups), int(compact_works(work, groups).sum())))


def greedy_plans(work: IntervalWork, replicas: int, capacity: int) -> Iterator[list[IntArray]]:
    """The plans of all orders and policies whose count could be made a multiple of D."""
    for order in processing_orders(work):
        for policy in Policy:
            placement = Placement(work, capacity, policy)
            placement.place_all(order)
            placement.dissolve_small(order)
            aligned = align_count(work, placement.groups(), replicas)
            if aligned is not None:
                yield aligned


def processing_orders(work: IntervalWork) -> tuple[IntArray, ...]:
    """Four orders [N]: lexicographic up and down, longest first, largest unique suffix first.

    The unique suffix u(x) is what x shares with neither global neighbour. Ties are lexicographic.
    """
    ascending = np.arange(len(work))
    following = np.append(work.lcp[1:], 0)
    suffix = work.lengths - np.maximum(work.lcp, following)
    by_length, by_suffix = (np.argsort(-key, kind="stable") for key in (work.lengths, suffix))
    return ascending, ascending[::-1], by_length, by_suffix


def align_count(work: IntervalWork, groups: list[IntArray], replicas: int) -> list[IntArray] | None:
    """Make K a multiple of D: take out, one at a time, the trajectory that costs least alone.

    Equal costs take the first in lexicographic order; singletons are left as they are. None when
    all are singletons before K is reached.
    """
    for _ in range(-len(groups) % replicas):
        membership = Membership.of_groups(work, groups)
        divisible = np.flatnonzero(membership.sizes[membership.owner] > 1)
        if divisible.size == 0:
            return None
        single = divisible[np.argmin(membership.shared_at_home()[divisible])]
        owner = membership.owner.copy()
        owner[single] = len(groups)
        groups = Membership.of_owners(work, owner).groups()
    return groups


class _Insertion(NamedTuple):
    """What to put back to undo one insertion."""

    microbatch: int
    member: int
    work: int
    start: int
    shared: IntArray


class Placement:
    """Microbatches under construction by one policy.

    ``shared[k, x]`` is the number of tokens of trajectory x that microbatch k computes already,
    |x| less the increase of Eq. 10. It is kept for all trajectories at once, since an insertion
    changes it only between the new member's neighbours, where LCPs are running minima.
    """

    def __init__(self, work: IntervalWork, capacity: int, policy: Policy) -> None:
        self._lengths, self._lcp = work.lengths, work.lcp
        self._capacity, self._policy = capacity, policy
        self._members: list[list[int]] = []
        self._works = np.zeros(16, np.int64)
        self._shared = np.zeros((16, len(work)), np.int64)

    def groups(self) -> list[IntArray]:
        """The microbatches as a grouping."""
        return in_order(np.array(members, np.int64) for members in self._members)

    def increases(self, x: int) -> IntArray:
        """Eq. 10 for trajectory x and each microbatch; [K]."""
        return np.asarray(self._lengths[x] - self._shared[: len(self._members), x], np.int64)

    def place_all(self, order: IntArray) -> None:
        """Put every trajectory where the policy prefers, or into a new microbatch if none fits."""
        for x in order.tolist():
            target = self._preferred(x)
            self.insert(x, self._open() if target is None else target)

    def dissolve_small(self, order: IntArray) -> None:
        """Try to empty each microbatch into the others, lightest first; each is tried once.

        Members go in processing order, each where the policy prefers. If one finds no room, all
        return. More total work is accepted: count decides first among greedy plans.
        """
        rank = np.empty(order.size, np.int64)
        rank[order] = np.arange(order.size)
        works = self._works[: len(self._members)]
        for k in np.argsort(works, kind="stable").tolist():
            self._dissolve(k, rank)

    def insert(self, x: int, k: int) -> _Insertion:
        """Add trajectory x to microbatch k, whatever its capacity; return what undoes it."""
        members = self._members[k]
        at = bisect_left(members, x)
        start = members[at - 1] + 1 if at else 0
        stop = members[at] if at < len(members) else self._lcp.size
        row = self._shared[k, start:stop]
        undo = _Insertion(k, x, int(self._works[k]), start, row.copy())
        self._works[k] += self._lengths[x] - self._shared[k, x]
        before, after = row[: x - start], row[x + 1 - start :]
        downwards = np.minimum.accumulate(self._lcp[start + 1 : x + 1][::-1])[::-1]
        np.maximum(before, downwards, out=before)
        np.maximum(after, np.minimum.accumulate(self._lcp[x + 1 : stop]), out=after)
        row[x - start] = self._lengths[x]
        members.insert(at, x)
        return undo

    def _undo(self, done: _Insertion) -> None:
        self._members[done.microbatch].remove(done.member)
        self._works[done.microbatch] = done.work
        self._shared[done.microbatch, done.start : done.start + done.shared.size] = done.shared

    def _open(self) -> int:
        k = len(self._members)
        if k == self._works.size:
            self._works = np.append(self._works, np.zeros_like(self._works))
            self._shared = np.concatenate((self._shared, np.zeros_like(self._shared)))
        self._members.append([])
        return k

    def _preferred(self, x: int) -> int | None:
        """Microbatch with room for x that the policy prefers; of equal ones the first opened."""
        shared = self._shared[: len(self._members), x]
        after = self._works[: shared.size] + (self._lengths[x] - shared)
        preferred = after if self._policy is Policy.BEST_FIT else shared
        fitting = np.flatnonzero(after <= self._capacity)
        return int(fitting[np.argmax(preferred[fitting])]) if fitting.size else None

    def _dissolve(self, k: int, rank: IntArray) -> None:
        before = int(self._works[k])
        self._works[k] = self._capacity + 1  # no room for anything
        moved: list[_Insertion] = []
        for x in sorted(self._members[k], key=lambda member: int(rank[member])):
            target = self._preferred(x)
            if target is None:
                for done in reversed(moved):
                    self._undo(done)
                self._works[k] = before
                return
            moved.append(self.insert(x, target))
        self._members[k] = []
