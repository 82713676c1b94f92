"""Boundary refinement and sparse repair against exhaustive single steps."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.planning.intervals import IntervalWork
from harts.planning.local_refinement import REACH, REPAIRS, SWEEPS, move_cuts, refine, repair
from tests.planning.groupings import arrays, as_lists, check_grouping, groupings, index_of, sizes
from tests.planning.oracles import sorted_trajectories, trie_size


@given(groupings(most=12))
@settings(max_examples=200)
def test_refinement_keeps_count_and_capacity_and_adds_no_work(case):
    trajectories, groups, capacity = case
    found = refine(index_of(trajectories), groups, capacity)
    check_grouping(trajectories, found, capacity)
    assert len(found) == len(groups)
    assert sum(sizes(trajectories, found)) <= sum(sizes(trajectories, groups))


def cuts_moved_literally(trajectories, cuts, capacity):
    bounds = [0, *cuts, len(trajectories)]
    for _ in range(SWEEPS):
        for i in range(1, len(bounds) - 1):
            options = []
            for cut in range(bounds[i - 1] + 1, bounds[i + 1]):
                sides = [
                    trie_size(trajectories[bounds[i - 1] : cut]),
                    trie_size(trajectories[cut : bounds[i + 1]]),
                ]
                if abs(cut - bounds[i]) <= REACH and max(sides) <= capacity:
                    options.append((sum(sides), max(sides), abs(cut - bounds[i]), cut))
            bounds[i] = min(options)[-1]
    return bounds[1:-1]


@given(sorted_trajectories(most=24), st.data())
@settings(max_examples=200)
def test_cuts_move_to_the_best_near_position(trajectories, data):
    work, total = index_of(trajectories), len(trajectories)
    cuts = data.draw(st.sets(st.integers(1, total - 1), max_size=4)) if total > 1 else set()
    cuts = np.array(sorted(cuts), np.int64)
    capacity = int(work.partition(cuts).max()) + data.draw(st.integers(0, 6))
    expected = cuts_moved_literally(trajectories, cuts.tolist(), capacity)
    assert move_cuts(work, cuts, capacity).tolist() == expected


def test_a_cut_moves_no_further_than_eight_positions_a_sweep_and_two_sweeps():
    # Every step right saves a token, and no position within reach is as good as the last.
    lcp = np.arange(30, 0, -1)
    work = IntervalWork.build([40] * 30, [0, *lcp[1:]])
    assert move_cuts(work, np.array([2]), 10**6).tolist() == [2 + 2 * REACH]


def test_boundaries_prefer_total_then_the_lighter_heaviest_then_staying():
    assert move_cuts(IntervalWork.build([9, 1, 1], [0, 0, 1]), np.array([2]), 20).tolist() == [1]
    assert move_cuts(IntervalWork.build([5, 1, 5], [0, 0, 0]), np.array([2]), 20).tolist() == [2]
    assert move_cuts(IntervalWork.build([2, 2, 5], [0, 0, 0]), np.array([1]), 20).tolist() == [2]
    for capacity, cut in [(8, 1), (12, 2)]:
        work = IntervalWork.build([8, 5, 1], [0, 1, 0])
        assert move_cuts(work, np.array([1]), capacity).tolist() == [cut]


def repaired_once_literally(trajectories, groups, capacity):
    """The groups after the best near move, or else the best near swap; None if none saves."""
    total = len(trajectories)
    owner = {i: k for k, group in enumerate(groups) for i in group}

    def saving(first, second, new_first, new_second):
        works = sizes(trajectories, [new_first, new_second])
        before = sum(sizes(trajectories, [groups[first], groups[second]]))
        return before - sum(works) if max(works) <= capacity else 0

    moves = []
    for x in range(total):
        home = owner[x]
        near = {owner[j] for j in range(max(0, x - REACH), min(total, x + REACH + 1))} - {home}
        for k in near if len(groups[home]) > 1 else ():
            changed = [i for i in groups[home] if i != x], [*groups[k], x]
            moves.append((-saving(home, k, *changed), x, k, home, k, changed))
    swaps = []
    for x, y in combinations(range(total), 2):
        a, b = owner[x], owner[y]
        if y - x <= REACH and a != b:
            changed = [*(i for i in groups[a] if i != x), y], [*(i for i in groups[b] if i != y), x]
            swaps.append((-saving(a, b, *changed), x, y, a, b, changed))
    for options in (moves, swaps):
        best = min(options, default=(0,))
        if best[0] < 0:
            *_, home, target, changed = best
            rest = [group for k, group in enumerate(groups) if k not in (home, target)]
            return sorted([*rest, sorted(changed[0]), sorted(changed[1])])
    return None


@given(groupings(most=13))
@settings(max_examples=150)
def test_repair_takes_the_best_move_or_else_the_best_swap(case):
    trajectories, groups, capacity = case
    expected = as_lists(groups)
    for _ in range(REPAIRS):
        following = repaired_once_literally(trajectories, expected, capacity)
        if following is None:
            break
        expected = following
    assert as_lists(repair(index_of(trajectories), groups, capacity)) == expected


@given(groupings(most=12), st.data())
@settings(max_examples=200)
def test_refinement_moves_cuts_only_of_contiguous_groupings_and_then_repairs(case, data):
    trajectories, groups, capacity = case
    if data.draw(st.booleans()):
        total = len(trajectories)
        inner = data.draw(st.sets(st.integers(1, total - 1), max_size=4)) if total > 1 else ()
        bounds = [0, *sorted(inner), total]
        groups = arrays(range(a, b) for a, b in pairwise(bounds))
        capacity = max(sizes(trajectories, groups)) + data.draw(st.integers(0, 6))
    expected = as_lists(groups)
    if all(group == list(range(group[0], group[-1] + 1)) for group in expected):
        cuts = cuts_moved_literally(trajectories, [g[0] for g in expected[1:]], capacity)
        bounds = [0, *cuts, len(trajectories)]
        expected = [list(range(a, b)) for a, b in pairwise(bounds)]
    for _ in range(REPAIRS):
        following = repaired_once_literally(trajectories, expected, capacity)
        expected = expected if following is None else following
    assert as_lists(refine(index_of(trajectories), groups, capacity)) == expected


def test_repair_swaps_where_no_move_fits():
    work = IntervalWork.build([6, 6, 6, 6], [0, 5, 0, 5])
    assert as_lists(repair(work, arrays([[0, 2], [1, 3]]), 12)) == [[0, 1], [2, 3]]


def test_repair_stops_after_four_iterations():
    work = IntervalWork.build([6] * 12, [0, 5] * 6)
    scattered = arrays([range(0, 12, 2), range(1, 12, 2)])
    assert as_lists(repair(work, scattered, 100)) == [[0, 1, 2, 3, 4, 5, 6, 7, 9, 11], [8, 10]]


@pytest.mark.parametrize(("between", "moved"), [(REACH - 1, True), (REACH, False)])
def test_repair_reaches_eight_positions(between, moved):
    # 0 is a stranger; 1, those between and the last share 5 of 6 tokens; those between fill theirs.
    last = between + 2
    work = IntervalWork.build([6] * (last + 1), [0, 0, *[5] * (between + 1)])
    groups = arrays([[0, 1], range(2, last), [last]])
    expected = [[0], [1, last], list(range(2, last))] if moved else as_lists(groups)
    assert as_lists(repair(work, groups, 5 + between)) == expected


def test_repair_leaves_singletons_in_place():
    work = IntervalWork.build([6, 6], [0, 5])
    assert as_lists(repair(work, arrays([[0], [1]]), 100)) == [[0], [1]]
