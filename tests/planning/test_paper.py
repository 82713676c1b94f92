"""The paper's planner as a whole: candidates, anchors, choice, guarantees and refusals."""

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harts.errors import PlanError
from harts.planning import paper
from harts.planning.bound import total_work_lower_bound
from harts.planning.contiguous import (
    best_contiguous,
    candidate_counts,
    least_contiguous_work,
)
from harts.planning.grouping import cuts_of
from harts.planning.intervals import IntervalWork
from harts.planning.local_refinement import REACH, REPAIRS, SWEEPS, most_repaired, refine
from harts.planning.paper import paper_candidates, paper_groups, paper_plan
from harts.planning.schedule import evaluate, schedule_microbatches
from tests.planning.groupings import arrays, as_lists, check_grouping, index_of, sizes
from tests.planning.oracles import (
    arrays_of,
    contiguous_partitions,
    sorted_arrays,
    sorted_trajectories,
)


def test_the_papers_constants():
    assert (paper.EXACT_LIMIT, paper.SAMPLED_COUNTS, paper.REFINED_ANCHORS) == (512, 32, 3)
    assert (REACH, SWEEPS, REPAIRS) == (8, 2, 4)


def long_trajectories(count, seed):
    """Sorted random walks in a shallow trie, N large enough for the heuristic base search."""
    rng = np.random.default_rng(seed)
    depth = rng.integers(3, 12, count)
    return sorted(tuple(rng.integers(0, 3, n).tolist()) for n in depth)


@given(sorted_trajectories(), st.integers(1, 4), st.integers(0, 20))
@settings(max_examples=300)
def test_small_plans_are_valid_and_no_worse_than_exact_contiguous(trajectories, replicas, slack):
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    try:
        contiguous = best_contiguous(work.lengths, work.lcp, replicas, capacity)
    except PlanError:
        contiguous = None
    try:
        plan = paper_plan(work, replicas, capacity)
    except PlanError:
        assert contiguous is None
        return
    check_grouping(trajectories, plan.groups, capacity, replicas)
    assert plan.works.tolist() == sizes(trajectories, plan.groups)
    assert plan.objective == evaluate(plan.works, plan.replica, plan.slot)
    places = sorted(zip(plan.slot.tolist(), plan.replica.tolist(), strict=True))
    slots = len(plan.groups) // replicas
    assert places == [(j, d) for j in range(slots) for d in range(replicas)]
    if contiguous is not None:
        assert plan.objective.total_work <= contiguous.objective.total_work


@given(sorted_arrays(most=8), st.integers(1, 3), st.integers(0, 16))
def test_exact_candidates_are_least_for_every_count_of_the_range(drawn, replicas, slack):
    lengths, lcp = drawn
    assume(len(lengths) >= replicas)
    capacity = int(lengths.max()) + slack
    work = IntervalWork.build(lengths, lcp)
    found = {
        len(c.groups): (c.total, int(c.works.max()))
        for c in paper_candidates(work, replicas, capacity)
        if c.origin == "exact"
    }
    expected = {}
    for count in candidate_counts(work, replicas, capacity):
        works = [
            work.partition(np.array(cuts[1:-1], np.int64))
            for cuts in contiguous_partitions(len(lengths), count)
        ]
        fitting = [(int(w.sum()), int(w.max())) for w in works if w.max() <= capacity]
        if fitting:
            expected[count] = min(fitting)
    assert found == expected


@pytest.mark.parametrize("limit", [0, 512])
@given(
    trajectories=sorted_trajectories(most=14), replicas=st.integers(1, 3), slack=st.integers(0, 9)
)
def test_the_chosen_candidate_is_the_first_of_least_objective(limit, trajectories, replicas, slack):
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    assume(len(trajectories) >= replicas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "EXACT_LIMIT", limit)
        candidates = paper_candidates(work, replicas, capacity)
        if not candidates:
            with pytest.raises(PlanError, match="found no grouping"):
                paper_plan(work, replicas, capacity)
            return
        plan = paper_plan(work, replicas, capacity)
    for candidate in candidates:
        check_grouping(trajectories, candidate.groups, capacity, replicas)
        assert candidate.works.tolist() == sizes(trajectories, candidate.groups)
    objectives = [schedule_microbatches(c.works, replicas).objective for c in candidates]
    first = candidates[objectives.index(min(objectives))]
    assert plan.objective == min(objectives)
    assert as_lists(plan.groups) == as_lists(first.groups)
    assert (plan.origin, plan.candidates) == (first.origin, len(candidates))


@pytest.mark.parametrize("limit", [0, 512])
@given(
    trajectories=sorted_trajectories(most=14),
    replicas=st.integers(1, 3),
    slack=st.integers(0, 9),
    excess=st.integers(-2, 12),
)
def test_what_is_not_searched_for_has_more_work(limit, trajectories, replicas, slack, excess):
    work = index_of(trajectories)
    capacity = int(work.lengths.max()) + slack
    most = work.total + excess
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "EXACT_LIMIT", limit)
        candidates = paper_candidates(work, replicas, capacity)
        within = paper_candidates(work, replicas, capacity, most)

    def described(found):
        return [(c.origin, as_lists(c.groups)) for c in found]

    assert described(within) == described(c for c in candidates if c.total <= most)


def test_heavy_candidates_are_not_searched_for(monkeypatch):
    work = index_of(long_trajectories(600, 3))
    candidates = paper_candidates(work, 2, 150)
    least = min(least_contiguous_work(work, 150), *(c.total for c in candidates))
    below_all = least - most_repaired(work) - 1
    for name in ("evolve_partition", "refine"):
        monkeypatch.delattr(paper, name)
    assert paper_candidates(work, 2, 150, below_all) == []
    with pytest.raises(PlanError, match="found no grouping"):
        paper_groups(work, 2, 150, below_all)


