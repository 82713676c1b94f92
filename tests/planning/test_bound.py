"""Lower bounds against every set partition, and the cases that each bound is for."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.planning.bound import _splitting_bound, total_work_lower_bound
from harts.planning.intervals import IntervalWork
from harts.planning.packing_bound import bins_needed, packing_bound
from harts.planning.trie import PrefixTrie
from tests.planning.checker import cases, least_totals, subset_works, work_of


@pytest.mark.parametrize("seed", range(4))
def test_no_set_partition_is_below_either_bound(seed):
    for trajectories, replicas, capacity in cases(seed, 250, 7):
        work = work_of(trajectories)
        trie = PrefixTrie.build(work)
        works = subset_works(trajectories)
        aligned = least_totals(works, capacity, replicas)
        assert packing_bound(work, trie, capacity) <= least_totals(works, capacity, 1)
        assert work.total <= total_work_lower_bound(work, replicas, capacity)
        if aligned is not None:
            assert _splitting_bound(trie, replicas, capacity) <= aligned
            assert total_work_lower_bound(work, replicas, capacity) <= aligned


def deep_cases(seed, count):
    """A shallow prompt, attempts that fork deep, little room: where units and cores matter."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        trajectories = []
        for attempt in range(int(rng.integers(2, 5))):
            trunk = (0, 0, *([attempt + 1] * int(rng.integers(3, 9))))
            for _ in range(int(rng.integers(1, 4))):
                kept = int(rng.integers(2, len(trunk) + 1))
                tail = rng.integers(0, 3, size=int(rng.integers(1, 6))).tolist()
                trajectories.append((*trunk[:kept], *tail))
        trajectories = sorted(trajectories[:8])
        yield trajectories, max(map(len, trajectories)) + int(rng.integers(0, 12))


@pytest.mark.parametrize("seed", range(3))
def test_cores_that_would_not_pay_to_split_bound_deep_trees(seed):
    stronger = 0
    for trajectories, capacity in deep_cases(seed, 150):
        work = work_of(trajectories)
        trie = PrefixTrie.build(work)
        least = least_totals(subset_works(trajectories), capacity, 1)
        by_packing = packing_bound(work, trie, capacity)
        assert by_packing <= least
        stronger += by_packing > _splitting_bound(trie, 1, capacity)
    assert stronger >= 5


def test_attempts_above_half_the_room_are_counted_one_by_one():
    # Three attempts of 6 behind a prompt of 2: room says 2 microbatches, but no two fit together.
    lengths, lcp = [8, 8, 8], [0, 2, 2]
    work = IntervalWork.build(lengths, lcp)
    assert _splitting_bound(PrefixTrie.build(work), 1, 13) == 2 * 2 + 18
    assert total_work_lower_bound(work, 1, 13) == 3 * 2 + 18


def test_a_broad_attempt_counts_whole_where_its_forks_are_deep():
    # Two trunks of 6 behind a prompt of 2, each with two leaves of 4: 14 a trunk in room 18.
    one = [(0, 0, a, *([a] * 5), leaf, *([7] * 3)) for a in (1, 2) for leaf in (3, 4)]
    work = work_of(sorted(one))
    assert total_work_lower_bound(work, 1, 20) == 2 * 2 + 28


def test_replicas_that_must_not_idle_split_where_it_is_cheapest():
    work = IntervalWork.build([8] * 4, [0, 6, 2, 6])
    assert total_work_lower_bound(work, 2, 100) == 18 + 2
    assert total_work_lower_bound(work, 3, 100) == 18 + 2 + 6


def fewest_bins(items, room):
    best = len(items)
    for order in set(permutations(items)):
        bins, space = 0, 0
        for item in order:
            if item > space:
                bins, space = bins + 1, room
            space -= item
        best = min(best, bins)
    return best


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(12, 20))
def test_bins_needed_is_no_more_than_a_packing_uses(items, room):
    assert bins_needed(np.array(items), room) <= fewest_bins(items, room)


@pytest.mark.parametrize(
    ("items", "room", "bins"),
    [
        ([7, 7, 7], 12, 3),
        ([8, 8, 4, 4, 4], 12, 3),
        ([5, 5, 5, 5, 5], 12, 3),
        ([], 5, 1),
        ([3], 0, 1),
    ],
)
def test_bins_needed_of_known_packings(items, room, bins):
    assert bins_needed(np.array(items, np.int64), room) == bins


def test_chain_and_star_of_many_nodes():
    many = 20_000
    chain = IntervalWork.build(np.full(many, many), np.arange(many))
    star = IntervalWork.build(np.full(many, 60), np.append(0, np.full(many - 1, 50)))
    assert total_work_lower_bound(chain, 4, 2 * many) >= chain.total
    assert total_work_lower_bound(star, 4, 1050) == 200 * 50 + many * 10
