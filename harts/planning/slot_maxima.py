"""The sum of slot maxima (second term of Eq. 4) when two works change, for many changes at once.

With works in descending order, slots are blocks of D, so the sum counts the works of ranks
0, D, 2D, ... Taking two works out and putting two others in moves what lies between by one or two
ranks; prefix sums for every rank shift then give the new sum without sorting again.

Shapes: K microbatches, D replicas, n changes; work in compact tokens.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from harts.planning.intervals import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotMaxima:
    """Works [K] with their order and the prefix sums of every rank shift."""

    works: IntArray
    replicas: int
    ascending: IntArray
    """[K] the works, negated, in ascending order."""
    rank: IntArray
    """[K] place of each in that order."""
    prefixes: IntArray
    """[D, K+1] sum of the first works whose rank plus the shift is a multiple of D."""

    @classmethod
    def build(cls, works: IntArray, replicas: int) -> Self:
        """Prepare for ``works[K]``; D divides K."""
        order = np.argsort(-works, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        descending = works[order]
        prefixes = np.zeros((replicas, order.size + 1), np.int64)
        for shift in range(replicas):
            counted = -shift % replicas
            prefixes[shift, counted + 1 :: replicas] = descending[counted::replicas]
        np.cumsum(prefixes, axis=1, out=prefixes)
        return cls(
            works=works,
            replicas=replicas,
            ascending=-descending,
            rank=rank,
            prefixes=prefixes,
        )

    @property
    def total(self) -> int:
        """The sum now."""
        return int(self.prefixes[0, -1])

    def after(self, giver: int, taker: IntArray, amount: IntArray) -> IntArray:
        """The sum when ``amount[n]`` goes from ``giver`` to ``taker[n]``; [n]."""
        entries, out = np.empty((2, 2, taker.size), np.int64)
        np.subtract(self.works[giver], amount, out=entries[0])
        np.add(self.works[taker], amount, out=entries[1])
        out[0], out[1] = self.rank[giver], self.rank[taker]
        into = np.searchsorted(self.ascending, -entries)
        # What lies between two of these moves up a rank for each removal (odd) before it and down
        # one for each insertion (even); what is removed lies between none.
        events = np.concatenate((out * 2 + 1, into * 2))
        events.sort(axis=0)
        odd = events & 1
        row = np.cumsum(1 - 2 * odd, axis=0) % self.replicas * (self.works.size + 1)
        start = events >> 1
        stop = np.empty_like(start)
        stop[:-1], stop[-1] = start[1:], self.works.size
        prefix = self.prefixes.ravel()
        total = prefix[start[0]] + (prefix[row + stop] - prefix[row + start + odd]).sum(axis=0)
        place = into - (out[:, None] < into).sum(axis=0)
        first = entries[0] > entries[1]
        place[0] += ~first
        place[1] += first
        counted = entries * (place % self.replicas == 0)
        return np.asarray(total + counted[0] + counted[1], np.int64)