def test_small_inputs_refine_only_the_greedy_candidate():
    work = index_of(long_trajectories(60, 1))
    origins = [c.origin for c in paper_candidates(work, 2, 60)]
    assert Counter(origins)["greedy"] == Counter(origins)["refined"] == 1
    assert set(origins[:-2]) == {"exact"}


def test_the_heuristic_search_begins_beyond_512_trajectories():
    for count, origin in [(512, "exact"), (513, "evolved")]:
        work = index_of(long_trajectories(count, 2))
        assert paper_candidates(work, 2, 200)[0].origin == origin


def test_large_inputs_refine_greedy_the_least_work_and_the_closest_count():
    work = index_of(long_trajectories(600, 3))
    candidates = paper_candidates(work, 2, 150)
    base = [c for c in candidates if c.origin == "evolved"]
    greedy, *refined = [c for c in candidates if c.origin in ("greedy", "refined")]
    assert 2 <= len(base) <= 32
    assert len(refined) == 3
    least = min(base, key=lambda c: c.total)
    others = [c for c in base if c is not least]
    closest = min(others, key=lambda c: (abs(len(c.groups) - len(greedy.groups)), c.total))
    for anchor, found in zip((greedy, least, closest), refined, strict=True):
        assert as_lists(found.groups) == as_lists(refine(work, list(anchor.groups), 150))
    assert cuts_of(list(least.groups)) is not None


def candidate(count, total):
    works = np.full(count, 1, np.int64)
    works[0] = total - count + 1
    return paper.Candidate(origin="evolved", groups=tuple(arrays([[0]] * count)), works=works)


@pytest.mark.parametrize(
    ("base", "greedy", "expected"),
    [
        ([(4, 90), (6, 80), (8, 85), (10, 80)], 8, [8, 6, 8]),  # least work: the smaller count
        ([(4, 90), (6, 85), (8, 80), (10, 84)], 8, [8, 8, 10]),  # equally close: less work
        ([(4, 90), (6, 85), (8, 80), (10, 85)], 8, [8, 8, 6]),  # ... then the smaller count
        ([(4, 90)], 8, [8, 4]),
        ([], 8, [8]),
        ([(4, 90), (6, 80)], None, [6]),
        ([], None, []),
    ],
)
def test_anchors(base, greedy, expected):
    chosen = paper._anchors(
        [candidate(*c) for c in base], None if greedy is None else candidate(greedy, 99)
    )
    assert [len(c.groups) for c in chosen] == expected


def test_plans_repeat_and_do_not_depend_on_input_order():
    rng = np.random.default_rng(4)
    for count, capacity in [(40, 50), (600, 150)]:
        trajectories = sorted(set(long_trajectories(count, 5)))
        first = paper_plan(index_of(trajectories), 2, capacity)
        expected = {frozenset(trajectories[i] for i in group) for group in first.groups}
        shuffled = [trajectories[i] for i in rng.permutation(len(trajectories))]
        second = paper_plan(index_of(sorted(shuffled)), 2, capacity)
        assert second.objective == first.objective
        order = np.argsort(np.array([trajectories.index(t) for t in shuffled]))
        back = [frozenset(shuffled[order[i]] for i in group) for group in second.groups]
        assert set(back) == expected
        assert as_lists(paper_groups(index_of(trajectories), 2, capacity)) == as_lists(first.groups)


@pytest.mark.parametrize(
    ("lengths", "replicas", "capacity", "message"),
    [
        ([3, 3], 3, 9, "2 trajectories cannot fill 3 replicas"),
        ([3, 12], 1, 9, r"trajectory 41 has 12 tokens"),
        ([8, 8, 8], 2, 9, "found no grouping of 3 trajectories.*2 replicas.*Raise the capacity"),
        ([3, 3], 0, 9, "replicas=0"),
    ],
)
def test_steps_without_a_plan_say_what_to_change(lengths, replicas, capacity, message):
    work = IntervalWork.build(lengths, [0] * len(lengths))
    names = np.array([40, 41, 42])[: len(lengths)]
    with pytest.raises(PlanError, match=message):
        paper_plan(work, replicas, capacity, trajectories=names)


def test_greedy_membership_rescues_a_step_without_contiguous_plan():
    # Contiguous needs {0}, {1}, {2}, {3}; works 5 and 4 fit together across the order.
    work = IntervalWork.build([5, 6, 4, 3], [0, 0, 0, 0])
    plan = paper_plan(work, 2, 9)
    assert as_lists(plan.groups) == [[0, 2], [1, 3]]
    assert plan.objective == (18, 9, 9)


@pytest.mark.parametrize(
    ("name", "replicas", "capacity"),
    [("toolbench_dfsdt", 4, 20_571), ("taubench_airline", 2, 65_536), ("tot_game24", 4, 8_192)],
)
def test_real_trajectories(shared_data, name, replicas, capacity):
    column = pq.read_table(shared_data / f"{name}.parquet", columns=["token_ids"])["token_ids"]
    lengths, lcp = arrays_of(sorted(map(tuple, column.to_pylist())))
    work = IntervalWork.build(lengths, lcp)
    plan = paper_plan(work, replicas, capacity)
    contiguous = best_contiguous(lengths, lcp, replicas, capacity)
    assert total_work_lower_bound(work, replicas, capacity) <= plan.objective.total_work
    if len(work) <= paper.EXACT_LIMIT:
        assert plan.objective.total_work <= contiguous.objective.total_work
