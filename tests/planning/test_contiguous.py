"""Contiguous partitions against every partition of small inputs, and figures on real files."""

from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harts.errors import PlanError
from harts.planning.bound import total_work_lower_bound
from harts.planning.contiguous import (
    ContiguousTable,
    best_contiguous,
    candidate_counts,
    check_feasible,
    least_work_counts,
    minimum_count,
    natural_partition,
)
from harts.planning.intervals import IntervalWork
from harts.planning.schedule import evaluate, schedule_microbatches
from tests.planning.oracles import (
    arrays_of,
    contiguous_partitions,
    interval_work,
    set_partitions,
    sorted_arrays,
    sorted_trajectories,
    trie_size,
)


def recursive_natural_partition(lengths, lcp, start, stop, capacity):
    """Section 3.2, word for word: inner cuts of ``[start, stop)``."""
    if interval_work(lengths, lcp, start, stop) <= capacity:
        return []

    def rank(split):
        sides = (
            interval_work(lengths, lcp, start, split),
            interval_work(lengths, lcp, split, stop),
        )
        return lcp[split], max(sides), abs(sides[0] - sides[1]), split

    split = min(range(start + 1, stop), key=rank)
    return [
        *recursive_natural_partition(lengths, lcp, start, split, capacity),
        split,
        *recursive_natural_partition(lengths, lcp, split, stop, capacity),
    ]


def best_by_enumeration(lengths, lcp, capacity):
    """Least (total, heaviest) of each count that has a partition within capacity."""
    best = {}
    for count in range(1, len(lengths) + 1):
        values = []
        for cuts in contiguous_partitions(len(lengths), count):
            works = [interval_work(lengths, lcp, a, b) for a, b in pairwise(cuts)]
            if max(works) <= capacity:
                values.append((sum(works), max(works)))
        if values:
            best[count] = min(values)
    return best


@given(sorted_arrays(most=12), st.integers(0, 20))
def test_natural_partition_follows_the_paper(arrays, slack):
    lengths, lcp = arrays
    capacity = int(lengths.max()) + slack
    inner = recursive_natural_partition(lengths, lcp, 0, len(lengths), capacity)
    cuts = natural_partition(IntervalWork.build(lengths, lcp), capacity)
    assert cuts.tolist() == inner


@pytest.mark.parametrize(
    ("lengths", "lcp", "capacity", "cuts"),
    [
        ([4, 4, 4, 4], [0, 0, 0, 0], 8, [2]),  # equal valleys: the lighter heavier side
        ([2, 2, 9, 3], [0, 1, 1, 1], 12, [2]),  # ... by work (3, 11), not by members
        ([9, 2, 2, 3], [0, 1, 1, 1], 11, [1]),
        ([4, 4, 4], [0, 0, 0], 8, [1]),  # still equal: the first
        ([5, 5, 5, 5], [0, 3, 1, 3], 9, [2]),  # lowest valley before balance
        ([2, 5, 5, 5], [0, 0, 3, 3], 9, [1]),
    ],
)
def test_natural_partition_ties(lengths, lcp, capacity, cuts):
    work = IntervalWork.build(lengths, lcp)
    assert natural_partition(work, capacity).tolist() == cuts


def test_natural_partition_of_a_deep_chain_needs_no_recursion():
    lengths = np.arange(1, 5001)
    work = IntervalWork.build(lengths, lengths - 1)
    cuts = natural_partition(work, 5000)
    assert cuts.tolist() == []
    cuts = natural_partition(IntervalWork.build(np.full(5000, 5000), lengths - 1), 5000)
    assert cuts.size == 4999


@given(sorted_arrays(most=9), st.integers(0, 20))
@settings(max_examples=300)
def test_table_is_exact_in_total_and_heaviest(arrays, slack):
    lengths, lcp = arrays
    capacity = int(lengths.max()) + slack
    work, total = IntervalWork.build(lengths, lcp), len(lengths)
    table = ContiguousTable.build(work, capacity, total)
    best = best_by_enumeration(lengths, lcp, capacity)
    for count in range(1, total + 1):
        if count not in best:
            assert table.total(count) is None
            continue
        cuts = table.cuts(count)
        works = work.partition(cuts)
        assert table.total(count) == works.sum() == best[count][0]
        assert works.max() == best[count][1]
        assert works.min() > 0
        assert (np.diff([0, *cuts, total]) > 0).all()


@given(sorted_arrays(most=10), st.integers(0, 12), st.data())
def test_table_of_fewer_counts_agrees_with_the_full_one(arrays, slack, data):
    lengths, lcp = arrays
    capacity = int(lengths.max()) + slack
    work, total = IntervalWork.build(lengths, lcp), len(lengths)
    full = ContiguousTable.build(work, capacity, total)
    feasible = [count for count in range(1, total + 1) if full.total(count) is not None]
    most = data.draw(st.sampled_from(feasible))
    small = ContiguousTable.build(work, capacity, most)
    for count in range(1, most + 1):
        assert small.total(count) == full.total(count)
        if count in feasible:
            assert small.cuts(count).tolist() == full.cuts(count).tolist()
    for impossible in (feasible[0] - 1, total + 1):
        with pytest.raises(PlanError, match=f"no contiguous partition into {impossible} "):
            ContiguousTable.build(work, capacity, impossible)


