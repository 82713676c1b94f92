"""Compact work of many small sets of trajectories, a few microseconds each (Eq. 5).

`IntervalWork.pairwise_lcp` answers long arrays of queries level by level. The planners that change
one microbatch at a time ask short ones, so here all levels lie in one array and a query is two
gathers, whatever levels it needs.

Shapes: N trajectories; work in compact tokens.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from harts.planning.intervals import IntArray, IntervalWork


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LcpTable:
    """Range minima of adjacent LCPs: level j, from ``offset[j]`` on, covers 2**j neighbours."""

    intervals: IntervalWork
    flat: IntArray
    offset: IntArray
    level: IntArray
    """[N+1] floor(log2) of every width."""

    @classmethod
    def build(cls, work: IntervalWork) -> Self:
        """Lay out the levels that ``work`` already has; O(N log N) space."""
        levels = work.valleys.levels
        widths = np.arange(len(work) + 1)
        return cls(
            intervals=work,
            flat=np.concatenate(levels),
            offset=np.cumsum([0, *(level.size for level in levels[:-1])]),
            level=np.frexp(np.maximum(widths, 1).astype(np.float64))[1].astype(np.int64) - 1,
        )

    def adjacent(self, members: IntArray) -> IntArray:
        """LCP of each member with the next; ``members[n]`` ascending and different, [n-1]."""
        if _is_interval(members):
            return self.intervals.lcp[members[0] + 1 : members[-1] + 1]
        start, stop = members[:-1] + 1, members[1:] + 1
        level = self.level[stop - start]
        base = self.offset[level]
        last = base + stop - (1 << level)
        return np.asarray(np.minimum(self.flat[base + start], self.flat[last]), np.int64)

    def work(self, members: IntArray) -> int:
        """C of ascending ``members[n]``; 0 for none."""
        if not members.size:
            return 0
        if _is_interval(members):
            return int(self.intervals.work(members[0], members[-1] + 1))
        return int(self.intervals.lengths[members].sum() - self.adjacent(members).sum())

    def blocks(self, members: IntArray) -> tuple[list[IntArray], int]:
        """Members split at all their lowest adjacent LCPs, and that LCP, the depth of their fork.

        A single member is a block with no fork, at depth 0.
        """
        if members.size < 2:
            return [members], 0
        shared = self.adjacent(members)
        fork = shared.min()
        bounds = [0, *(np.flatnonzero(shared == fork) + 1).tolist(), members.size]
        return [members[start:stop] for start, stop in pairwise(bounds)], int(fork)


def _is_interval(members: IntArray) -> bool:
    return bool(members.size) and int(members[-1] - members[0]) < members.size
