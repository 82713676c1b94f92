"""Taking microbatches apart: their members go where the rest of the step has room and shares most.

A best-fit packing decides node by node and never looks back. Here a whole microbatch, or the part
of it below its lowest fork, is offered to the others: as one block if it fits anywhere, otherwise
fork by fork in smaller blocks. The change is kept if total work falls. The search is bounded by
the number of blocks that it places, never by a clock, so the same input gives the same plan.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from harts.planning.grouping import in_order
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.lcp_table import LcpTable
from harts.planning.placement import Placement, Policy, Step

INTERLEAVED = 8
"""Microbatches with members between a block's own that are considered for it."""
PLACEMENTS, PLACEMENTS_PER_MICROBATCH = 800, 2
"""Blocks that may be tried in all, and for each microbatch there is."""
FORCED_PLACEMENTS = 256
"""Blocks that may be tried to dissolve microbatches at any price."""


def dissolve(
    work: IntervalWork, groups: list[IntArray], capacity: int, most: int = 1
) -> list[list[IntArray]]:
    """Groupings of ever less total work (Eq. 5) in ever fewer microbatches, from ``groups`` on.

    The last one of each count that the search came by; of those the last ``most``.
    """
    search = _Search(work, groups, capacity)
    owners = {len(groups): search.owners.copy()}
    for _ in search.improvements():
        owners[sum(map(bool, search.members))] = search.owners.copy()
    return [_groups(found) for found in list(owners.values())[-most:]]


def dissolve_forced(
    work: IntervalWork, groups: list[IntArray], capacity: int, count: int
) -> list[IntArray]:
    """Groups after so many microbatches are dissolved, if they can be, whatever that costs."""
    search = _Search(work, groups, capacity)
    search.force(count)
    return search.groups()


def _groups(owners: IntArray) -> list[IntArray]:
    order = np.argsort(owners, kind="stable")
    return in_order(np.split(order, np.flatnonzero(np.diff(owners[order])) + 1))


class _Search(Placement):
    """Microbatches under change, with a budget of blocks to place."""

    def __init__(self, work: IntervalWork, groups: list[IntArray], capacity: int) -> None:
        super().__init__(Step.build(work), capacity, Policy.LEAST_WORK)
        self.load(groups)
        self.table = LcpTable.build(work)
        self.budget = PLACEMENTS + PLACEMENTS_PER_MICROBATCH * len(groups)

    def improvements(self) -> Iterator[None]:
        """Try every microbatch, lightest first, until nothing improves; a stop at each success."""
        improved = True
        while improved and self.budget > 0:
            improved = False
            for k in np.argsort(self.opened_works(), kind="stable").tolist():
                if self.budget <= 0:
                    return
                for _ in self._improvements_of(k) if self.members[k] else ():
                    improved = True
                    yield

    def _improvements_of(self, k: int) -> Iterator[None]:
        """Move all of a microbatch out, or what it can of the parts below its lowest fork."""
        members = np.array(self.members[k])
        if self.move(members, k, self.works[k], 0):
            yield
            return
        blocks, fork = self.table.blocks(members)
        for block in blocks if len(blocks) > 1 else ():
            # What else is left shares just the path to the fork.
            rest = fork if block.size < len(self.members[k]) else 0
            if self.move(block, k, self.table.work(block) - rest, 0):
                yield

    def force(self, count: int) -> None:
        """Dissolve ``count`` microbatches, lightest first, at any price."""
        self.budget = FORCED_PLACEMENTS
        for k in np.argsort(self.opened_works(), kind="stable").tolist():
            if self.budget <= 0 or not count:
                break
            members = np.array(self.members[k])
            count -= self.move(members, k, self.works[k], self.capacity * len(self.members))

    def move(self, block: IntArray, home: int, gain: int, allowance: int) -> bool:
        """Move a block of ``home`` out, in pieces if need be; undo it unless total work falls.

        ``gain`` is the work that it leaves behind, and ``allowance`` what it may cost besides.
        """
        before, margin = self.works[home], gain + allowance
        self.close(home)  # nothing comes back while it is taken apart
        done: list[tuple[int, int, list[int]]] = []  # microbatches with what they had before
        pending = [block]
        while pending and margin > 0 and self.budget > 0:
            piece = pending.pop()
            self.budget -= 1
            target = self.target(piece)
            if target is not None:
                k, increase = target
                done.append((k, self.works[k], self.members[k]))
                self.set_work(k, self.works[k] + increase)
                self.members[k] = sorted([*self.members[k], *piece.tolist()])
                self.owners[piece] = k
                margin -= increase
                continue
            pieces, _ = self.table.blocks(piece)
            if len(pieces) < 2:
                margin = 0
            # Each further piece repeats the path down to the fork, unless its new home has it.
            pending += sorted(pieces, key=lambda p: (p.size, int(p[0])))
        moved = not pending and margin > 0
        if moved:
            self.members[home] = [x for x in self.members[home] if self.owner[x] == home]
        else:
            for k, work, members in reversed(done):
                self.set_work(k, work)
                self.members[k] = members
            self.owners[block] = home
        if self.members[home]:
            self.set_work(home, before - gain if moved else before)
        return moved

    def target(self, block: IntArray) -> tuple[int, int] | None:
        """Microbatch to which a block adds least work, and how much; None if it fits in none.

        Of equal ones the fullest, then the first. Of those with members between the block's own,
        some lightest are counted exactly and no others are offered.
        """
        first, last, size = int(block[0]), int(block[-1]), self.table.work(block)
        inside = set[int]()
        if last - first >= block.size:
            inside.update(self.owner[first : last + 1])
        choices: list[tuple[int, int, int]] = []
        found = self.preferred(first, last, size, inside)
        if found is not None:
            k = found[0]
            choices.append((self._increase(block, size, k), -self.works[k], k))
        others = ((self.works[k], k) for k in inside if self.works[k] <= self.capacity)
        for work, k in sorted(others)[:INTERLEAVED]:
            union = self.table.work(np.sort(np.append(block, self.members[k])))
            if union <= self.capacity:
                choices.append((union - work, -work, k))
        if not choices:
            return None
        increase, _, k = min(choices)
        return k, increase

    def _increase(self, block: IntArray, size: int, k: int) -> int:
        """Work that a block adds to a microbatch with no member inside it: Eq. 10 for a block."""
        members, common = self.members[k], self.step.common
        first, last = int(block[0]), int(block[-1])
        at = bisect_left(members, first)
        left = common(members[at - 1], first) if at else 0
        right = common(last, members[at]) if at < len(members) else 0
        twice = min(left, right)
        if twice and block.size > 1:
            twice = min(twice, int(self.table.adjacent(block).min()))
        return size - left - right + twice
