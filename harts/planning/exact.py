"""Best plan of a few trajectories by looking at every set partition (N <= EXACT_LIMIT).

Shapes: N trajectories, P set partitions of them, K microbatches; work in compact tokens.
"""

from functools import cache
from itertools import permutations, product

import numpy as np

from harts.errors import PlanError
from harts.planning.grouping import in_order
from harts.planning.intervals import IntArray, IntervalWork

EXACT_LIMIT = 8
"""Most trajectories that are solved by enumeration: 4,140 partitions for 8 of them."""


def exact_groups(work: IntervalWork, replicas: int, capacity: int) -> list[IntArray]:
    """Groups of least J (Eq. 4) among all set partitions within capacity whose count D divides.

    Slots and replicas are chosen as well as they can be too, so J is the least there is. Of
    partitions of equal J the first in restricted-growth order is taken.

    Raises:
        PlanError: no partition is within capacity with a count that D divides.
    """
    partitions = _partitions(len(work))
    works = _subset_works(work)[partitions]
    count = (works > 0).sum(axis=1)
    feasible = np.flatnonzero((works.max(axis=1) <= capacity) & (count % replicas == 0))
    if not feasible.size:
        raise PlanError(
            f"{len(work)} trajectories at capacity {capacity:,} have no grouping whose number of "
            f"microbatches {replicas} replicas divide. Raise the capacity, use fewer replicas, or "
            "add trajectories."
        )
    descending = -np.sort(-works[feasible], axis=1)
    total = descending.sum(axis=1)
    maxima = descending[:, ::replicas].sum(axis=1)
    order = np.lexsort((maxima, total))
    best = order[(total[order] == total[order[0]]) & (maxima[order] == maxima[order[0]])]
    least = min(
        np.sort(best).tolist(), key=lambda i: least_replica_maximum(descending[i], replicas)
    )
    chosen = partitions[feasible[least]]
    return in_order(
        np.array([x for x in range(len(work)) if mask >> x & 1], np.int64)
        for mask in chosen.tolist()
    )


def least_replica_maximum(descending: IntArray, replicas: int) -> int:
    """Third term of Eq. 4 by trying every assignment in the slots; zeros at the end are ignored."""
    slots = descending[descending > 0].reshape(-1, replicas)
    choices = [set(permutations(row)) for row in slots[1:].tolist()]
    return min(
        max(map(sum, zip(slots[0].tolist(), *rows, strict=True))) for rows in product(*choices)
    )


@cache
def _partitions(total: int) -> IntArray:
    """Every set partition as bit masks of its groups, [P, N], zeros behind the last group."""
    partitions: list[tuple[int, ...]] = [()]
    for member in range(total):
        bit = 1 << member
        partitions = [
            grown
            for masks in partitions
            for grown in (
                *((*masks[:k], mask | bit, *masks[k + 1 :]) for k, mask in enumerate(masks)),
                (*masks, bit),
            )
        ]
    padded = np.zeros((len(partitions), total), np.int64)
    for row, masks in zip(padded, partitions, strict=True):
        row[: len(masks)] = masks
    return padded


def _subset_works(work: IntervalWork) -> IntArray:
    """Work of every subset of trajectories by its bit mask; [2**N].

    By Eq. 5 a last member adds its length less the LCP with the member before it.
    """
    index = np.arange(len(work))
    shared = work.pairwise_lcp(index[:, None], index)
    works, last = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for member in index.tolist():
        added = work.lengths[member] - shared[last, member]
        added[0] = work.lengths[member]
        works = np.concatenate((works, works + added))
        last = np.concatenate((last, np.full(last.size, member)))
    return works
