"""Trie-aware greedy grouping: no fixed count, members anywhere in lexicographic order (Eq. 10).

Section 3.2, "Scale-independent trie-aware greedy". Four processing orders times two placement
policies give eight plans; each dissolves what small microbatches it can and is aligned to D.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from harts.planning.grouping import Membership, compact_works
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.placement import Placement, Policy, Step

POLICIES = Policy.BEST_FIT, Policy.MAX_SHARED


def greedy_plan(work: IntervalWork, replicas: int, capacity: int) -> list[IntArray] | None:
    """Of the eight plans the one of least count, then least total work, then first; or None.

    None means that no plan could be aligned to D. Every length must be within ``capacity``.
    """
    best: list[IntArray] | None = None
    rank = (len(work) + 1, 0)
    for placement, order in _placed(work, capacity):
        if _multiple(placement.fewest(), replicas) > rank[0]:
            continue  # aligned it would have more microbatches still
        placement.dissolve_small(order)
        groups = placement.groups()
        if _multiple(len(groups), replicas) > rank[0]:
            continue
        aligned = align_count(work, groups, replicas)
        if aligned is not None:
            own = len(aligned), int(compact_works(work, aligned).sum())
            if own < rank:
                best, rank = aligned, own
    return best


def greedy_plans(work: IntervalWork, replicas: int, capacity: int) -> Iterator[list[IntArray]]:
    """The plans of all orders and policies whose count could be made a multiple of D."""
    for placement, order in _placed(work, capacity):
        placement.dissolve_small(order)
        aligned = align_count(work, placement.groups(), replicas)
        if aligned is not None:
            yield aligned


def _placed(work: IntervalWork, capacity: int) -> Iterator[tuple["GreedyPlacement", IntArray]]:
    """The eight placements before any microbatch is dissolved, with their orders."""
    step = Step.build(work)
    for order, policy in product(processing_orders(work), POLICIES):
        placement = GreedyPlacement(step, capacity, policy)
        placement.place_all(order)
        yield placement, order


def _multiple(count: int, replicas: int) -> int:
    return -(-count // replicas) * replicas


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


class GreedyPlacement(Placement):
    """Trajectories placed one by one, and small microbatches emptied into the others."""

    def __init__(self, step: Step, capacity: int, policy: Policy) -> None:
        super().__init__(step, capacity, policy)
        self._unique = unique_suffixes(step.work)

    def place_all(self, order: IntArray) -> None:
        """Put every trajectory where the policy prefers, or into a new microbatch if none fits."""
        lengths = self.step.lengths
        for x in order.tolist():
            self.insert(x, *(self.preferred(x, x, lengths[x]) or (self.open(), 0)))

    def fewest(self) -> int:
        """Count that `dissolve_small` cannot go below.

        Those it empties leave no room of their own, and the rest has room for all they must bring.
        """
        dissolvable, suffixes = self._dissolvable()
        rooms = self.capacity - self.opened_works()
        needed = np.sort(suffixes + rooms[dissolvable])
        most = np.searchsorted(np.cumsum(needed), rooms.sum(), side="right")
        return len(self.members) - int(most)

    def dissolve_small(self, order: IntArray) -> None:
        """Try to empty each microbatch into the others, lightest first; each is tried once.

        Members go in processing order, each where the policy prefers. If one finds no room, all
        return. More total work is accepted: count decides first among greedy plans.
        """
        rank = np.empty(order.size, np.int64)
        rank[order] = np.arange(order.size)
        for k in self._dissolvable()[0].tolist():
            self._dissolve(k, rank)

    def _dissolvable(self) -> tuple[IntArray, IntArray]:
        """Microbatches whose members the others might have room for, and what those must bring.

        Lightest first. Wherever a trajectory goes it brings its unique suffix, and rooms only
        shrink while members move. So a microbatch stays if one such suffix is larger than any room
        of the others, or all of them than all the room.
        """
        works = self.opened_works()
        longest, total = np.zeros((2, works.size), np.int64)
        np.maximum.at(longest, self.owners, self._unique)
        np.add.at(total, self.owners, self._unique)
        rooms = self.capacity - works
        order = np.argsort(works, kind="stable")
        largest = np.full(works.size, rooms[order[0]])
        largest[order[0]] = rooms[order[1]] if works.size > 1 else -1
        possible = (longest <= largest) & (total <= rooms.sum() - rooms)
        order = order[possible[order]]
        return order, total[order]

    def _dissolve(self, k: int, rank: IntArray) -> None:
        before, members = self.works[k], self.members[k]
        self.close(k)
        moved: list[tuple[int, int]] = []  # a member, and the work of its new microbatch before
        possible = int(self._unique[members].max()) <= self.most_room()
        for x in sorted(members, key=rank.__getitem__) if possible else ():
            target = self.preferred(x, x, self.step.lengths[x])
            if target is None:
                possible = False
                break
            moved.append((x, self.works[target[0]]))
            self.insert(x, *target)
        if possible:
            self.members[k] = []
            return
        for x, work in reversed(moved):
            self._take_back(x, work, k)
        self.set_work(k, before)

    def _take_back(self, x: int, work: int, home: int) -> None:
        """Undo the last insertion of x, into a microbatch that had so much work before."""
        k = self.owner[x]
        self.members[k].remove(x)
        self.set_work(k, work)
        self.owner[x] = home
