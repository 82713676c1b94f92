"""Bottom-up packing of the prefix trie into microbatches of any membership (``hierarchical``).

A microbatch computes an edge of the trie once if it holds anything below it, so total work is the
sum over edges of length times the number of microbatches that cross it. The trie is walked from the
leaves. At a node of depth d the parts from below, each a share of one microbatch with its work
below d, are packed into few bins of room T - d: every two parts that become one spare d tokens
later, and no merge nearer the root could spare more. The packing is best-fit decreasing, which
also leaves the last bin as empty as it can, the part that is easiest to place further up.

Two parts that do not fit together at a node fit at none of its ancestors, because they grow by
the same path that they share. So the parts that meet at a node come from different children.

Shapes: N trajectories, K microbatches; work in compact tokens.
"""

from bisect import bisect_left, insort

import numpy as np

from harts.errors import PlanError
from harts.planning.dissolve import dissolve, dissolve_forced
from harts.planning.grouping import compact_works, in_order
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.trie import PrefixTrie

_Bin = tuple[int, int]
"""Space left, and the number of the bin's contents."""


def hierarchical_groups(
    work: IntervalWork, replicas: int, capacity: int, trie: PrefixTrie | None = None
) -> list[IntArray]:
    """Groups of sorted positions, a multiple of D of them, by packing and refinement.

    Every length must be within ``capacity`` and N at least ``replicas``. ``trie`` may be given if
    it has been built already.

    Raises:
        PlanError: the microbatches found cannot be made a multiple of D.
    """
    packed = pack_trie(PrefixTrie.build(work) if trie is None else trie, capacity)
    return dissolve_aligned(work, packed, replicas, capacity)


def pack_trie(trie: PrefixTrie, capacity: int) -> list[IntArray]:
    """Groups within ``capacity`` by one walk from the leaves; any number of them.

    A bin's space does not change on the way up, since its work below the node and the node's room
    grow by the same edge. So the bins of the child that has most stay as they are, and those of the
    others are packed into them: O(N log N) packings in all.
    """
    contents: list[int | tuple[int, int]] = []  # a trajectory, or two bins that became one
    spaces: list[list[_Bin]] = [[] for _ in trie.parent]
    for node in trie.bottom_up:
        children = trie.children[node]
        if not children:
            spaces[node] = [(capacity - trie.depth[node], len(contents))]
            contents.append(trie.first[node])
            continue
        # The most bins, then the least space: of single trajectories, the longest.
        most = min(children, key=lambda u: (-len(spaces[u]), spaces[u][0]))
        others = sorted(found for u in children if u != most for found in spaces[u])
        spaces[node] = spaces[most]
        for u in children:
            spaces[u] = []
        _pack(others, spaces[node], capacity - trie.depth[node], contents)
    return in_order([_members(bin_, contents) for _, bin_ in spaces[0]])


def _pack(
    parts: list[_Bin], bins: list[_Bin], room: int, contents: list[int | tuple[int, int]]
) -> None:
    """Put parts, largest first, into the bin with the least space that takes it, or a new one."""
    for space, part in parts:
        size = room - space
        at = bisect_left(bins, (size, -1))
        if at < len(bins):
            left, chosen = bins.pop(at)
            contents.append((chosen, part))
            insort(bins, (left - size, len(contents) - 1))
        else:
            insort(bins, (space, part))


def _members(part: int, contents: list[int | tuple[int, int]]) -> IntArray:
    """Trajectories of a bin, ascending."""
    found, pending = [], [part]
    while pending:
        content = contents[pending.pop()]
        if isinstance(content, int):
            found.append(content)
        else:
            pending += content
    return np.sort(np.array(found, np.int64))


def dissolve_aligned(
    work: IntervalWork, groups: list[IntArray], replicas: int, capacity: int
) -> list[IntArray]:
    """Groups taken apart, in a number that D divides.

    If that is not the number that least work takes, a few more microbatches may cost less to align.

    Raises:
        PlanError: no number of them can be made a multiple of D.
    """
    stages = dissolve(work, groups, capacity, replicas)
    plans: list[list[IntArray]] = []
    for stage in stages[::-1]:
        try:
            plans.append(aligned(work, stage, replicas, capacity))
        except PlanError:
            if stage is stages[0] and not plans:
                raise
        if len(stage) % replicas == 0:
            break  # it has less work than those before
    return min(plans, key=lambda plan: int(compact_works(work, plan).sum()))


def aligned(
    work: IntervalWork, groups: list[IntArray], replicas: int, capacity: int
) -> list[IntArray]:
    """Groups of a number that D divides, by splits or by taking some apart, whichever is cheaper.

    Raises:
        PlanError: neither gives a multiple of D.
    """
    surplus = len(groups) % replicas
    if not surplus:
        return groups
    fewer = groups
    if work.total <= (len(groups) - surplus) * capacity:
        fewer = dissolve_forced(work, groups, capacity, surplus)
    if len(fewer) % replicas == 0:
        try:
            split = split_to_multiple(work, groups, replicas)
        except PlanError:
            return fewer
        return min(split, fewer, key=lambda found: int(compact_works(work, found).sum()))
    return split_to_multiple(work, groups, replicas)


def split_to_multiple(work: IntervalWork, groups: list[IntArray], replicas: int) -> list[IntArray]:
    """Split groups until D divides their number, each time where it repeats the fewest tokens.

    A group split at its lowest adjacent LCP repeats just that many tokens, and both sides are
    within the capacity that the whole was.

    Raises:
        PlanError: there are too few trajectories to split.
    """
    missing = -len(groups) % replicas
    if len(groups) + missing > len(work):
        raise PlanError(
            f"{len(work)} trajectories in {len(groups)} microbatches cannot be split further into "
            f"a multiple of {replicas} replicas. Raise the capacity, use fewer replicas, or add "
            "trajectories."
        )
    if not missing:
        return groups
    groups = list(groups)
    valleys = [_lowest_valley(work, group) for group in groups]
    for _ in range(missing):
        chosen = min(range(len(groups)), key=lambda k: valleys[k][0])
        group, at = groups[chosen], valleys[chosen][1]
        groups[chosen : chosen + 1] = [group[:at], group[at:]]
        valleys[chosen : chosen + 1] = [_lowest_valley(work, g) for g in (group[:at], group[at:])]
    return in_order(groups)


def _lowest_valley(work: IntervalWork, group: IntArray) -> tuple[int, int]:
    """Least adjacent LCP inside a group and the split there; the middle one of equal valleys."""
    if group.size < 2:
        return np.iinfo(np.int64).max, 0
    shared = work.pairwise_lcp(group[:-1], group[1:])
    lowest = np.flatnonzero(shared == shared.min())
    return int(shared.min()), int(lowest[lowest.size // 2]) + 1
