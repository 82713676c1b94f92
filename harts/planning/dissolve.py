"""Taking microbatches apart: their members go where the rest of the step has room and shares most.

A best-fit packing decides node by node and never looks back. Here a whole microbatch, or the part
of it below its lowest fork, is offered to the others: as one block if it fits anywhere, otherwise
fork by fork in smaller blocks. The change is kept if total work falls. The search is bounded by
the number of blocks that it places, never by a clock, so the same input gives the same plan.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

import numpy as np

from harts.planning.grouping import compact_works, in_order
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.lcp_table import LcpTable

WINDOW = 1024
"""Neighbours on each side of a block whose microbatches are considered for it."""
INTERLEAVED = 8
"""Microbatches with members between a block's own that are considered for it."""
PLACEMENTS, PLACEMENTS_PER_MICROBATCH = 800, 2
"""Blocks that may be tried in all, and for each microbatch there is."""
FORCED_PLACEMENTS = 256
"""Blocks that may be tried to dissolve microbatches at any price."""


def dissolve(
    work: IntervalWork, groups: list[IntArray], capacity: int, forced: int = 0
) -> list[IntArray]:
    """Groups of no more total work (Eq. 5) in as many microbatches or fewer.

    With ``forced`` so many microbatches are dissolved if they can be, whatever that costs, and
    nothing else is done.
    """
    search = _Search(work, groups, capacity)
    if forced:
        search.force(forced)
    else:
        while search.sweep() and search.budget > 0:
            pass
    return search.groups()


class _Search:
    """Owners [N] and works [K] under change; a dissolved microbatch has work 0 and no member."""

    def __init__(self, work: IntervalWork, groups: list[IntArray], capacity: int) -> None:
        self.lcp = work.lcp
        self.table = LcpTable.build(work)
        self.capacity = capacity
        self.owner = np.empty(len(work), np.int64)
        for k, group in enumerate(groups):
            self.owner[group] = k
        self.works = compact_works(work, groups)
        self.budget = PLACEMENTS + PLACEMENTS_PER_MICROBATCH * len(groups)

    def groups(self) -> list[IntArray]:
        return in_order(np.flatnonzero(self.owner == k) for k in range(self.works.size))

    def sweep(self) -> bool:
        """Try every microbatch once, lightest first; whether anything improved."""
        improved = False
        for k in np.argsort(self.works, kind="stable").tolist():
            if self.budget <= 0:
                break
            members = np.flatnonzero(self.owner == k)
            if not members.size:
                continue
            moved = self.move(members, k, 0)
            blocks = [] if moved else _blocks(self.table, members)
            for block in blocks if len(blocks) > 1 else ():
                moved |= self.move(block, k, 0)
            improved |= moved
        return improved

    def force(self, count: int) -> None:
        """Dissolve ``count`` microbatches, lightest first, at any price."""
        self.budget = FORCED_PLACEMENTS
        for k in np.argsort(self.works, kind="stable").tolist():
            if self.budget <= 0 or not count:
                break
            count -= self.move(np.flatnonzero(self.owner == k), k, int(self.works.sum()))

    def move(self, block: IntArray, home: int, allowance: int) -> bool:
        """Move a block of ``home`` out, in pieces if need be; undo it unless total work falls."""
        before = self.works.copy()
        kept = np.flatnonzero(self.owner == home)
        kept = kept[~np.isin(kept, block, assume_unique=True)]
        left = self.table.work(kept)
        gain = int(before[home]) - left + allowance
        self.works[home] = self.capacity  # nothing comes back while it is taken apart
        pending = [block]
        while pending and gain > 0 and self.budget > 0:
            piece = pending.pop()
            self.budget -= 1
            increase = self.place(piece, home)
            if increase is not None:
                gain -= increase
                continue
            pieces = _blocks(self.table, piece)
            if len(pieces) < 2:
                gain = 0
            # Each further piece repeats the path down to the fork, unless its new home has it.
            pending += sorted(pieces, key=lambda p: (p.size, int(p[0])))
        if pending or gain <= 0:
            self.works[:] = before
            self.owner[block] = home
            return False
        self.works[home] = left
        return True

    def place(self, block: IntArray, home: int) -> int | None:
        """Give a block to the microbatch where it adds least work; None if it fits in none."""
        increases = self.increases(block)
        fits = (self.works + increases <= self.capacity) & (self.works > 0)
        fits[home] = False
        if not fits.any():
            return None
        least = increases[fits].min()
        choices = np.flatnonzero(fits & (increases == least))
        chosen = int(choices[np.argmax(self.works[choices])])
        self.owner[block] = chosen
        self.works[chosen] += least
        return int(least)

    def increases(self, block: IntArray) -> IntArray:
        """Work that a block adds to every microbatch; [K].

        Eq. 10 for a block: its own work less what its ends share with the neighbours it gets.
        Microbatches with no member within the window share nothing as far as this can tell.
        Of those with members between the block's own, some lightest are counted exactly and no
        others are offered.
        """
        lcp, first, last = self.lcp, int(block[0]), int(block[-1])
        left, right = np.zeros_like(self.works), np.zeros_like(self.works)
        low, high = max(0, first - WINDOW), min(lcp.size, last + 1 + WINDOW)
        # Written from far to near: the nearest member of a microbatch, which shares most, counts.
        shared = np.minimum.accumulate(lcp[low + 1 : first + 1][::-1])[::-1]
        left[self.owner[low:first]] = shared
        shared = np.minimum.accumulate(lcp[last + 1 : high])[::-1]
        right[self.owner[last + 1 : high][::-1]] = shared
        increases = self.table.work(block) - np.maximum(left, right)
        if last - first >= block.size:
            inner = sorted({*self.owner[first : last + 1].tolist()})
            inner.sort(key=self.works.__getitem__)
            increases[inner] = self.capacity + 1
            for k in inner[:INTERLEAVED]:
                union = np.union1d(np.flatnonzero(self.owner == k), block)
                increases[k] = self.table.work(union) - self.works[k]
        return increases


def _blocks(table: LcpTable, members: IntArray) -> list[IntArray]:
    """Members split at all their lowest adjacent LCPs: what hangs below their common fork."""
    if members.size < 2:
        return [members]
    shared = table.adjacent(members)
    return np.split(members, np.flatnonzero(shared == shared.min()) + 1)
