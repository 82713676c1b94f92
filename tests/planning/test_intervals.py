"""Interval work, pairwise LCPs and capacity searches against sets of prefixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.errors import PlanError
from harts.planning.intervals import IntervalWork, RangeMinimum
from tests.planning.oracles import arrays_of, shared_prefix, sorted_trajectories, trie_size


@given(sorted_trajectories())
def test_interval_work_counts_different_prefixes(trajectories):
    work = IntervalWork.build(*arrays_of(trajectories))
    total = len(trajectories)
    for start in range(total):
        stops = np.arange(start + 1, total + 1)
        expected = [trie_size(trajectories[start:stop]) for stop in stops]
        assert work.work(start, stops).tolist() == expected
    assert work.total == trie_size(trajectories)


@given(sorted_trajectories())
def test_a_split_costs_the_lcp_at_the_cut(trajectories):
    work = IntervalWork.build(*arrays_of(trajectories))
    total = len(trajectories)
    splits = np.arange(1, total)
    cost = work.work(0, splits) + work.work(splits, total) - work.work(0, total)
    assert cost.tolist() == work.lcp[1:].tolist()


@given(sorted_trajectories())
def test_pairwise_lcp_is_the_lowest_valley_between(trajectories):
    work = IntervalWork.build(*arrays_of(trajectories))
    index = np.arange(len(trajectories))
    expected = [[shared_prefix(a, b) for b in trajectories] for a in trajectories]
    assert work.pairwise_lcp(index[:, None], index[None, :]).tolist() == expected
    assert int(work.pairwise_lcp(0, len(trajectories) - 1)) == expected[0][-1]


@given(sorted_trajectories(), st.integers(1, 30))
def test_capacity_searches_find_the_extreme_interval(trajectories, capacity):
    work = IntervalWork.build(*arrays_of(trajectories))
    total = len(trajectories)
    fits = {
        (start, stop)
        for start in range(total)
        for stop in range(start + 1, total + 1)
        if trie_size(trajectories[start:stop]) <= capacity
    }
    starts = [min([s for s, e in fits if e == stop], default=stop) for stop in range(total + 1)]
    stops = [max([e for s, e in fits if s == start], default=start) for start in range(total)]
    assert work.first_starts(capacity).tolist() == starts
    assert work.last_stops(capacity).tolist() == stops


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.data())
def test_range_minimum_of_every_width(values, data):
    longest = data.draw(st.integers(1, len(values)))
    table = RangeMinimum.build(np.array(values, np.int64), longest=longest)
    ranges = [
        (start, stop)
        for start in range(len(values))
        for stop in range(start + 1, min(start + longest, len(values)) + 1)
    ]
    start, stop = np.array(ranges).T
    assert table.query(start, stop).tolist() == [min(values[a:b]) for a, b in ranges]


@pytest.mark.parametrize(
    ("lengths", "lcp", "message"),
    [
        ([], [], "not empty"),
        ([3, 3], [0], "equally long"),
        ([3, 0], [0, 0], "sorted trajectory 1 has length 0"),
        ([3, 3], [1, 0], "sorted trajectory 0 .* 0 <= lcp <= 0"),
        ([3, 5], [0, 4], "sorted trajectory 1 .* 0 <= lcp <= 3"),
        ([3, 5], [0, -1], "shares -1 tokens"),
    ],
)
def test_impossible_arrays_are_refused(lengths, lcp, message):
    with pytest.raises(PlanError, match=message):
        IntervalWork.build(lengths, lcp)
