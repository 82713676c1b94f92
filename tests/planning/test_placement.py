"""Choosing a microbatch for a block, against trying every one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.planning import placement as placements
from harts.planning.intervals import IntervalWork
from harts.planning.lcp_table import LcpTable
from harts.planning.placement import Placement, Policy, Step
from tests.planning.groupings import equation_10, groupings, index_of, sizes
from tests.planning.oracles import shared_prefix, sorted_trajectories, trie_size

# How microbatches with room are found: one by one, on the walk, or all at once.
LIMITS = [(4, 32, 32), (1, 32, 32), (1, 2, 32), (1, 2, 1), (1, 1, 1)]


def loaded(trajectories, groups, capacity, policy=Policy.BEST_FIT):
    placement = Placement(Step.build(index_of(trajectories)), capacity, policy)
    placement.load(groups)
    return placement


@given(sorted_trajectories(), st.randoms(use_true_random=False), st.data())
@settings(max_examples=200)
def test_what_is_not_shared_is_equation_10_and_the_growth_of_the_prefix_set(
    trajectories, random, data
):
    placement = Placement(Step.build(index_of(trajectories)), 10**6, Policy.BEST_FIT)
    order = list(range(len(trajectories)))
    random.shuffle(order)
    groups: list[list[int]] = []
    for x in order:
        shared = placement._shared_within(x, x, 0, len(trajectories)).tolist()
        assert shared == [placement.shared(x, x, k) for k in range(len(groups))]
        found = [len(trajectories[x]) - tokens for tokens in shared]
        assert found == [equation_10(trajectories, group, x) for group in groups]
        grown = sizes(trajectories, [sorted([*group, x]) for group in groups])
        assert found == (np.array(grown) - sizes(trajectories, groups)).tolist()
        target = data.draw(st.integers(0, len(groups)))
        if target == len(groups):
            groups.append([])
            placement.open()
        placement.insert(x, target, placement.shared(x, x, target))
        groups[target] = sorted([*groups[target], x])
    assert placement.opened_works().tolist() == sizes(trajectories, groups)


@given(groupings())
def test_taking_over_a_grouping_is_as_placing_every_trajectory(case):
    trajectories, groups, capacity = case
    one_by_one = Placement(Step.build(index_of(trajectories)), capacity, Policy.BEST_FIT)
    for k, group in enumerate(groups):
        one_by_one.open()
        for x in group.tolist():
            one_by_one.insert(x, k, one_by_one.shared(x, x, k))
    at_once = loaded(trajectories, groups, capacity)
    for name in ("members", "works", "owner", "_rooms"):
        assert getattr(at_once, name) == getattr(one_by_one, name)
    assert [g.tolist() for g in at_once.groups()] == [g.tolist() for g in groups]


@given(sorted_trajectories(), st.data())
def test_the_trajectories_that_share_enough_are_an_interval(trajectories, data):
    step = Step.build(index_of(trajectories))
    first = data.draw(st.integers(0, len(trajectories) - 1))
    last = data.draw(st.integers(first, len(trajectories) - 1))
    least = data.draw(st.integers(0, 12))
    start, stop = step.sharing(first, last, least)
    assert start <= first <= last < stop
    before = [shared_prefix(trajectories[i], trajectories[first]) for i in range(first)]
    after = [shared_prefix(trajectories[last], other) for other in trajectories[last + 1 :]]
    assert start == first - sum(tokens >= least for tokens in before)
    assert stop == last + 1 + sum(tokens >= least for tokens in after)


@pytest.mark.parametrize(("few", "far", "many"), LIMITS)
@given(groupings(most=14), st.sampled_from(Policy), st.integers(0, 6), st.data())
def test_the_preferred_microbatch_is_the_best_of_those_with_room(
    few, far, many, case, policy, slack, data
):
    """For blocks of several trajectories, too, which have left their own microbatch."""
    trajectories, groups, capacity = case
    capacity += slack
    home = data.draw(st.integers(0, len(groups) - 1))
    block = groups[home][: data.draw(st.integers(1, groups[home].size))].tolist()
    placement = loaded(trajectories, groups, capacity, policy)
    placement.close(home)
    inside = {placement.owner[x] for x in range(block[0], block[-1] + 1)} | {home}
    size = trie_size([trajectories[i] for i in block])
    ranks = []
    for k, group in enumerate(groups):
        ends = [(i, block[0]) for i in group[group < block[0]][-1:]]
        ends += [(block[-1], i) for i in group[group > block[-1]][:1]]
        shared = max((shared_prefix(trajectories[i], trajectories[j]) for i, j in ends), default=0)
        after = trie_size([trajectories[i] for i in group]) + size - shared
        if k not in inside and after <= capacity:
            rank = {
                Policy.BEST_FIT: (-after,),
                Policy.MAX_SHARED: (-shared,),
                Policy.LEAST_WORK: (-shared, -after),
            }[policy]
            ranks.append((*rank, k, shared))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("FEW", few), ("FAR", far), ("MANY", many)):
            patch.setattr(placements, name, value)
        found = placement.preferred(block[0], block[-1], size, inside)
    assert found == (min(ranks)[-2:] if ranks else None)


def test_what_is_barred_is_not_asked_even_if_it_has_most_room(monkeypatch):
    for name, value in (("FEW", 1), ("FAR", 1), ("MANY", 1)):
        monkeypatch.setattr(placements, name, value)
    # A block of 0, 1, 3 and 4 leaves; 2 is alone in its microbatch, and 5 and 6 have less room.
    work = IntervalWork.build([4, 4, 4, 4, 4, 6, 6], [0, 3, 3, 3, 3, 3, 3])
    placement = Placement(Step.build(work), 12, Policy.LEAST_WORK)
    placement.load([np.array([0, 1, 3, 4]), np.array([2]), np.array([5]), np.array([6])])
    placement.close(0)
    assert placement.preferred(0, 4, 7, {0, 1}) == (2, 3)


@given(sorted_trajectories(most=12), st.data())
def test_blocks_are_what_hangs_below_the_lowest_fork(trajectories, data):
    table = LcpTable.build(index_of(trajectories))
    positions = st.sampled_from(range(len(trajectories)))
    members = sorted(data.draw(st.sets(positions, min_size=1)))
    blocks, fork = table.blocks(np.array(members))
    assert [x for block in blocks for x in block.tolist()] == members
    if len(members) == 1:
        assert (len(blocks), fork) == (1, 0)
        return
    assert fork == shared_prefix(trajectories[members[0]], trajectories[members[-1]])
    for i, block in enumerate(blocks):
        for other in blocks[i + 1 :]:
            assert shared_prefix(trajectories[block[-1]], trajectories[other[0]]) == fork
        ends = trajectories[block[0]], trajectories[block[-1]]
        assert block.size == 1 or shared_prefix(*ends) > fork
