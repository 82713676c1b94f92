"""Lower bound on total compact work that holds for every partition, contiguous or not.

Two bounds, the larger counts; G is the work of all trajectories in one trie.

*Capacity.* A trie token at depth p whose subtree needs work w below it is computed by at least
ceil(w / (T - p)) microbatches, because each of them spends p tokens on the path down to it. Taken
bottom-up, with w itself the bound for the part below, and with a parent computed wherever a child
is, the sum over all tokens bounds the total work.

*Count.* In every microbatch but the one that holds trajectory 0, the lexicographically first
member i repeats the lcp[i] tokens that trajectory i shares with its predecessor. With at least K
microbatches the total is at least G plus the K-1 smallest lcp[1:].
"""

import numpy as np

from harts.planning.intervals import IntervalWork


def total_work_lower_bound(work: IntervalWork, replicas: int, capacity: int) -> int:
    """Tokens that no valid plan can go below; every length must be within ``capacity``.

    O(N log N) time.
    """
    by_capacity = _capacity_bound(work, capacity)
    slots = max(1, -(-by_capacity // (capacity * replicas)))
    cheapest = np.sort(work.lcp[1:])[: slots * replicas - 1]
    return max(by_capacity, work.total + int(cheapest.sum()))


def _capacity_bound(work: IntervalWork, capacity: int) -> int:
    """Capacity bound by one walk over the open path of the trie."""
    # Open trie nodes from the root down: depth, bound on the work below, microbatches needed.
    depths, belows, needs = [0], [0], [1]
    forks = [*work.lcp[1:].tolist(), 0]
    for length, fork in zip(work.lengths.tolist(), forks, strict=True):
        depths.append(length)
        belows.append(0)
        needs.append(1)
        while depths[-1] > fork:
            depth, below, need = depths.pop(), belows.pop(), needs.pop()
            if below:
                need = max(need, -(-below // (capacity - depth)))
            if depths[-1] < fork:
                depths.append(fork)
                belows.append(0)
                needs.append(1)
            belows[-1] += below + need * (depth - depths[-1])
            needs[-1] = max(needs[-1], need)
    return belows[0]