@pytest.mark.parametrize(
    ("lengths", "capacity", "cuts"),
    [
        ([5, 1, 1, 5], 12, [2]),  # every split costs 0: the one of least heaviest
        ([1, 1, 5, 5], 12, [3]),
        ([5, 5, 1, 1], 12, [1]),
    ],
)
def test_equal_totals_take_the_lighter_heaviest_microbatch(lengths, capacity, cuts):
    table = ContiguousTable.build(IntervalWork.build(lengths, [0] * 4), capacity, 2)
    assert table.cuts(2).tolist() == cuts


def test_equal_totals_count_every_earlier_microbatch():
    table = ContiguousTable.build(IntervalWork.build([2, 4, 2, 2, 4, 2], [0] * 6), 12, 3)
    assert table.cuts(3).tolist() == [2, 4]


def test_total_work_comes_before_the_heaviest_microbatch():
    work = IntervalWork.build([4, 4, 4, 4], [0, 0, 1, 0])
    assert ContiguousTable.build(work, 12, 2).cuts(2).tolist() == [1]


@given(sorted_arrays(most=10), st.integers(0, 20))
def test_least_total_is_convex_in_the_count(arrays, slack):
    lengths, lcp = arrays
    capacity = int(lengths.max()) + slack
    best = best_by_enumeration(lengths, lcp, capacity)
    counts, totals = list(best), [total for total, _ in best.values()]
    assert counts == list(range(counts[0], len(lengths) + 1))
    assert (np.diff(totals, 2) >= 0).all()
    least = [count for count in counts if best[count][0] == min(totals)]
    found = least_work_counts(IntervalWork.build(lengths, lcp), capacity)
    assert found == (least[0], least[-1])


