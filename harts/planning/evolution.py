"""Base candidates for large inputs: sampled counts, merges and splits of a contiguous partition.

Section 3.2, "Heuristic base search". By Eq. 6 a merge at cut t saves lcp[t] and a split at t costs
lcp[t]. So the repeated best choice needs no repeated search: a merge that does not fit never fits
later, because microbatches only grow, and a split is always legal and changes no other split.

Cuts as in `contiguous`; work in compact tokens.
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from harts.planning.intervals import IntArray, IntervalWork


def sampled_counts(counts: range, budget: int) -> list[int]:
    """At most ``budget`` of the candidate counts, ascending: all of them if they fit.

    Otherwise half of the budget goes to the smallest counts, one after the other, and half to
    evenly spaced ones from there to the largest, which is included.
    """
    if len(counts) <= budget:
        return list(counts)
    dense = (budget + 1) // 2
    sparse = np.linspace(dense - 1, len(counts) - 1, budget - dense + 1)[1:]
    return [counts[int(i)] for i in (*range(dense), *np.rint(sparse))]


def evolve_partition(
    work: IntervalWork, cuts: IntArray, targets: Iterable[int], capacity: int
) -> dict[int, IntArray]:
    """Cuts for each target count that merges or splits of ``cuts`` reach; others are left out."""
    merged, split = merge_order(work, cuts, capacity), split_order(work, cuts)
    reached = {}
    for target in targets:
        missing = target - (cuts.size + 1)
        if -merged.size <= missing <= 0:
            reached[target] = np.setdiff1d(cuts, merged[:-missing] if missing else merged[:0])
        elif 0 < missing <= split.size:
            reached[target] = np.union1d(cuts, split[:missing])
    return reached


def merge_order(work: IntervalWork, cuts: IntArray, capacity: int) -> IntArray:
    """Cuts in the order in which merges within ``capacity`` remove them, most saving first.

    Equal savings take the first cut in lexicographic order.
    """
    bounds = [0, *cuts.tolist(), len(work)]
    left = {stop: start for start, stop in pairwise(bounds)}
    right = dict(pairwise(bounds))
    removed = []
    for cut in cuts[np.argsort(-work.lcp[cuts], kind="stable")].tolist():
        start, stop = left[cut], right[cut]
        if work.work(start, stop) <= capacity:
            left[stop], right[start] = start, stop
            removed.append(cut)
    return np.array(removed, np.int64)


def split_order(work: IntervalWork, cuts: IntArray) -> IntArray:
    """Positions that are not yet cuts in the order in which splits cut them, least cost first.

    Equal costs take the first position in lexicographic order.
    """
    free = np.setdiff1d(np.arange(1, len(work)), cuts)
    return free[np.argsort(work.lcp[free], kind="stable")]
