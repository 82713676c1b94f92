"""Sampled counts, and merges and splits one by one as section 3.2 words them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.planning.contiguous import natural_partition
from harts.planning.evolution import evolve_partition, merge_order, sampled_counts, split_order
from harts.planning.grouping import from_cuts
from harts.planning.intervals import IntervalWork
from tests.planning.groupings import check_grouping, index_of
from tests.planning.oracles import sorted_trajectories, trie_size


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 40, 100, 5000])
def test_sampled_counts(length):
    counts = range(12, 12 + 4 * length, 4)
    found = sampled_counts(counts, 32)
    assert len(found) == min(length, 32)
    assert found == sorted(set(found))
    assert set(found) <= set(counts)
    assert found[0] == counts[0]
    assert found[-1] == counts[-1]
    if length > 32:
        assert found[:16] == list(counts[:16])
        gaps = np.diff(found[15:])
        assert gaps.max() - gaps.min() <= 4


def evolved_literally(trajectories, cuts, target, capacity):
    """One operation after another, each the best of all legal ones, first on ties."""
    total = len(trajectories)
    bounds = [0, *cuts, total]

    def size(start, stop):
        return trie_size(trajectories[start:stop])

    while len(bounds) - 1 > target:
        saving = {
            b: size(a, b) + size(b, c) - size(a, c)
            for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False)
            if size(a, c) <= capacity
        }
        if not saving:
            return None
        bounds.remove(min(saving, key=lambda cut: (-saving[cut], cut)))
    while len(bounds) - 1 < target:
        increase = {
            t: size(a, t) + size(t, b) - size(a, b)
            for a, b in pairwise(bounds)
            for t in range(a + 1, b)
        }
        if not increase:
            return None
        bounds = sorted([*bounds, min(increase, key=lambda cut: (increase[cut], cut))])
    return bounds[1:-1]


@given(sorted_trajectories(most=9), st.integers(0, 12))
@settings(max_examples=200)
def test_evolution_is_the_papers_repeated_best_operation(trajectories, slack):
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    cuts = natural_partition(work, capacity)
    targets = range(1, len(trajectories) + 2)
    reached = evolve_partition(work, cuts, targets, capacity)
    for target in targets:
        found = reached[target].tolist() if target in reached else None
        assert found == evolved_literally(trajectories, cuts.tolist(), target, capacity)


@given(sorted_trajectories(), st.integers(0, 12))
def test_evolution_changes_total_work_in_one_direction(trajectories, slack):
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    cuts = natural_partition(work, capacity)
    reached = evolve_partition(work, cuts, range(1, len(trajectories) + 1), capacity)
    totals = [work.partition(reached[count]).sum() for count in sorted(reached)]
    assert (np.diff(totals) >= 0).all()
    assert list(reached) == list(range(min(reached), len(trajectories) + 1))
    for inner in reached.values():
        check_grouping(trajectories, from_cuts(work, inner), capacity)


def test_equal_merges_and_splits_take_the_first():
    work = IntervalWork.build([4] * 6, [0, 1, 2, 1, 2, 1])
    cuts = np.array([1, 2, 3, 4, 5])
    assert merge_order(work, cuts, 100).tolist() == [2, 4, 1, 3, 5]
    assert merge_order(work, cuts, 8).tolist() == [2, 4]
    assert split_order(work, np.array([3])).tolist() == [1, 5, 2, 4]
