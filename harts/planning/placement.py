"""Microbatches that grow by single placements: which one has room, and which shares most.

A *block* is one trajectory, or several that go together; ``first`` and ``last`` are its outermost
positions in lexicographic order and ``size`` is its work alone. By Eq. 10 it brings a microbatch
``size`` less what it *shares*: the longer LCP with the nearest member before it and after it. (A
block of several shares more if both are longer than the LCP inside it; that is left out here.)

Most microbatches are nearly full, so few can take a block: those that share nearly all of it, which
are found from the block outwards, and those of much room. What is further out shares less, so once
few microbatches have the room that it would need, those are asked one by one. Where that is far,
all that could be found are asked at once. The choice is the same in each case.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum
from typing import Self

import numpy as np

from harts.planning.grouping import compact_works, in_order
from harts.planning.intervals import IntArray, IntervalWork

FEW = 4
"""Microbatches of enough room that are asked one by one what they share with a block."""
FAR = 32
"""Neighbours that are walked to."""
MANY = 32
"""As ``FEW``, once the walk got so far; more are asked at once."""
NUMBER_BITS = 32
"""Low bits of a room's entry, which hold the microbatch's number."""
NUMBERS = (1 << NUMBER_BITS) - 1


class Policy(Enum):
    """What is preferred among the microbatches that have room, then the first opened.

    The values weigh the room that would be left against the tokens shared; the least is taken.
    """

    BEST_FIT = (1, 0)
    """Most work after insertion."""
    MAX_SHARED = (0, 1)
    """Most shared tokens."""
    LEAST_WORK = (1, 1 << 40)
    """Most shared tokens, that is least work added, then most work after insertion."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What placements read of a step, as the lists in which single entries are found fastest."""

    lengths: list[int]
    lcp: list[int]
    """[N+1] adjacent LCPs, -1 at both ends: nothing is shared past them."""
    minima: list[list[int]]
    work: IntervalWork

    @classmethod
    def build(cls, work: IntervalWork) -> Self:
        """Lay out ``work``."""
        return cls(
            lengths=work.lengths.tolist(),
            lcp=[-1, *work.lcp[1:].tolist(), -1],
            minima=[level.tolist() for level in work.valleys.levels],
            work=work,
        )

    def common(self, first: int, second: int) -> int:
        """LCP of two trajectories, first < second."""
        level = (second - first).bit_length() - 1
        minima = self.minima[level]
        left, right = minima[first + 1], minima[second + 1 - (1 << level)]
        return left if left < right else right

    def sharing(self, first: int, last: int, least: int) -> tuple[int, int]:
        """The interval [start, stop) of trajectories that share at least ``least`` of a block."""
        if least <= 0:
            return 0, len(self.lengths)
        start, stop = first, last + 1
        for level in range(len(self.minima) - 1, -1, -1):
            minima, width = self.minima[level], 1 << level
            if stop + width <= len(self.lengths) and minima[stop] >= least:
                stop += width
            if start >= width and minima[start + 1 - width] >= least:
                start -= width
        return start, stop


