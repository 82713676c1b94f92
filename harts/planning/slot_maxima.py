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
    """Works [K] with their descending order and the prefix sums of every rank shift."""

    works: IntArray
    replicas: int
    descending: IntArray
    rank: IntArray
    prefixes: IntArray
    """[D, K+1] sum of the first works whose rank plus the shift is a multiple of D."""

    @classmethod
    def build(cls, works: IntArray, replicas: int) -> Self:
        """Prepare for ``works[K]``; D divides K."""
        order = np.argsort(-works, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        shifted = np.arange(order.size) + np.arange(replicas)[:, None]
        prefixes = np.zeros((replicas, order.size + 1), np.int64)
        np.cumsum(works[order] * (shifted % replicas == 0), axis=1, out=prefixes[:, 1:])
        return cls(
            works=works,
            replicas=replicas,
            descending=works[order],
            rank=rank,
            prefixes=prefixes,
        )

    @property
    def total(self) -> int:
        """The sum now."""
        return int(self.prefixes[0, -1])

    def after(self, giver: int, taker: IntArray, amount: IntArray) -> IntArray:
        """The sum when ``amount[n]`` goes from ``giver`` to ``taker[n]``; [n]."""
        entries = np.stack((self.works[giver] - amount, self.works[taker] + amount))
        into = np.searchsorted(-self.descending, -entries)
        out = np.empty_like(into)
        out[0], out[1] = self.rank[giver], self.rank[taker]
        # Ranks behind a removal move up by one, ranks from an insertion on move down by one.
        events = np.concatenate((out * 4 + 4, into * 4 + 2))
        events.sort(axis=0)
        shift = np.cumsum((events & 2) - 1, axis=0)
        bounds = np.concatenate((events >> 2, np.full((1, taker.size), self.works.size)))
        row = shift % self.replicas * (self.works.size + 1)
        prefix = self.prefixes.ravel()
        total = self.prefixes[0][bounds[0]]
        total += (prefix[row + bounds[1:]] - prefix[row + bounds[:-1]]).sum(axis=0)
        first = entries[0] > entries[1]
        for i, ahead in ((0, ~first), (1, first)):
            # A removed work was counted at the rank that it would have moved to.
            moved = out[i] - (out[1 - i] < out[i]) + (into <= out[i]).sum(axis=0)
            total -= np.where(moved % self.replicas == 0, self.descending[out[i]], 0)
            place = into[i] - (out < into[i]).sum(axis=0) + ahead
            total += np.where(place % self.replicas == 0, entries[i], 0)
        return np.asarray(total, np.int64)
