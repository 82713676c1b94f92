"""Microbatches of any membership: their compact work, and what a trajectory shares with one.

A grouping is a list of K ascending arrays of sorted positions, ordered by first member, that hold
every trajectory once. Members need not be neighbours in lexicographic order.

For p < x < q in lexicographic order LCP(p, q) = min(LCP(p, x), LCP(x, q)), so Eq. 10 reads

    increase = |x| - max(LCP(p, x), LCP(x, q)) = |x| - shared

with 0 for a missing p or q: x brings every token but those on its longest path that is there
already. Taking x out of its microbatch saves the same amount, counted without x itself.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from harts.planning.intervals import IntArray, IntervalWork


def in_order(groups: Iterable[IntArray]) -> list[IntArray]:
    """The nonempty groups, ordered by first member."""
    return sorted((group for group in groups if group.size), key=lambda group: int(group[0]))


def from_cuts(work: IntervalWork, cuts: IntArray) -> list[IntArray]:
    """Groups of the contiguous partition with the given inner cuts."""
    return np.split(np.arange(len(work)), cuts)


def cuts_of(groups: list[IntArray]) -> IntArray | None:
    """Inner cuts [K-1] of a contiguous grouping; None if a member of one group divides another."""
    if any(int(group[-1] - group[0]) >= group.size for group in groups):
        return None
    return np.array([group[0] for group in groups[1:]], np.int64)


def compact_works(work: IntervalWork, groups: list[IntArray]) -> IntArray:
    """Compact work of each group; [K] (Eq. 5 with adjacent LCPs by range minimum)."""
    flat = np.concatenate(groups)
    firsts = np.cumsum([0, *(group.size for group in groups[:-1])])
    shared = np.zeros(flat.size, np.int64)
    shared[1:] = work.pairwise_lcp(flat[:-1], flat[1:])
    shared[firsts] = 0
    return np.asarray(np.add.reduceat(work.lengths[flat] - shared, firsts), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Membership:
    """Which microbatch holds which trajectory, searchable by microbatch and position.

    ``owner[N]`` is each trajectory's microbatch and ``sizes[K]`` counts members. ``keys`` are
    ``owner * N + position`` in ascending order between two sentinels at each end, so that the
    neighbours of a position inside a microbatch are neighbours of its key.
    """

    work: IntervalWork
    owner: IntArray
    sizes: IntArray
    keys: IntArray

    @classmethod
    def of_owners(cls, work: IntervalWork, owner: IntArray) -> Self:
        """Index ``owner[N]``, whose values are 0..K-1."""
        total, sizes = owner.size, np.bincount(owner)
        keys = np.sort(owner * total + np.arange(total))
        ends = np.full(2, -total), np.full(2, sizes.size * total)
        return cls(
            work=work, owner=owner, sizes=sizes, keys=np.concatenate((ends[0], keys, ends[1]))
        )

    @classmethod
    def of_groups(cls, work: IntervalWork, groups: list[IntArray]) -> Self:
        """Index a grouping; microbatch k is ``groups[k]``."""
        owner = np.empty(len(work), np.int64)
        for k, group in enumerate(groups):
            owner[group] = k
        return cls.of_owners(work, owner)

    def groups(self) -> list[IntArray]:
        """The grouping again."""
        order = np.argsort(self.owner, kind="stable")
        return in_order(np.split(order, np.cumsum(self.sizes)[:-1]))

    def shared(self, position: IntArray, microbatch: IntArray, without: IntArray) -> IntArray:
        """Tokens of each ``position`` that ``microbatch`` less the member ``without`` computes.

        ``max(LCP(p, x), LCP(x, q))`` with p and q the neighbours that x has, or would have, there.
        All three arrays have one shape; ``without`` need not be a member.
        """
        total = self.owner.size
        skipped = microbatch * total + without
        after = np.searchsorted(self.keys, microbatch * total + position)
        before = after - 1
        before = before - (self.keys[before] == skipped)
        after = after + (self.keys[after] == skipped)
        longest = np.zeros(position.shape, np.int64)
        for key in (self.keys[before], self.keys[after]):
            present = key // total == microbatch
            neighbour = np.where(present, key % total, position)
            longest = np.maximum(longest, present * self.work.pairwise_lcp(neighbour, position))
        return longest

    def shared_at_home(self) -> IntArray:
        """Tokens of each trajectory that its own microbatch computes without it; [N]."""
        every = np.arange(self.owner.size)
        return self.shared(every, self.owner, every)