class Placement:
    """Microbatches under construction by one policy.

    A microbatch that was dissolved has no members and a work above capacity, so nothing fits in.
    """

    def __init__(self, step: Step, capacity: int, policy: Policy) -> None:
        self.step, self.capacity = step, capacity
        self.members: list[list[int]] = []
        self.works, self.owner = (array("q", [-1]) * len(step.lengths) for _ in range(2))
        """Work of each microbatch; microbatch of each trajectory, -1 while it has none."""
        # The same memory for NumPy.
        self._all_works = np.frombuffer(self.works, np.int64)
        self.owners = np.frombuffer(self.owner, np.int64)
        self._fullest, self._widest = policy.value
        self._rooms: list[int] = []
        """Capacity left, with the microbatch's number in the low bits; ascending."""

    def load(self, groups: Iterable[IntArray]) -> None:
        """Take over microbatches of some grouping, as if all had been placed."""
        groups = list(groups)
        self.members = [group.tolist() for group in groups]
        works = compact_works(self.step.work, groups)
        self._all_works[: works.size] = works
        for k, group in enumerate(groups):
            self.owners[group] = k
        rooms = (self.capacity - works).tolist()
        self._rooms = sorted((room << NUMBER_BITS) + k for k, room in enumerate(rooms))

    def groups(self) -> list[IntArray]:
        """The microbatches as a grouping."""
        return in_order(np.array(members, np.int64) for members in self.members)

    def opened_works(self) -> IntArray:
        """Work of every microbatch that was ever opened; [K]."""
        return self._all_works[: len(self.members)]

    def most_room(self) -> int:
        """Tokens that the emptiest microbatch has room for."""
        return self._rooms[-1] >> NUMBER_BITS

    def open(self) -> int:
        """A new microbatch's number."""
        k = len(self.members)
        self.members.append([])
        self.works[k] = 0
        insort(self._rooms, (self.capacity << NUMBER_BITS) + k)
        return k

    def insert(self, x: int, k: int, shared: int) -> None:
        """Add trajectory x, of which microbatch k has ``shared`` tokens."""
        self.set_work(k, self.works[k] + self.step.lengths[x] - shared)
        insort(self.members[k], x)
        self.owner[x] = k

    def close(self, k: int) -> None:
        """Leave no room for anything."""
        self.set_work(k, self.capacity + 1)

    def set_work(self, k: int, work: int) -> None:
        """Say how much work microbatch k has."""
        rooms = self._rooms
        del rooms[bisect_left(rooms, ((self.capacity - self.works[k]) << NUMBER_BITS) + k)]
        self.works[k] = work
        insort(rooms, ((self.capacity - work) << NUMBER_BITS) + k)

    def shared(self, first: int, last: int, k: int) -> int:
        """Tokens of a block that microbatch k, with no member inside it, computes already."""
        members, common = self.members[k], self.step.common
        at, longest = bisect_left(members, first), 0
        if at:
            longest = common(members[at - 1], first)
        if at < len(members):
            after = common(last, members[at])
            if after > longest:
                longest = after
        return longest

    def preferred(
        self, first: int, last: int, size: int, barred: Set[int] = frozenset()
    ) -> tuple[int, int] | None:
        """Microbatch with room for a block that the policy prefers, and what they share.

        None if there is none. Those with a member inside the block must be ``barred``.
        """
        rooms, works, owner, lcp = self._rooms, self.works, self.owner, self.step.lcp
        fullest, widest = self._fullest, self._widest
        space = self.capacity - size
        chosen: tuple[int, int, int] | None = None  # rank by the policy, microbatch, shared
        seen = set(barred)
        before, after, bound = first - 1, last + 1, size + 1
        left, right = lcp[first], lcp[after]
        for _ in range(FAR):
            shared = left if left >= right else right
            if shared < bound:
                if widest and chosen is not None:
                    return chosen[1:]
                bound = shared  # of all that was not seen yet
                roomy = bisect_left(rooms, (size - bound) << NUMBER_BITS)
                if bound <= 0 or len(rooms) - roomy <= FEW:
                    break
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
            if k >= 0 and k not in seen:
                seen.add(k)
                spare = space - works[k] + shared
                if spare >= 0:
                    rank = fullest * spare - widest * shared
                    if chosen is None or (rank, k) < chosen:
                        chosen = rank, k, shared
        if bound > 0 and len(rooms) - roomy > MANY:
            return self._preferred_of_all(first, last, size, barred)
        return self._preferred_of_roomy(first, last, size, roomy, bound, seen, chosen)

    def _preferred_of_roomy(
        self,
        first: int,
        last: int,
        size: int,
        roomy: int,
        bound: int,
        seen: set[int],
        chosen: tuple[int, int, int] | None,
    ) -> tuple[int, int] | None:
        """The preferred one of those chosen from and those of most room, from ``roomy`` on.

        Those that were not seen share at most ``bound`` tokens of the block.
        """
        fullest, widest = self._fullest, self._widest
        for entry in self._rooms[roomy:]:
            k, spare = entry & NUMBERS, (entry >> NUMBER_BITS) - size
            if not widest and chosen is not None and spare > chosen[0]:
                break  # what is shared only leaves more
            if k in seen:
                continue
            shared = self.shared(first, last, k) if bound > 0 else 0
            spare += shared
            if spare >= 0:
                rank = fullest * spare - widest * shared
                if chosen is None or (rank, k) < chosen:
                    chosen = rank, k, shared
        return None if chosen is None else chosen[1:]

    def _preferred_of_all(
        self, first: int, last: int, size: int, barred: Set[int]
    ) -> tuple[int, int] | None:
        """The preferred microbatch, from all that could have room."""
        # All but a few have at most this room.
        most = self._rooms[-FEW - 1] >> NUMBER_BITS if len(self._rooms) > FEW else size
        start, stop = self.step.sharing(first, last, size - most)
        shared = self._shared_within(first, last, start, stop)
        for entry in self._rooms[-FEW:]:
            k = entry & NUMBERS
            if shared[k] < 0 and k not in barred:
                shared[k] = self.shared(first, last, k)
        shared[list(barred)] = -1
        spare = self.capacity - size - self.opened_works() + shared
        fits = np.flatnonzero((spare >= 0) & (shared >= 0))
        if not fits.size:
            return None
        rank = self._fullest * spare[fits] - self._widest * shared[fits]
        k = int(fits[np.argmin(rank)])
        return k, int(shared[k])

    def _shared_within(self, first: int, last: int, start: int, stop: int) -> IntArray:
        """Tokens of a block that every microbatch with a member in [start, stop) has; [K].

        The interval holds the block; -1 for microbatches without such a member outside the block.
        """
        lcp = self.step.work.lcp
        # Written from far to near: the nearest member of a microbatch, which shares most, counts.
        # Trajectories that are nowhere yet have the last entry.
        left, right = np.full((2, len(self.members) + 1), -1)
        before, after = lcp[start + 1 : first + 1], lcp[last + 1 : stop]
        left[self.owners[start:first]] = np.minimum.accumulate(before[::-1])[::-1]
        right[self.owners[last + 1 : stop][::-1]] = np.minimum.accumulate(after)[::-1]
        return np.asarray(np.maximum(left, right)[:-1], np.int64)
