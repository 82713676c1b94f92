"""Lower bounds on total compact work that hold for every partition, contiguous or not.

A plan crosses an edge of the prefix trie with as many microbatches as have members below it, and
its total work is the sum over edges of length times crossings. Write m(v) for the crossings of the
edge into node v, d(v) for its depth, T for the capacity and W(v) for the work of the whole plan on
edges below v. Each of the m(v) microbatches spends d(v) tokens on the path down to v, so

    W(v) <= m(v) (T - d(v))                                                            (room)

and m(u) <= m(v) <= sum of m(u) over the children u of v. Two bounds follow; the larger counts.

`_splitting_bound`, from these relations and a count that D divides; it charges for every
microbatch that must be split off where nothing shallow can be split.

`harts.planning.packing_bound`, from the sizes of what cannot be divided at a profit.

Shapes: N trajectories, K microbatches, D replicas; work in compact tokens.
"""

from heapq import heappop, heappush

from harts.planning.intervals import IntervalWork
from harts.planning.packing_bound import packing_bound
from harts.planning.trie import PrefixTrie


def total_work_lower_bound(
    work: IntervalWork, replicas: int, capacity: int, trie: PrefixTrie | None = None
) -> int:
    """Tokens that no valid plan can go below; every length must be within ``capacity``.

    ``trie`` may be given if it has been built already. O(N log^2 N) time.
    """
    trie = PrefixTrie.build(work) if trie is None else trie
    return max(_splitting_bound(trie, replicas, capacity), packing_bound(work, trie, capacity))


def _splitting_bound(trie: PrefixTrie, replicas: int, capacity: int) -> int:
    """Bound from room, crossings of parents and children, and a count divisible by D.

    For every node v this keeps a least count n(v) <= m(v), a bound ``below`` on W(v), and a
    multiset of split depths, such that W(v) >= below + (sum over the m(v) - n(v) smallest split
    depths s of s - d(v)).

    Given that for the children u, let t = sum of below(u) + n(u) (d(u) - d(v)). Raising m(u) by one
    above n(u) costs d(u) - d(v) and u's next split, that is the split's depth less d(v). The
    children's counts sum to at least m(v), so W(v) is at least t plus the m(v) - sum n(u) smallest
    split depths of all children, each less d(v). As long as the children's n(u) sum to more than
    n(v), microbatches can be split at v itself for nothing: d(v) joins the multiset so many times.
    By (room) n(v) is the least count of at least max n(u) for which that bound fits; the root's is
    also a multiple of D. Splits taken for n(v) leave the multiset and join ``below``.
    """
    size = len(trie.parent)
    below, least = [0] * size, [1] * size
    splits: list[list[tuple[int, int]]] = [[] for _ in range(size)]  # heaps of (depth, how many)
    for node in trie.bottom_up:
        children = trie.children[node]
        if not children:
            continue
        depth = trie.depth[node]
        below[node] = sum(below[u] + least[u] * (trie.depth[u] - depth) for u in children)
        heap = _merged([splits[u] for u in children])
        for u in children:
            splits[u] = []
        free = sum(least[u] for u in children)
        needed = max(least[u] for u in children)
        while True:
            room = capacity - depth
            needed = max(needed, -(-below[node] // room) if room else 0)
            if node == 0:
                needed = -(-needed // replicas) * replicas
            if needed <= free or not heap:
                break
            at, several = heappop(heap)
            taken = min(several, needed - free)
            below[node] += taken * (at - depth)
            free += taken
            if several > taken:
                heappush(heap, (at, several - taken))
        if free > needed:
            heappush(heap, (depth, free - needed))
        least[node], splits[node] = needed, heap
    return below[0]


def _merged(heaps: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """One heap of all; the largest is extended, so an entry moves O(log N) times in all."""
    largest = max(heaps, key=len)
    for heap in heaps:
        if heap is not largest:
            for entry in heap:
                heappush(largest, entry)
    return largest
