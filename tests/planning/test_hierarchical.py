"""Bottom-up packing, taking apart, alignment and balancing, each by what it promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.errors import PlanError
from harts.planning.balance import balance_slots
from harts.planning.contiguous import best_contiguous, least_contiguous_work
from harts.planning.dissolve import dissolve
from harts.planning.grouping import compact_works
from harts.planning.hierarchical import (
    aligned,
    hierarchical_groups,
    pack_trie,
    split_to_multiple,
)
from harts.planning.intervals import IntervalWork
from harts.planning.lcp_table import LcpTable
from harts.planning.slot_maxima import SlotMaxima
from harts.planning.trie import PrefixTrie
from tests.planning.checker import cases, checked_works, work_of
from tests.planning.groupings import groupings
from tests.planning.oracles import shared_prefix, sorted_trajectories, trie_size


@given(sorted_trajectories(most=10))
def test_trie_nodes_are_the_forks_and_the_trajectories(trajectories):
    trie = PrefixTrie.build(work_of(trajectories))
    leaves = [v for v, below in enumerate(trie.children) if not below]
    assert sorted(trie.first[v] for v in leaves) == list(range(len(trajectories)))
    assert [trie.depth[v] for v in leaves] == [len(trajectories[trie.first[v]]) for v in leaves]
    seen = set()
    for node in trie.bottom_up:
        assert not trie.children[node] or seen >= set(trie.children[node])
        seen.add(node)
        if trie.children[node] and node:
            below = trajectories[trie.first[node] : trie.stop[node]]
            assert len(below) > 1
            assert trie.depth[node] == shared_prefix(below[0], below[-1])
    crossings = sum(trie.edge(v) for v in range(1, len(trie.parent)))
    assert crossings == trie_size(trajectories)


@pytest.mark.parametrize("seed", range(3))
def test_every_stage_is_valid_and_never_heavier(seed):
    for trajectories, replicas, capacity in cases(seed, 60, 30):
        work = work_of(trajectories)
        trie = PrefixTrie.build(work)
        packed = pack_trie(trie, capacity)
        refined = dissolve(work, packed, capacity)[-1]
        totals = [
            sum(checked_works(trajectories, groups, 1, capacity)) for groups in (packed, refined)
        ]
        assert totals[0] >= totals[1]
        assert len(packed) >= len(refined)
        try:
            groups = aligned(work, refined, replicas, capacity)
        except PlanError:
            assert -(-len(refined) // replicas) * replicas > len(trajectories)
            continue
        works = checked_works(trajectories, groups, replicas, capacity)
        balanced = balance_slots(work, trie, groups, replicas, capacity)
        after = checked_works(trajectories, balanced, replicas, capacity)
        assert sum(after) == sum(works)
        assert len(after) == len(works)
        maxima = [sum(sorted(w, reverse=True)[::replicas]) for w in (works, after)]
        assert maxima[1] <= maxima[0]
        again = hierarchical_groups(work, replicas, capacity)
        assert [g.tolist() for g in again] == [g.tolist() for g in groups]


def test_parts_that_are_no_neighbours_fill_one_microbatch():
    # Behind a prompt of 4 hang 6, 6, 4 and 4 in room 10: neighbours waste it, pairs 6 + 4 do not.
    work = IntervalWork.build([10, 10, 8, 8], [0, 4, 4, 4])
    groups = hierarchical_groups(work, 1, 14)
    assert compact_works(work, groups).tolist() == [14, 14]
    assert best_contiguous(work.lengths, work.lcp, 1, 14).objective.total_work == 32


def test_splitting_takes_the_lowest_valley_until_the_count_fits():
    work = IntervalWork.build([8] * 4, [0, 6, 2, 6])
    groups = split_to_multiple(work, [np.arange(4)], 3)
    assert [g.tolist() for g in groups] in ([[0], [1], [2, 3]], [[0, 1], [2], [3]])
    with pytest.raises(PlanError, match="cannot be split further into a multiple of 5"):
        split_to_multiple(work, [np.arange(4)], 5)


def test_a_surplus_microbatch_is_taken_apart_where_splits_would_cost_more():
    # Packed in 4, 4 and 3 of a shared 10: dissolving the third fills up two of room 16 exactly.
    lengths, lcp = [12] * 6, [0, 10, 10, 10, 10, 10]
    work = IntervalWork.build(lengths, lcp)
    groups = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    merged = aligned(work, groups, 2, 16)
    assert sorted(g.size for g in merged) == [3, 3]
    assert compact_works(work, merged).sum() == 32


def test_dissolving_moves_what_no_longer_needs_its_own_microbatch():
    work = IntervalWork.build([10, 10, 10, 10], [0, 8, 8, 8])
    groups = [np.array([0]), np.array([1]), np.array([2, 3])]
    merged = dissolve(work, groups, 16)[-1]
    assert compact_works(work, merged).sum() == 16


def test_balancing_exchanges_parts_that_hang_at_the_same_fork():
    # Eight leaves of 1..8 behind a prompt of 3, dealt unevenly to two microbatches.
    trajectories = sorted((0, 0, 0, leaf, *([leaf] * leaf)) for leaf in range(8))
    work = work_of(trajectories)
    groups = [np.arange(0, 4), np.arange(4, 8)]
    balanced = balance_slots(work, PrefixTrie.build(work), groups, 2, 100)
    assert sorted(compact_works(work, balanced).tolist()) == [21, 21]
    assert balance_slots(work, PrefixTrie.build(work), groups, 1, 100) is groups


@given(groupings(most=12), st.integers(2, 3))
def test_balancing_keeps_total_work_of_any_grouping(case, replicas):
    trajectories, groups, capacity = case
    if len(groups) % replicas:
        return
    work = work_of(trajectories)
    balanced = balance_slots(work, PrefixTrie.build(work), groups, replicas, capacity)
    works = checked_works(trajectories, balanced, replicas, capacity)
    assert sum(works) == compact_works(work, groups).sum()


@given(
    st.integers(1, 4),
    st.lists(st.integers(5, 14), min_size=12, max_size=12),
    st.lists(st.tuples(st.integers(1, 11), st.integers(-4, 4)), min_size=1, max_size=6),
)
def test_slot_maxima_after_a_change_are_those_of_sorting_again(replicas, works, changes):
    works = np.array(works)
    maxima = SlotMaxima.build(works, replicas)
    taker, amount = np.array(changes).T
    for found, k, moved in zip(maxima.after(0, taker, amount), taker, amount, strict=True):
        changed = works.copy()
        changed[[0, k]] += [-moved, moved]
        assert found == np.sort(changed)[::-1][::replicas].sum()
    assert maxima.total == np.sort(works)[::-1][::replicas].sum()


@given(sorted_trajectories(most=12), st.data())
def test_work_of_a_set_is_its_number_of_prefixes(trajectories, data):
    table = LcpTable.build(work_of(trajectories))
    members = sorted(data.draw(st.sets(st.sampled_from(range(len(trajectories))))))
    expected = trie_size([trajectories[i] for i in members])
    assert table.work(np.array(members, np.int64)) == expected


@pytest.mark.parametrize("seed", range(2))
def test_contiguous_work_of_any_count_is_known_in_linear_time(seed):
    for trajectories, _, capacity in cases(seed, 100, 20):
        work = work_of(trajectories)
        plan = best_contiguous(work.lengths, work.lcp, 1, capacity)
        assert least_contiguous_work(work, capacity) == plan.objective.total_work


def test_long_chains_and_wide_stars_need_no_recursion():
    many = 3000
    chain = IntervalWork.build(np.full(many, many), np.arange(many))
    star = IntervalWork.build(np.full(many, 60), np.append(0, np.full(many - 1, 50)))
    groups = hierarchical_groups(chain, 2, many + 50)
    assert compact_works(chain, groups).max() <= many + 50
    groups = hierarchical_groups(star, 2, 1050)
    assert compact_works(star, groups).sum() == 30 * 50 + many * 10
