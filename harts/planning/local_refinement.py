"""Local refinement: less total work from a few changed memberships, at the same count.

Section 3.2, "Adaptive candidate refinement": boundary refinement of contiguous groupings, then
sparse repair by single moves and swaps. "Near" means at most ``REACH`` (the paper's H) positions
apart in the global lexicographic order.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

import numpy as np

from harts.planning.grouping import Membership, compact_works, cuts_of, from_cuts
from harts.planning.intervals import IntArray, IntervalWork

REACH = 8
SWEEPS = 2
REPAIRS = 4


def refine(work: IntervalWork, groups: list[IntArray], capacity: int) -> list[IntArray]:
    """Refined grouping of the same count, total work no larger, every work within ``capacity``."""
    cuts = cuts_of(groups)
    if cuts is not None:
        groups = from_cuts(work, move_cuts(work, cuts, capacity))
    return repair(work, groups, capacity)


def move_cuts(work: IntervalWork, cuts: IntArray, capacity: int) -> IntArray:
    """Move each cut to the best near position, left to right, at most ``SWEEPS`` times."""
    bounds = [0, *cuts.tolist(), len(work)]
    for _ in range(SWEEPS):
        before = bounds.copy()
        for i in range(1, len(bounds) - 1):
            bounds[i] = _best_cut(work, bounds[i - 1], bounds[i], bounds[i + 1], capacity)
        if bounds == before:
            break
    return np.array(bounds[1:-1], np.int64)


def repair(work: IntervalWork, groups: list[IntArray], capacity: int) -> list[IntArray]:
    """Apply up to ``REPAIRS`` times the best near move, or the best near swap if no move helps."""
    for _ in range(REPAIRS):
        membership = Membership.of_groups(work, groups)
        works, home = compact_works(work, groups), membership.shared_at_home()
        owner = _moved(membership, works, home, capacity)
        if owner is None:
            owner = _swapped(membership, works, home, capacity)
        if owner is None:
            break
        groups = Membership.of_owners(work, owner).groups()
    return groups


def most_repaired(work: IntervalWork) -> int:
    """Tokens that `repair` cannot save more than.

    A move or swap gives each trajectory it moves, two at most, the tokens that its new microbatch
    computes already, which are no more than the longest LCP.
    """
    return REPAIRS * 2 * int(work.lcp.max())


def _best_cut(work: IntervalWork, start: int, cut: int, stop: int, capacity: int) -> int:
    """Near split of [start, stop) of least total, then least heavier side, distance, position."""
    splits = np.arange(max(start + 1, cut - REACH), min(stop, cut + REACH + 1))
    left, right = work.work(start, splits), work.work(splits, stop)
    heavier = np.maximum(left, right)
    order = np.lexsort((splits, abs(splits - cut), heavier, left + right))
    return int(splits[order[np.argmax(heavier[order] <= capacity)]])


def _moved(
    membership: Membership, works: IntArray, home: IntArray, capacity: int
) -> IntArray | None:
    """Owners after the move that saves most; None if none saves. Ties: first trajectory, target."""
    owner, count = membership.owner, works.size
    x, near = _near_pairs(owner.size)
    x, near = np.concatenate((x, near)), np.concatenate((near, x))
    allowed = (owner[x] != owner[near]) & (membership.sizes[owner[x]] > 1)
    x, target = np.divmod(np.unique(x[allowed] * count + owner[near[allowed]]), count)
    shared = membership.shared(x, target, x)
    fits = works[target] + membership.work.lengths[x] - shared <= capacity
    best = _best_saving(np.where(fits, shared - home[x], 0))
    if best is None:
        return None
    owner = owner.copy()
    owner[x[best]] = target[best]
    return owner


def _swapped(
    membership: Membership, works: IntArray, home: IntArray, capacity: int
) -> IntArray | None:
    """Owners after the swap that saves most; None if none saves. Ties: first pair in order."""
    owner, lengths = membership.owner, membership.work.lengths
    x, y = _near_pairs(owner.size)
    apart = owner[x] != owner[y]
    x, y = x[apart], y[apart]
    x_home, y_home = owner[x], owner[y]
    x_shared = membership.shared(x, y_home, y)
    y_shared = membership.shared(y, x_home, x)
    x_alone, y_alone = lengths[x] - home[x], lengths[y] - home[y]
    at_x_home = works[x_home] - x_alone + lengths[y] - y_shared
    at_y_home = works[y_home] - y_alone + lengths[x] - x_shared
    fits = np.maximum(at_x_home, at_y_home) <= capacity
    best = _best_saving(np.where(fits, works[x_home] + works[y_home] - at_x_home - at_y_home, 0))
    if best is None:
        return None
    owner = owner.copy()
    owner[x[best]], owner[y[best]] = y_home[best], x_home[best]
    return owner


def _near_pairs(total: int) -> tuple[IntArray, IntArray]:
    """All pairs of positions x < y at most ``REACH`` apart, ordered by x, then y."""
    x = np.repeat(np.arange(total), REACH)
    y = x + np.tile(np.arange(1, REACH + 1), total)
    return x[y < total], y[y < total]


def _best_saving(savings: IntArray) -> int | None:
    if savings.size == 0 or savings.max() <= 0:
        return None
    return int(np.argmax(savings))
