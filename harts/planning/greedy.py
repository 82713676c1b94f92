"""Trie-aware greedy grouping: no fixed count, members anywhere in lexicographic order (Eq. 10).

Section 3.2, "Scale-independent trie-aware greedy". Four processing orders times two placement
policies give eight plans; each dissolves what small microbatches it can and is aligned to D.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum
from itertools import product
from typing import NamedTuple

import numpy as np

from harts.planning.grouping import Membership, compact_works, in_order
from harts.planning.intervals import IntArray, IntervalWork

ROOMY = 4
"""Microbatches of most room, each of which is asked what it shares with a trajectory.

So many, and one more for every 256 there are.
"""
FAR = 64
"""Neighbours that are asked one by one before all microbatches are asked at once."""


class Policy(Enum):
    """What a placement prefers among the microbatches that have room."""

    BEST_FIT = "most work after insertion"
    MAX_SHARED = "most shared tokens"


def greedy_plan(work: IntervalWork, replicas: int, capacity: int) -> list[IntArray] | None:
    """Of the eight plans the one of least count, then least total work, then first; or None.

    None means that no plan could be aligned to D. Every length must be within ``capacity``.
    """
    best: list[IntArray] | None = None
    rank = (len(work) + 1, 0)
    for groups in _placed(work, capacity):
        if -(-len(groups) // replicas) * replicas > rank[0]:
            continue  # aligned it would have more microbatches still
        aligned = align_count(work, groups, replicas)
        if aligned is not None:
            own = len(aligned), int(compact_works(work, aligned).sum())
            if own < rank:
                best, rank = aligned, own
    return best


def greedy_plans(work: IntervalWork, replicas: int, capacity: int) -> Iterator[list[IntArray]]:
    """The plans of all orders and policies whose count could be made a multiple of D."""
    for groups in _placed(work, capacity):
        aligned = align_count(work, groups, replicas)
        if aligned is not None:
            yield aligned


def _placed(work: IntervalWork, capacity: int) -> Iterator[list[IntArray]]:
    """The eight plans before their count is aligned."""
    for order, policy in product(processing_orders(work), Policy):
        placement = Placement(work, capacity, policy)
        placement.place_all(order)
        placement.dissolve_small(order)
        yield placement.groups()


def processing_orders(work: IntervalWork) -> tuple[IntArray, ...]:
    """Four orders [N]: lexicographic up and down, longest first, largest unique suffix first.

    The unique suffix u(x) is what x shares with neither global neighbour. Ties are lexicographic.
    """
    ascending = np.arange(len(work))
    keys = work.lengths, unique_suffixes(work)
    by_length, by_suffix = (np.argsort(-key, kind="stable") for key in keys)
    return ascending, ascending[::-1], by_length, by_suffix


def unique_suffixes(work: IntervalWork) -> IntArray:
    """u(x), the tokens of each trajectory that no other one has; [N]."""
    following = np.append(work.lcp[1:], 0)
    return np.asarray(work.lengths - np.maximum(work.lcp, following), np.int64)


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
    home: int


class Placement:
    """Microbatches under construction by one policy.

    By Eq. 10 trajectory x brings |x| less what it shares with the nearest members p < x < q of a
    microbatch. Most microbatches are nearly full, so few can take x: those of much room are asked
    one by one, and others only if they have a member that shares nearly all of x, which is found
    from x outwards. Where that is far, all are asked at once. The choice is the same in each case.
    """

    def __init__(self, work: IntervalWork, capacity: int, policy: Policy) -> None:
        self._lengths: list[int] = work.lengths.tolist()
        self._lcp: list[int] = [-1, *work.lcp[1:].tolist(), -1]  # nothing is shared past the ends
        self._minima: list[list[int]] = [level.tolist() for level in work.valleys.levels]
        self._adjacent = work.lcp
        self._unique: list[int] = unique_suffixes(work).tolist()
        self._capacity, self._policy = capacity, policy
        self._members: list[list[int]] = []
        self._works: list[int] = []
        self._rooms: list[tuple[int, int]] = []  # (capacity left, microbatch), ascending
        self._owner = [-1] * len(work)
        self._owners = np.full(len(work), -1)  # the same for NumPy

    def groups(self) -> list[IntArray]:
        """The microbatches as a grouping."""
        return in_order(np.array(members, np.int64) for members in self._members)

    def shared(self, x: int, k: int) -> int:
        """Tokens of trajectory x that microbatch k computes already, |x| less Eq. 10's increase."""
        members = self._members[k]
        at, longest = bisect_left(members, x), 0
        if at:
            longest = self._common(members[at - 1], x)
        if at < len(members):
            after = self._common(x, members[at])
            if after > longest:
                longest = after
        return longest

    def place_all(self, order: IntArray) -> None:
        """Put every trajectory where the policy prefers, or into a new microbatch if none fits."""
        for x in order.tolist():
            target = self._preferred(x)
            self.insert(x, *(target or (self._open(), 0)))

    def dissolve_small(self, order: IntArray) -> None:
        """Try to empty each microbatch into the others, lightest first; each is tried once.

        Members go in processing order, each where the policy prefers. If one finds no room, all
        return. More total work is accepted: count decides first among greedy plans.
        """
        rank = np.empty(order.size, np.int64)
        rank[order] = np.arange(order.size)
        for k in np.argsort(np.array(self._works), kind="stable").tolist():
            self._dissolve(k, rank)

    def insert(self, x: int, k: int, shared: int) -> _Insertion:
        """Add trajectory x, of which microbatch k has ``shared`` tokens; return what undoes it."""
        undo = _Insertion(k, x, self._works[k], self._owner[x])
        self._set_work(k, self._works[k] + self._lengths[x] - shared)
        insort(self._members[k], x)
        self._owner[x] = self._owners[x] = k
        return undo

    def _undo(self, done: _Insertion) -> None:
        self._members[done.microbatch].remove(done.member)
        self._set_work(done.microbatch, done.work)
        self._owner[done.member] = self._owners[done.member] = done.home

    def _open(self) -> int:
        k = len(self._members)
        self._members.append([])
        self._works.append(0)
        self._rooms.append((self._capacity, k))
        return k

    def _set_work(self, k: int, work: int) -> None:
        del self._rooms[bisect_left(self._rooms, (self._capacity - self._works[k], k))]
        self._works[k] = work
        insort(self._rooms, (self._capacity - work, k))

    def _common(self, first: int, second: int) -> int:
        """LCP of two trajectories, first < second."""
        level = (second - first).bit_length() - 1
        minima = self._minima[level]
        left, right = minima[first + 1], minima[second + 1 - (1 << level)]
        return left if left < right else right

    def _preferred(self, x: int) -> tuple[int, int] | None:
        """Microbatch with room for x that the policy prefers, and what it shares with x.

        Of equal ones the first opened; None if there is none.
        """
        rooms, length = self._rooms, self._lengths[x]
        unique = self._unique[x]
        roomy = ROOMY + len(rooms) // 256
        # All but so many have at most this room.
        most = rooms[-roomy - 1][0] if len(rooms) > roomy else -1
        near = self._near(x, length - most) if most >= unique else {}
        if near is None:
            return self._choice_of_all(x)
        if self._policy is Policy.MAX_SHARED and (chosen := self._choice(x, near)) is not None:
            return chosen  # nothing that is not near shares as much
        for room, k in rooms[-roomy:]:
            if room >= unique and k not in near:
                near[k] = self.shared(x, k)
        return self._choice(x, near)

    def _choice(self, x: int, shared: dict[int, int]) -> tuple[int, int] | None:
        """The preferred one of some microbatches, given what each shares with x."""
        works, space = self._works, self._capacity - self._lengths[x]
        fullest = self._policy is Policy.BEST_FIT
        best, chosen = (0, 0), None
        for k, common in shared.items():
            left = space - works[k] + common
            if left >= 0:
                rank = (left if fullest else -common, k)
                if chosen is None or rank < best:
                    best, chosen = rank, (k, common)
        return chosen

    def _near(self, x: int, least: int) -> dict[int, int] | None:
        """Microbatches that share at least ``least`` tokens of x, and how many, most first.

        The members that share most are the nearest, so they are found from x outwards; max-shared
        needs no further ones than the first that has room. None if the walk gets longer than
        ``FAR``.
        """
        lcp, owner, works = self._lcp, self._owner, self._works
        full = self._capacity - self._lengths[x]
        first_only = self._policy is Policy.MAX_SHARED
        found: dict[int, int] = {}
        before, after, least = x - 1, x + 1, max(least, 0)
        left, right = lcp[x], lcp[after]
        for _ in range(FAR):
            shared = left if left >= right else right
            if shared < least:
                return found
            if left >= right:
                k = owner[before]
                if lcp[before] < left:
                    left = lcp[before]
                before -= 1
            else:
                k = owner[after]
                after += 1
                if lcp[after] < right:
                    right = lcp[after]
            if k >= 0 and k not in found:
                found[k] = shared
                if first_only and works[k] - shared <= full:
                    least = shared
        return None

    def _everywhere(self, x: int) -> IntArray:
        """Tokens of x that every microbatch has; [K]."""
        owners, lcp = self._owners, self._adjacent
        # Written from far to near: the nearest member of a microbatch, which shares most, counts.
        # Trajectories that are nowhere yet have the last entry.
        left, right = np.zeros((2, len(self._members) + 1), np.int64)
        left[owners[:x]] = np.minimum.accumulate(lcp[1 : x + 1][::-1])[::-1]
        right[owners[x + 1 :][::-1]] = np.minimum.accumulate(lcp[x + 1 :])[::-1]
        return np.maximum(left, right)[:-1]

    def _choice_of_all(self, x: int) -> tuple[int, int] | None:
        """As `_choice`, of every microbatch."""
        shared = self._everywhere(x)
        left = self._capacity - self._lengths[x] - np.array(self._works) + shared
        fits = np.flatnonzero(left >= 0)
        if not fits.size:
            return None
        rank = left[fits] if self._policy is Policy.BEST_FIT else -shared[fits]
        k = int(fits[np.argmin(rank)])
        return k, int(shared[k])

    def _dissolve(self, k: int, rank: IntArray) -> None:
        before = self._works[k]
        self._set_work(k, self._capacity + 1)  # no room for anything
        # Rooms only shrink while members move.
        if max(self._unique[x] for x in self._members[k]) > self._rooms[-1][0]:
            self._set_work(k, before)
            return
        moved: list[_Insertion] = []
        for x in sorted(self._members[k], key=lambda member: int(rank[member])):
            target = self._preferred(x)
            if target is None:
                for done in reversed(moved):
                    self._undo(done)
                self._set_work(k, before)
                return
            moved.append(self.insert(x, *target))
        self._members[k] = []
