"""Slow, direct answers for small inputs, from token lists or from lengths and adjacent LCPs."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
from hypothesis import strategies as st

Tokens = tuple[int, ...]


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix, token by token."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def arrays_of(trajectories: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and adjacent LCPs of trajectories that are already sorted."""
    lcp = [0, *(shared_prefix(a, b) for a, b in pairwise(trajectories))]
    return np.array([len(t) for t in trajectories], np.int64), np.array(lcp, np.int64)


def trie_size(trajectories: Sequence[Tokens]) -> int:
    """Compact work as the number of different nonempty prefixes."""
    return len({t[:n] for t in trajectories for n in range(1, len(t) + 1)})


def interval_work(lengths: Sequence[int], lcp: Sequence[int], start: int, stop: int) -> int:
    """Eq. 5 summed term by term."""
    return int(lengths[start] + sum(lengths[i] - lcp[i] for i in range(start + 1, stop)))


def contiguous_partitions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Cuts of every partition of ``total`` trajectories into ``count`` nonempty intervals."""
    for inner in combinations(range(1, total), count - 1):
        yield (0, *inner, total)


def set_partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every partition into nonempty groups; group members stay in order."""
    if not items:
        yield []
        return
    *rest, last = items
    for groups in set_partitions(rest):
        for i in range(len(groups)):
            yield [*groups[:i], [*groups[i], last], *groups[i + 1 :]]
        yield [*groups, [last]]


def sorted_trajectories(most: int = 10) -> st.SearchStrategy[list[Tokens]]:
    """Sorted token lists that share long prefixes; duplicates and strict prefixes occur."""
    tail = st.lists(st.integers(0, 2), min_size=1, max_size=8)
    prompt = st.sampled_from(((), (0, 0, 0), (0, 0, 0, 1, 1, 1, 1)))
    one = st.builds(lambda prefix, rest: (*prefix, *rest), prompt, tail)
    return st.lists(one, min_size=1, max_size=most).map(sorted)


@st.composite
def sorted_arrays(draw: st.DrawFn, most: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and LCPs of some sorted trajectories, drawn so that equal valleys are common."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=most))
    depth = st.sampled_from((0, 0, 1, 2, 5))
    lcp = [0, *(min(draw(depth), a, b) for a, b in pairwise(lengths))]
    return np.array(lengths, np.int64), np.array(lcp, np.int64)