@given(sorted_trajectories(most=9), st.integers(1, 4), st.integers(0, 20))
@settings(max_examples=300)
def test_best_plan_is_valid_and_least(trajectories, replicas, slack):
    lengths, lcp = arrays_of(trajectories)
    capacity = int(lengths.max()) + slack
    best = best_by_enumeration(lengths, lcp, capacity)
    usable = {count: value for count, value in best.items() if count % replicas == 0}
    if not usable:
        with pytest.raises(PlanError):
            best_contiguous(lengths, lcp, replicas, capacity)
        return
    plan = best_contiguous(lengths, lcp, replicas, capacity)
    groups = [trajectories[a:b] for a, b in pairwise([0, *plan.cuts, len(trajectories)])]
    assert [t for group in groups for t in group] == trajectories
    assert all(groups)
    assert plan.works.tolist() == [trie_size(group) for group in groups]
    assert plan.works.max() <= capacity
    assert plan.works.size % replicas == 0
    places = set(zip(plan.replica.tolist(), plan.slot.tolist(), strict=True))
    assert places == {(d, j) for d in range(replicas) for j in range(plan.works.size // replicas)}
    assert plan.objective == evaluate(plan.works, plan.replica, plan.slot)
    assert plan.objective.total_work == min(total for total, _ in usable.values())


@given(sorted_arrays(most=9), st.integers(1, 3), st.integers(0, 20))
def test_no_count_of_the_papers_range_is_better(arrays, replicas, slack):
    lengths, lcp = arrays
    assume(len(lengths) >= replicas)
    capacity = int(lengths.max()) + slack
    work = IntervalWork.build(lengths, lcp)
    counts = candidate_counts(work, replicas, capacity)
    assert counts[0] == minimum_count(work, replicas, capacity)
    feasible = best_by_enumeration(lengths, lcp, capacity)
    in_range = [count for count in counts if count in feasible]
    if not in_range:
        assert not [count for count in feasible if count % replicas == 0]
        return
    plan = best_contiguous(lengths, lcp, replicas, capacity)
    table = ContiguousTable.build(work, capacity, len(lengths))
    for count in in_range:
        cuts = table.cuts(count)
        schedule = schedule_microbatches(work.partition(cuts), replicas)
        assert plan.objective <= schedule.objective


def test_the_best_multiple_may_lie_below_the_count_of_least_work():
    work = IntervalWork.build([1, 5, 5, 3], [0, 0, 2, 1])
    table = ContiguousTable.build(work, 8, 4)
    assert [table.total(count) for count in (2, 3, 4)] == [13, 12, 14]
    assert best_contiguous(work.lengths, work.lcp, 2, 8).objective.total_work == 13


def test_candidate_range_of_a_small_case():
    # G = 24, T = 8, D = 2: K_min = 2 * ceil(24 / 16) = 4; the natural partition has 6 parts.
    work = IntervalWork.build([5, 5, 5, 5, 5, 5], [0, 0, 2, 0, 2, 2])
    assert work.total == 24
    assert natural_partition(work, 8).tolist() == [1, 3, 4]
    assert candidate_counts(work, 2, 8) == range(4, 5, 2)
    assert candidate_counts(work, 4, 8) == range(4, 5, 4)
    assert candidate_counts(work, 3, 7) == range(6, 7, 3)


@given(sorted_trajectories(most=6), st.integers(1, 3), st.integers(0, 12))
@settings(max_examples=200)
def test_no_partition_of_any_kind_is_below_the_bound(trajectories, replicas, slack):
    assume(len(trajectories) >= replicas)
    lengths, lcp = arrays_of(trajectories)
    capacity = int(lengths.max()) + slack
    work = IntervalWork.build(lengths, lcp)
    bound = total_work_lower_bound(work, replicas, capacity)
    assert bound >= work.total
    for groups in set_partitions(range(len(trajectories))):
        works = [trie_size([trajectories[i] for i in group]) for group in groups]
        if max(works) <= capacity and len(works) % replicas == 0:
            assert sum(works) >= bound


def test_bound_charges_a_prompt_to_every_microbatch_that_needs_it():
    # A prompt of 6 tokens and 8 answers of 2: two answers fit beside the prompt in 10 tokens.
    work = IntervalWork.build([8] * 8, [0] + [6] * 7)
    assert total_work_lower_bound(work, 1, 10) == 4 * 6 + 8 * 2
    assert best_contiguous([8] * 8, [0] + [6] * 7, 1, 10).objective.total_work == 40


def test_bound_charges_for_replicas_that_must_not_idle():
    work = IntervalWork.build([8] * 4, [0, 6, 2, 6])
    assert total_work_lower_bound(work, 2, 100) == 18 + 2
    assert total_work_lower_bound(work, 3, 100) == 18 + 2 + 6


@pytest.mark.parametrize(
    ("lengths", "replicas", "capacity", "message"),
    [
        ([3, 3], 3, 9, "2 trajectories cannot fill 3 replicas.*at most 2 replicas"),
        ([3, 12, 15], 1, 9, r"trajectory 40 has 15 tokens.*at most 9.*at least 15"),
        ([8, 8, 8], 2, 9, "3 trajectories .* need at least 3 contiguous.*only 2"),
        ([3, 3], 0, 9, "replicas=0"),
        ([3, 3], 1, 0, "capacity=0"),
    ],
)
def test_steps_without_a_plan_say_what_to_change(lengths, replicas, capacity, message):
    names = np.array([70, 50, 40])[: len(lengths)]
    with pytest.raises(PlanError, match=message):
        best_contiguous(lengths, [0] * len(lengths), replicas, capacity, trajectories=names)


def test_a_long_trajectory_is_named_by_sorted_position_without_names():
    with pytest.raises(PlanError, match="trajectory 1 has 12 tokens"):
        check_feasible(IntervalWork.build([3, 12], [0, 0]), 1, 9)


def test_states_beyond_62_bits_are_refused():
    work = IntervalWork.build([2**40] * 3, [0, 2**39, 2**39])
    with pytest.raises(PlanError, match="62-bit"):
        ContiguousTable.build(work, 2**42, 2)


def test_a_step_of_ten_thousand_trajectories():
    rng = np.random.default_rng(5)
    lengths = rng.integers(2_000, 12_000, 10_000)
    shared = (rng.beta(4, 1, 10_000) * 12_000).astype(np.int64)
    lcp = np.minimum(shared, np.minimum(lengths, np.roll(lengths, 1)))
    lcp[0] = 0
    plan = best_contiguous(lengths, lcp, 4, 65_536)
    work = IntervalWork.build(lengths, lcp)
    assert (np.diff([0, *plan.cuts, 10_000]) > 0).all()
    assert plan.works.tolist() == work.partition(plan.cuts).tolist()
    assert plan.works.max() <= 65_536
    assert plan.works.size % 4 == 0
    assert total_work_lower_bound(work, 4, 65_536) <= plan.objective.total_work


@pytest.mark.parametrize(
    ("name", "replicas", "capacity", "total"),
    [
        ("toolbench_dfsdt", 4, 20_571, 89_136),
        ("taubench_airline", 2, 65_536, 588_177),
    ],
)
def test_total_work_on_real_trajectories(shared_data, name, replicas, capacity, total):
    column = pq.read_table(shared_data / f"{name}.parquet", columns=["token_ids"])["token_ids"]
    lengths, lcp = arrays_of(sorted(map(tuple, column.to_pylist())))
    plan = best_contiguous(lengths, lcp, replicas, capacity)
    assert plan.objective.total_work == total
    bound = total_work_lower_bound(IntervalWork.build(lengths, lcp), replicas, capacity)
    assert bound <= total <= 1.005 * bound
