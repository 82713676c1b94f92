"""Taking microbatches apart, against trying every destination."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harts.planning import dissolve as dissolving
from harts.planning.dissolve import dissolve, dissolve_forced
from harts.planning.grouping import compact_works
from harts.planning.hierarchical import aligned, dissolve_aligned
from harts.planning.intervals import IntervalWork
from tests.planning.groupings import as_lists, check_grouping, groupings, index_of
from tests.planning.oracles import shared_prefix, trie_size


def search_of(trajectories, groups, capacity):
    return dissolving._Search(index_of(trajectories), groups, capacity)


@given(groupings(most=14), st.integers(0, 6), st.data())
def test_a_block_goes_where_it_adds_least_and_then_where_most_work_is(case, slack, data):
    trajectories, groups, capacity = case
    capacity += slack
    home = data.draw(st.integers(0, len(groups) - 1))
    members = groups[home]
    start = data.draw(st.integers(0, members.size - 1))
    block = members[start : data.draw(st.integers(start + 1, members.size))]
    search = search_of(trajectories, groups, capacity)
    search.close(home)
    size = trie_size([trajectories[i] for i in block])
    inside, outside = [], []
    for k, group in enumerate(groups):
        work = trie_size([trajectories[i] for i in group])
        union = trie_size([trajectories[i] for i in (*block, *group)])
        choice = (union - work, -work, k)
        if k == home:
            continue
        if ((group > block[0]) & (group < block[-1])).any():
            inside += [choice] if union <= capacity else []
            continue
        ends = [(i, block[0]) for i in group[group < block[0]][-1:]]
        ends += [(block[-1], i) for i in group[group > block[-1]][:1]]
        shared = max((shared_prefix(trajectories[i], trajectories[j]) for i, j in ends), default=0)
        if work + size - shared <= capacity:
            outside.append(((size - shared, -work, k), choice))
    choices = inside + [choice for _, choice in sorted(outside)[:1]]
    found = search.target(block)
    assert found == ((min(choices)[2], min(choices)[0]) if choices else None)


def test_a_block_may_share_with_both_neighbours_what_its_own_members_do_not():
    search = search_of([(0,), (0,), (2,), (2,)], [np.array([0, 3]), np.array([1, 2])], 4)
    search.close(1)
    assert search.target(np.array([1, 2])) == (0, 0)


@given(groupings(most=12), st.integers(0, 6), st.data())
def test_a_move_keeps_its_books_or_leaves_no_trace(case, slack, data):
    trajectories, groups, capacity = case
    search = search_of(trajectories, groups, capacity + slack)
    home = data.draw(st.integers(0, len(groups) - 1))
    blocks, fork = search.table.blocks(groups[home])
    whole = data.draw(st.booleans()) or len(blocks) == 1
    block = groups[home] if whole else data.draw(st.sampled_from(blocks))
    gain = search.works[home] if whole else search.table.work(block) - fork

    def state():
        return as_lists(search.members), list(search.works), list(search.owner), search._rooms[:]

    search.members = [np.array(members) for members in search.members]
    before = state()
    search.members = [members.tolist() for members in search.members]
    total = compact_works(search.step.work, groups).sum()
    moved = search.move(block, home, gain, 0)
    search.members = [np.array(members, np.int64) for members in search.members]
    if not moved:
        assert state() == before
        return
    found = search.groups()
    check_grouping(trajectories, found, capacity + slack)
    assert compact_works(search.step.work, found).sum() < total
    for k, members in enumerate(search.members):
        assert (search.owners[members] == k).all()
        if members.size:
            assert search.works[k] == compact_works(search.step.work, [members])[0]
    assert len(search._rooms) == len(groups)


@given(groupings(most=12), st.integers(0, 6))
def test_stages_are_groupings_of_less_work_in_fewer_microbatches(case, slack):
    trajectories, groups, capacity = case
    stages = dissolve(index_of(trajectories), groups, capacity + slack, len(groups))
    assert as_lists(dissolve(index_of(trajectories), groups, capacity + slack)[0]) == as_lists(
        stages[-1]
    )
    for stage in stages:
        check_grouping(trajectories, stage, capacity + slack)
    ranks = [(len(s), compact_works(index_of(trajectories), s).sum()) for s in stages]
    assert ranks == sorted(ranks, reverse=True)
    assert len({count for count, _ in ranks}) == len(stages)
    assert ranks[0][0] == len(groups)


def test_dissolving_at_any_price_may_add_work():
    # 6 fits beside neither whole, but its two parts fit one beside each.
    work = IntervalWork.build([7, 7, 6, 6], [0, 0, 0, 3])
    groups = [np.array([0]), np.array([1]), np.array([2, 3])]
    assert as_lists(dissolve(work, groups, 13)[-1]) == as_lists(groups)
    forced = dissolve_forced(work, groups, 13, 1)
    assert sorted(compact_works(work, forced).tolist()) == [13, 13]


def test_more_microbatches_are_kept_where_fewer_would_cost_more_to_align():
    # Dissolving one of four saves a token; three need a split or another dissolved, which cost two.
    work = IntervalWork.build([9, 4, 7, 12, 3, 13, 12], [0, 4, 3, 5, 2, 2, 3])
    groups = [np.array([0]), np.array([1, 4, 6]), np.array([2, 3]), np.array([5])]
    stages = dissolve(work, groups, 19, 2)
    totals = [int(compact_works(work, stage).sum()) for stage in stages]
    assert ([len(stage) for stage in stages], totals) == ([4, 3], [51, 50])
    assert compact_works(work, aligned(work, stages[-1], 2, 19)).sum() == 52
    assert as_lists(dissolve_aligned(work, groups, 2, 19)) == as_lists(stages[0])
    assert as_lists(dissolve_aligned(work, groups, 1, 19)) == as_lists(stages[-1])
