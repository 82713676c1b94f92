"""Best partition into microbatches that are contiguous in lexicographic order (Eq. 6-9).

A partition of N trajectories into K microbatches is its array of inner cuts ``[K-1]``,
``0 < cuts[0] < ... < N``: microbatch j holds sorted trajectories ``[cuts[j-1], cuts[j])``, the
first from 0 and the last up to N, as `numpy.split` reads them. Work is in compact tokens. Only
sorted arrays come in, so the order in which trajectories were given cannot matter.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from harts.errors import PlanError
from harts.planning.intervals import IntArray, IntervalWork, RangeMinimum
from harts.planning.schedule import Objective, schedule_microbatches

_INFINITE = np.iinfo(np.int64).max


def natural_partition(work: IntervalWork, capacity: int) -> IntArray:
    """First partition within ``capacity`` from splits at the lowest adjacent-LCP valley; cuts.

    Equal valleys are decided by the smaller heavier side. The paper's next rule, the smaller
    difference of the sides, can never decide: by Eq. 6 the sides of equal valleys have equal sums,
    so equal heavier sides mean equal differences. The first such valley is then taken.

    Needs every length within ``capacity``. Each split scans its interval once.
    """
    cuts: list[int] = []
    pending = [(0, len(work))]
    while pending:
        start, stop = pending.pop()
        if work.work(start, stop) <= capacity:
            continue
        valley = work.lcp[start + 1 : stop]
        splits = np.flatnonzero(valley == valley.min()) + start + 1
        heavier = np.maximum(work.work(start, splits), work.work(splits, stop))
        split = int(splits[np.argmin(heavier)])
        cuts.append(split)
        pending += [(start, split), (split, stop)]
    return np.sort(np.array(cuts, np.int64))


def minimum_count(work: IntervalWork, replicas: int, capacity: int) -> int:
    """K_min of Eq. 7: fewest microbatches that the work of one whole trie could allow."""
    return replicas * max(1, -(-work.total // (capacity * replicas)))


def candidate_counts(work: IntervalWork, replicas: int, capacity: int) -> range:
    """Microbatch counts K of Eq. 8, all multiples of D; K_max needs the natural partition."""
    least = minimum_count(work, replicas, capacity)
    natural = natural_partition(work, capacity).size + 1
    most = replicas * min(-(-natural // replicas), len(work) // replicas)
    return range(least, max(least, most) + 1, replicas)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContiguousTable:
    """Exact programme of Eq. 9 for every count up to a largest, with its secondary criterion.

    By Eq. 6 the work of a partition is G plus the LCPs at its inner cuts, so a state (k, stop)
    keeps that sum of LCPs and the heaviest microbatch as one integer,
    ``sum << bits | heaviest``, whose order is the paper's: total work first, then the heaviest
    microbatch. ``rows[k]`` holds the states ``stop = firsts[k], firsts[k]+1, ...`` that are
    feasible and can be completed within the largest count; no other state is needed. O(K N log n)
    time, with at most n trajectories in an interval, and O(K N) space, less what the band omits.
    """

    work: IntervalWork
    starts: IntArray
    bits: int
    firsts: tuple[int, ...]
    rows: tuple[IntArray, ...]

    @classmethod
    def build(cls, work: IntervalWork, capacity: int, most: int) -> Self:
        """Fill the table for counts ``1..most``, of which ``most`` must be feasible.

        Raises:
            PlanError: ``most`` microbatches are too few (or more than there are trajectories), or
                the step has too many tokens for the packed states (above about 2**31).
        """
        bits = min(capacity, work.total).bit_length()
        if int(work.lcp.sum()).bit_length() + bits > 62:
            raise PlanError(
                f"{int(work.lengths.sum()):,} tokens at capacity {capacity:,} exceed the planner's "
                "62-bit states; split the step or lower the capacity."
            )
        starts = work.first_starts(capacity)
        bands = _bands(work, starts, capacity, most)
        rows = [np.zeros(1, np.int64)]
        for (low, _), (first, last) in pairwise(bands):
            rows.append(_next_row(work, starts, bits, rows[-1], low, first, last))
        firsts = tuple(first for first, _ in bands)
        return cls(work=work, starts=starts, bits=bits, firsts=firsts, rows=tuple(rows))

    def total(self, count: int) -> int | None:
        """Least total work of ``count`` microbatches; None where no partition is feasible."""
        row = len(self.work) - self.firsts[count]
        if not 0 <= row < self.rows[count].size:
            return None
        return self.work.total + (int(self.rows[count][row]) >> self.bits)

    def cuts(self, count: int) -> IntArray:
        """Cuts [count-1] of a partition of least total, then least heaviest microbatch.

        Further ties take the earliest split, last microbatch first. ``total(count)`` must not
        be None.
        """
        cuts = np.empty(count - 1, np.int64)
        stop = len(self.work)
        for k in range(count, 1, -1):
            low, row = self.firsts[k - 1], self.rows[k - 1]
            start = max(int(self.starts[stop]), low)
            splits = np.arange(start, min(stop, low + row.size))
            reached = row[splits - low] + (self.work.lcp[splits] << self.bits)
            heaviest = np.maximum(reached & ((1 << self.bits) - 1), self.work.work(splits, stop))
            states = (reached >> self.bits << self.bits) | heaviest
            stop = start + int(np.argmin(states))
            cuts[k - 2] = stop
        return cuts


def _bands(work: IntervalWork, starts: IntArray, capacity: int, most: int) -> list[tuple[int, int]]:
    """First and last stop of each row 0..most that lies on a way from 0 to N.

    A state (k, stop) is feasible exactly when k is between the greedy minimum for ``stop`` and
    ``stop`` itself, since any microbatch of two trajectories can be split; likewise for the rest.
    So a row's useful states have no gap, and every predecessor of one within capacity is useful.
    """
    total, stops = len(work), work.last_stops(capacity)
    furthest, nearest = [0], [total]
    for _ in range(most):
        furthest.append(int(stops[furthest[-1]]) if furthest[-1] < total else total)
        nearest.append(int(starts[nearest[-1]]))
    if nearest[most] > 0 or most > total:
        raise PlanError(
            f"{total} trajectories have no contiguous partition into {most} microbatches of at "
            f"most {capacity:,} tokens; raise the capacity or allow another number of microbatches."
        )
    return [(max(k, nearest[most - k]), furthest[k]) for k in range(most + 1)]


def _next_row(
    work: IntervalWork, starts: IntArray, bits: int, row: IntArray, low: int, first: int, last: int
) -> IntArray:
    """States of stops ``first..last`` from the previous row's, whose first stop is ``low``.

    Splits are counted from ``low``. The least sum in a stop's window is a range minimum. Among
    splits of that sum we want the least max(heaviest so far, last interval); moving right, the last
    interval shrinks while the least heaviest of the remaining splits grows. So the answer lies
    where they cross, which a binary descent over the range-minimum levels finds for all stops.
    """
    stops = np.arange(first, last + 1)
    left = np.maximum(starts[stops], low) - low
    right = np.minimum(stops, low + row.size) - low
    longest = int((right - left).max())
    lcp, base = work.lcp[low : low + row.size], work.base[low : low + row.size]
    # A row that already holds stop N has one more state than there are splits.
    reached = RangeMinimum.build(row[: lcp.size] + (lcp << bits), longest=longest)
    # ``whole - base[split]`` is the packed state of least sum whose heaviest is the last interval.
    whole = (reached.query(left, right) >> bits << bits) + work.cumulative[stops]
    crossing, beyond = right, np.full(stops.size, _INFINITE)
    for level, minima in reversed(list(enumerate(reached.levels))):
        probe = crossing - (1 << level)
        inside = np.maximum(probe, 0)
        least = np.minimum(beyond, minima[inside])
        passed = (probe >= left) & (least > whole - base[inside])
        crossing = np.where(passed, probe, crossing)
        beyond = np.where(passed, least, beyond)
    before = np.where(crossing > left, whole - base[np.maximum(crossing - 1, 0)], _INFINITE)
    return np.asarray(np.minimum(beyond, before), np.int64)


def least_work_counts(work: IntervalWork, capacity: int) -> tuple[int, int]:
    """Fewest and most microbatches of a contiguous partition of least work, whatever D.

    Least total work is convex in the count: interval work satisfies the quadrangle inequality, with
    equality among feasible intervals by Eq. 6, and shortest paths of k edges over such costs are
    convex in k. So every count between the two is of least work too, and outside them work grows
    with the distance: the best multiple of D lies between them or next to them.

    Needs every length within ``capacity``. O(N) time by a monotone queue of splits.
    """
    starts, lcp, unit = work.first_starts(capacity).tolist(), work.lcp.tolist(), len(work) + 1
    ends = []
    for sign in (1, -1):
        # One integer orders partitions by work, then by fewest (or most) microbatches.
        reached, queue = 0, deque[tuple[int, int]]()
        for split, start in enumerate(starts[1:]):
            candidate = reached + lcp[split] * unit + sign
            while queue and queue[-1][0] >= candidate:
                queue.pop()
            queue.append((candidate, split))
            while queue[0][1] < start:
                queue.popleft()
            reached = queue[0][0]
        ends.append(sign * reached % unit)
    return ends[0], ends[1]


def least_contiguous_work(work: IntervalWork, capacity: int) -> int:
    """Least total work of a contiguous partition into any number of microbatches; O(N).

    No contiguous plan for D replicas has less, so a lighter plan makes that search unnecessary.
    """
    cut_cost, queue = 0, deque[tuple[int, int]]()
    lcp = work.lcp.tolist()
    for split, start in enumerate(work.first_starts(capacity)[1:].tolist()):
        candidate = cut_cost + lcp[split]
        while queue and queue[-1][0] >= candidate:
            queue.pop()
        queue.append((candidate, split))
        while queue[0][1] < start:
            queue.popleft()
        cut_cost = queue[0][0]
    return work.total + cut_cost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContiguousPlan:
    """Contiguous microbatches, each with its place, in lexicographic order.

    ``cuts[K-1]`` separate the microbatches, ``works[K]`` are their compact works, ``replica[K]``
    and ``slot[K]`` their places, ``objective`` is J of Eq. 4.
    """

    cuts: IntArray
    works: IntArray
    replica: IntArray
    slot: IntArray
    objective: Objective


def best_contiguous(
    lengths: ArrayLike,
    lcp: ArrayLike,
    replicas: int,
    capacity: int,
    *,
    trajectories: IntArray | None = None,
) -> ContiguousPlan:
    """Contiguous plan of least objective J (Eq. 4), exact in total work at every N (Eq. 6-9).

    Args:
        lengths: tokens of the N trajectories in lexicographic order.
        lcp: longest common prefix of each with its predecessor; ``lcp[0] == 0``.
        replicas: data-parallel degree D.
        capacity: most compact tokens T of one microbatch.
        trajectories: the caller's index of each sorted trajectory, for error messages.

    Total work is the least of all contiguous partitions whose count D divides. Counts of equal
    total compete within Eq. 8's range; a count beyond it is taken only where its total is strictly
    less. Only the counts that can reach the least total are tabulated (see `least_work_counts`),
    and only those that do are scheduled, since J compares total work first.

    Raises:
        PlanError: fewer trajectories than replicas, a trajectory above capacity, or no feasible
            count that D divides.
    """
    work = IntervalWork.build(lengths, lcp)
    check_feasible(work, replicas, capacity, trajectories)
    counts = _competing_counts(work, replicas, capacity)
    table = ContiguousTable.build(work, capacity, counts[-1])
    totals = {count: total for count in counts if (total := table.total(count)) is not None}
    least = min(totals.values())
    partitions = [table.cuts(count) for count in totals if totals[count] == least]
    schedules = [schedule_microbatches(work.partition(cuts), replicas) for cuts in partitions]
    objective, best = min((s.objective, i) for i, s in enumerate(schedules))
    return ContiguousPlan(
        cuts=partitions[best],
        works=work.partition(partitions[best]),
        replica=schedules[best].replica,
        slot=schedules[best].slot,
        objective=objective,
    )


def check_feasible(
    work: IntervalWork, replicas: int, capacity: int, trajectories: IntArray | None = None
) -> None:
    """Refuse, with what to change, a step for which no plan of any kind can exist.

    Raises:
        PlanError: ``replicas`` or ``capacity`` below 1, N < D, or a trajectory above capacity.
    """
    if replicas < 1 or capacity < 1:
        raise PlanError(
            f"replicas and capacity must be at least 1; got replicas={replicas}, "
            f"capacity={capacity}. Correct the planner's arguments."
        )
    if len(work) < replicas:
        raise PlanError(
            f"{len(work)} trajectories cannot fill {replicas} replicas: each replica needs at "
            f"least one microbatch of its own. Use at most {len(work)} replicas or a larger batch."
        )
    names = np.arange(len(work)) if trajectories is None else trajectories
    order = np.argsort(names)
    check_capacity(work.lengths[order], capacity, lambda row: f"trajectory {names[order[row]]}")


def check_capacity(lengths: IntArray, capacity: int, describe: Callable[[int], str]) -> None:
    """Refuse trajectories longer than a microbatch; ``describe`` names one by its index.

    Raises:
        PlanError: names the first, and says how many there are and what would hold the longest.
    """
    long = np.flatnonzero(lengths > capacity)
    if long.size:
        first, longest = int(long[0]), int(lengths.max())
        raise PlanError(
            f"{describe(first)} has {lengths[first]:,} tokens, but a microbatch holds at most "
            f"{capacity:,} and a trajectory cannot be split (trajectories longer than that: "
            f"{long.size}; the longest has {longest:,} tokens). Raise the capacity to at least "
            f"{longest:,}, or drop or shorten them."
        )


def _competing_counts(work: IntervalWork, replicas: int, capacity: int) -> range:
    """Multiples of D that hold every count of least total, at least one of them feasible."""
    candidates = candidate_counts(work, replicas, capacity)
    allowed = replicas * (len(work) // replicas)
    _check_count_exists(work, replicas, capacity, allowed)
    fewest, most = least_work_counts(work, capacity)
    below = max(candidates[0], fewest // replicas * replicas)
    # No input is known whose least work lies beyond Eq. 8; nothing proves that there is none.
    reach = max(candidates[-1], -(-fewest // replicas) * replicas)
    above = min(-(-most // replicas) * replicas, reach, allowed)
    return range(below, above + 1, replicas)


def fewest_contiguous(work: IntervalWork, capacity: int) -> int:
    """Fewest contiguous microbatches within capacity: each as long as it can be."""
    stops, count, stop = work.last_stops(capacity), 0, 0
    while stop < len(work):
        stop, count = int(stops[stop]), count + 1
    return count


def _check_count_exists(work: IntervalWork, replicas: int, capacity: int, allowed: int) -> None:
    """Refuse a step whose largest possible count is still too small."""
    needed = fewest_contiguous(work, capacity)
    if needed > allowed:
        raise PlanError(
            f"{len(work)} trajectories at capacity {capacity:,} need at least {needed} contiguous "
            f"microbatches, but only {allowed} of at least one trajectory each divide evenly "
            f"among {replicas} replicas. Raise the capacity, use fewer replicas, or add "
            "trajectories."
        )
