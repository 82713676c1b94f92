"""Compact work of intervals of lexicographically ordered trajectories (Section 3.2, Eq. 5-6).

Trajectories are numbered 0..N-1 in lexicographic order and an interval ``[start, stop)`` is
half-open, so Eq. 6's W(a, b) with 1-based inclusive ends is ``work(a - 1, b)`` here. With
``lcp[i]`` the longest common prefix of trajectories i-1 and i,

    W(start, stop) = cumulative[stop] - base[start]

where ``cumulative`` counts the tokens that each trajectory adds after its predecessor and ``base``
takes the first trajectory's shared prefix back out. Both arrays are nondecreasing: work grows when
an interval grows at either end, which is what the searches below rest on.

Shapes: N trajectories; all counts are tokens.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts.errors import PlanError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeMinimum:
    """Sparse table of range minima: ``levels[j][i]`` is the minimum of ``2**j`` values from i on.

    Building takes O(n log longest) time and space; a query reads two entries.
    """

    levels: tuple[IntArray, ...]

    @classmethod
    def build(cls, values: IntArray, *, longest: int | None = None) -> Self:
        """Index ``values[n]`` for queries of up to ``longest`` entries (default n)."""
        longest = values.size if longest is None else longest
        levels = [values]
        while 2 << (len(levels) - 1) <= longest:
            half = 1 << (len(levels) - 1)
            levels.append(np.minimum(levels[-1][:-half], levels[-1][half:]))
        return cls(levels=tuple(levels))

    def query(self, start: IntArray, stop: IntArray) -> IntArray:
        """Minimum of every nonempty range ``[start, stop)``; arrays of one shape."""
        minimum = np.empty(start.shape, np.int64)
        # frexp(n) = (m, x) with n = m * 2**x and m in [1/2, 1): x - 1 is floor(log2 n), exactly.
        level_of = np.frexp((stop - start).astype(np.float64))[1] - 1
        for level in np.unique(level_of):
            chosen = level_of == level
            table, width = self.levels[level], 1 << int(level)
            minimum[chosen] = np.minimum(table[start[chosen]], table[stop[chosen] - width])
        return minimum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalWork:
    """Interval work and pairwise LCP of N sorted trajectories, constant time a query.

    ``lengths[N]``, ``lcp[N]`` are the inputs, ``cumulative[N+1]`` and ``base[N]`` the sums of the
    module's formula, ``valleys`` the range-minimum index of ``lcp``.
    """

    lengths: IntArray
    lcp: IntArray
    cumulative: IntArray
    base: IntArray
    valleys: RangeMinimum

    @classmethod
    def build(cls, lengths: ArrayLike, lcp: ArrayLike) -> Self:
        """Prepare the sums for ``lengths[N]`` and ``lcp[N]`` in lexicographic order.

        Raises:
            PlanError: the arrays cannot be lengths and adjacent LCPs of sorted trajectories.
        """
        lengths = np.asarray(lengths, np.int64)
        lcp = np.asarray(lcp, np.int64)
        _check(lengths, lcp)
        cumulative = np.zeros(lengths.size + 1, np.int64)
        np.cumsum(lengths - lcp, out=cumulative[1:])
        base = cumulative[:-1] - lcp
        valleys = RangeMinimum.build(lcp)
        return cls(lengths=lengths, lcp=lcp, cumulative=cumulative, base=base, valleys=valleys)

    def __len__(self) -> int:
        return int(self.lengths.size)

    @property
    def total(self) -> int:
        """Work G = C(X) of all trajectories in one trie."""
        return int(self.cumulative[-1])

    def work(self, start: IntArray | int, stop: IntArray | int) -> IntArray:
        """Compact work of every interval ``[start, stop)``, start < stop, broadcast (Eq. 5)."""
        return np.asarray(self.cumulative[stop] - self.base[start], np.int64)

    def partition(self, cuts: IntArray) -> IntArray:
        """Work of each of the K intervals that inner ``cuts[K-1]`` separate; [K]."""
        bounds = np.concatenate(([0], cuts, [len(self)]))
        return self.work(bounds[:-1], bounds[1:])

    def pairwise_lcp(self, first: IntArray | int, second: IntArray | int) -> IntArray:
        """LCP of trajectories ``first`` and ``second`` (any order, equal allowed), broadcast."""
        first, second = np.broadcast_arrays(first, second)
        low, high = np.minimum(first, second), np.maximum(first, second)
        shared = np.array(self.lengths[low])  # a copy, and an array even for a single pair
        apart = low < high
        shared[apart] = self.valleys.query(low[apart] + 1, high[apart] + 1)
        return shared

    def first_starts(self, capacity: int) -> IntArray:
        """Smallest start of an interval within ``capacity`` for every stop 0..N; [N+1].

        Equals ``stop`` where not even the last trajectory fits alone (and at stop 0).
        """
        starts = np.searchsorted(self.base, self.cumulative - capacity, side="left")
        return np.minimum(starts, np.arange(starts.size))

    def last_stops(self, capacity: int) -> IntArray:
        """Largest stop of an interval within ``capacity`` for every start 0..N-1; [N].

        Equals ``start`` where not even the first trajectory fits alone.
        """
        stops = np.searchsorted(self.cumulative, self.base + capacity, side="right") - 1
        return np.maximum(stops, np.arange(stops.size))


def _check(lengths: IntArray, lcp: IntArray) -> None:
    if lengths.ndim != 1 or lengths.shape != lcp.shape or lengths.size == 0:
        raise PlanError(
            "lengths and lcp must be one-dimensional, equally long and not empty; "
            f"got shapes {lengths.shape} and {lcp.shape}. Pass both arrays of one prefix forest."
        )
    longest = np.minimum(lengths, np.concatenate(([0], lengths[:-1])))
    wrong = np.flatnonzero((lengths < 1) | (lcp < 0) | (lcp > longest))
    if wrong.size:
        i = int(wrong[0])
        raise PlanError(
            f"sorted trajectory {i} has length {lengths[i]} and shares {lcp[i]} tokens with its "
            f"predecessor; expected length >= 1 and 0 <= lcp <= {max(longest[i], 0)}. "
            "Pass lengths and adjacent LCPs of lexicographically sorted trajectories."
        )
