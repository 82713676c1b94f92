"""Trie-aware greedy against literal readings of section 3.2 and Eq. 10."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.planning import placement as placements
from harts.planning.greedy import (
    POLICIES,
    GreedyPlacement,
    align_count,
    greedy_plan,
    greedy_plans,
    processing_orders,
)
from harts.planning.grouping import compact_works
from harts.planning.intervals import IntervalWork
from harts.planning.placement import Policy, Step
from tests.planning.groupings import (
    arrays,
    as_lists,
    check_grouping,
    equation_10,
    groupings,
    index_of,
    sizes,
)
from tests.planning.oracles import shared_prefix, sorted_trajectories, trie_size

# How microbatches with room are found: one by one, on the walk, or all at once.
LIMITS = [(4, 32, 32), (1, 32, 32), (1, 2, 32), (1, 2, 1), (1, 1, 1)]


def placement_for(work, capacity, policy=Policy.BEST_FIT):
    return GreedyPlacement(Step.build(work), capacity, policy)


@given(groupings(), st.data())
def test_an_insertion_taken_back_leaves_no_trace(case, data):
    trajectories, groups, _ = case
    x = data.draw(st.integers(0, len(trajectories) - 1))
    placement = placement_for(index_of(trajectories), 10**6)
    for k, group in enumerate(groups):
        placement.open()
        for i in group.tolist():
            if i != x:
                placement.insert(i, k, placement.shared(i, i, k))

    def state():
        members = [list(group) for group in placement.members]
        return placement.works[:], placement._rooms[:], placement.owner[:], members

    before, home = state(), placement.owner[x]
    k = data.draw(st.integers(0, len(groups) - 1))
    work = placement.works[k]
    placement.insert(x, k, placement.shared(x, x, k))
    placement._take_back(x, work, home)
    assert state() == before


def test_processing_orders_of_a_hand_made_step():
    # Unique suffixes: 5-2, 6-4, 4-4, 7-1, 7-1.
    work = IntervalWork.build([5, 6, 4, 7, 7], [0, 2, 4, 1, 1])
    orders = [order.tolist() for order in processing_orders(work)]
    assert orders == [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [3, 4, 1, 0, 2], [3, 4, 0, 1, 2]]


@given(sorted_trajectories())
def test_processing_orders_follow_their_definitions(trajectories):
    n = len(trajectories)
    suffix = [
        len(t)
        - max((shared_prefix(t, trajectories[j]) for j in (i - 1, i + 1) if 0 <= j < n), default=0)
        for i, t in enumerate(trajectories)
    ]
    expected = [
        list(range(n)),
        list(range(n))[::-1],
        sorted(range(n), key=lambda i: -len(trajectories[i])),
        sorted(range(n), key=lambda i: -suffix[i]),
    ]
    assert [order.tolist() for order in processing_orders(index_of(trajectories))] == expected


def placed_literally(trajectories, order, policy, capacity):
    groups: list[list[int]] = []
    for x in order:
        fitting = []
        for k, group in enumerate(groups):
            increase = equation_10(trajectories, group, x)
            after = trie_size([trajectories[i] for i in group]) + increase
            if after <= capacity:
                shared = len(trajectories[x]) - increase
                fitting.append((-after if policy is Policy.BEST_FIT else -shared, k))
        if fitting:
            k = min(fitting)[1]
            groups[k] = sorted([*groups[k], x])
        else:
            groups.append([x])
    return groups


@pytest.mark.parametrize(("few", "far", "many"), LIMITS)
@given(sorted_trajectories(), st.integers(0, 12), st.sampled_from(POLICIES))
def test_placement_follows_order_and_policy(few, far, many, trajectories, slack, policy):
    """Whichever way the microbatches with room are found, also where few are enough to differ."""
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    for order in processing_orders(work):
        placement = placement_for(work, capacity, policy)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("FEW", few), ("FAR", far), ("MANY", many)):
                patch.setattr(placements, name, value)
            placement.place_all(order)
        expected = placed_literally(trajectories, order.tolist(), policy, capacity)
        assert placement.members == expected
        check_grouping(trajectories, placement.groups(), capacity)


def test_the_policies_differ_where_fullness_and_affinity_disagree():
    # Microbatches {0} of 4 tokens and {2} of 9; trajectory 1 shares three tokens with 0 only.
    work = IntervalWork.build([4, 4, 9], [0, 3, 0])
    for policy, members in [(Policy.BEST_FIT, [[0], [1, 2]]), (Policy.MAX_SHARED, [[0, 1], [2]])]:
        placement = placement_for(work, 13, policy)
        for x, k in ((0, 0), (2, 1)):
            placement.open()
            placement.insert(x, k, 0)
        placement.place_all(np.array([1]))
        assert placement.members == members


def test_equal_destinations_take_the_one_opened_first():
    for policy in POLICIES:
        placement = placement_for(IntervalWork.build([5, 3, 5], [0, 0, 0]), 8, policy)
        placement.place_all(np.array([2, 0, 1]))
        assert placement.members == [[1, 2], [0]]


@pytest.mark.parametrize(("few", "far", "many"), LIMITS)
@given(sorted_trajectories(), st.integers(0, 12), st.sampled_from(POLICIES))
def test_dissolving_empties_whole_microbatches_lightest_first(
    few, far, many, trajectories, slack, policy
):
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    for order in processing_orders(work):
        placement = placement_for(work, capacity, policy)
        placement.place_all(order)
        before, fewest = [list(members) for members in placement.members], placement.fewest()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("FEW", few), ("FAR", far), ("MANY", many)):
                patch.setattr(placements, name, value)
            placement.dissolve_small(order)
        expected = dissolved_literally(trajectories, before, order.tolist(), policy, capacity)
        assert fewest <= len(expected)
        assert as_lists(placement.groups()) == expected
        check_grouping(trajectories, placement.groups(), capacity)


def dissolved_literally(trajectories, groups, order, policy, capacity):
    """The lightest first, each once: its members placed one by one among the others, or not."""
    groups = [list(group) for group in groups]
    works = sizes(trajectories, groups)
    for k in sorted(range(len(groups)), key=lambda k: works[k]):
        others = [[] if j == k else list(group) for j, group in enumerate(groups)]
        for x in (x for x in order if x in groups[k]):
            options = []
            for j, group in enumerate(others):
                increase = equation_10(trajectories, group, x)
                after = trie_size([trajectories[i] for i in group]) + increase
                if group and after <= capacity:
                    shared = len(trajectories[x]) - increase
                    options.append((-after if policy is Policy.BEST_FIT else -shared, j))
            if not options:
                break
            j = min(options)[1]
            others[j] = sorted([*others[j], x])
        else:
            groups = others
    return sorted(group for group in groups if group)


def placement_of(lengths, lcp, capacity, groups):
    placement = placement_for(IntervalWork.build(lengths, lcp), capacity)
    for k, group in enumerate(groups):
        placement.open()
        for x in group:
            placement.insert(x, k, placement.shared(x, x, k))
    return placement


def test_the_lightest_microbatches_dissolve_first():
    # Works 4, 5 and 6 in 10 tokens: the first fits beside the third, and then the second nowhere.
    placement = placement_of([4, 5, 6], [0, 0, 0], 10, [[0], [1], [2]])
    placement.dissolve_small(np.arange(3))
    assert as_lists(placement.groups()) == [[0, 2], [1]]


def test_a_microbatch_dissolves_whole_or_not_at_all():
    # {0, 1} has work 6; 0 fits beside 2 but then 1 does not.
    placement = placement_of([3, 3, 7, 10], [0, 0, 0, 0], 10, [[0, 1], [2], [3]])
    placement.dissolve_small(np.arange(4))
    assert as_lists(placement.groups()) == [[0, 1], [2], [3]]
    assert placement.opened_works().tolist() == [6, 7, 10]


def test_a_microbatch_may_dissolve_into_several():
    placement = placement_of([3, 3, 7, 7], [0, 0, 0, 0], 10, [[0, 1], [2], [3]])
    placement.dissolve_small(np.arange(4))
    assert as_lists(placement.groups()) == [[0, 2], [1, 3]]


def aligned_literally(trajectories, groups, replicas):
    groups = [list(group) for group in groups]
    while len(groups) % replicas:
        costs = []
        for group in groups:
            for x in group if len(group) > 1 else ():
                rest = [trajectories[i] for i in group if i != x]
                whole = [trajectories[i] for i in group]
                cost = trie_size(rest) + len(trajectories[x]) - trie_size(whole)
                costs.append((cost, x, group))
        if not costs:
            return None
        _, x, group = min(costs)
        group.remove(x)
        groups = sorted([*groups, [x]])
    return groups


@given(groupings(), st.integers(1, 5))
@settings(max_examples=200)
def test_alignment_splits_off_the_cheapest_singletons(case, replicas):
    trajectories, groups, _ = case
    found = align_count(index_of(trajectories), groups, replicas)
    expected = aligned_literally(trajectories, as_lists(groups), replicas)
    assert (None if found is None else as_lists(found)) == expected


@given(sorted_trajectories(), st.integers(1, 3), st.integers(0, 12))
@settings(max_examples=200)
def test_greedy_plans_place_dissolve_align_and_the_least_count_then_work_is_chosen(
    trajectories, replicas, slack
):
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    expected = []
    for order in (order.tolist() for order in processing_orders(work)):
        for policy in POLICIES:
            groups = placed_literally(trajectories, order, policy, capacity)
            groups = dissolved_literally(trajectories, groups, order, policy, capacity)
            expected.append(aligned_literally(trajectories, groups, replicas))
    expected = [groups for groups in expected if groups is not None]
    assert [as_lists(groups) for groups in greedy_plans(work, replicas, capacity)] == expected
    for groups in expected:
        check_grouping(trajectories, arrays(groups), capacity, replicas)
    chosen = greedy_plan(work, replicas, capacity)
    if not expected:
        assert chosen is None
        return
    ranks = [(len(groups), sum(sizes(trajectories, groups))) for groups in expected]
    assert as_lists(chosen) == expected[ranks.index(min(ranks))]


def test_there_are_eight_greedy_plans():
    assert len(list(greedy_plans(index_of([(0, 1), (0, 2), (1,)]), 1, 5))) == 8


def test_fewer_microbatches_are_preferred_to_less_work_among_greedy_plans():
    work = IntervalWork.build([2, 2, 3, 5, 6], [0, 1, 2, 0, 2])
    ranks = [(len(g), int(compact_works(work, g).sum())) for g in greedy_plans(work, 1, 8)]
    assert set(ranks) == {(2, 16), (3, 15)}
    assert as_lists(greedy_plan(work, 1, 8)) == [[0, 4], [1, 2, 3]]
