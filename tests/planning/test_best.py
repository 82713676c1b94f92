"""The best planner: against every set partition, every other planner, and itself permuted."""

from itertools import product

import numpy as np
import pyarrow.parquet as pq
import pytest

from harts.errors import PlanError
from harts.planning import best, paper
from harts.planning.best import plan_groups
from harts.planning.bound import total_work_lower_bound
from harts.planning.exact import least_replica_maximum
from harts.planning.intervals import IntervalWork
from harts.planning.schedule import evaluate
from harts.planning.step import plan_step
from tests.forests import batch_of
from tests.planning.checker import (
    cases,
    checked_works,
    least_totals,
    random_trajectories,
    subset_works,
    work_of,
)
from tests.planning.oracles import arrays_of, set_partitions


def least_totals_of_many(works: np.ndarray, capacity: np.ndarray, replicas: int) -> np.ndarray:
    """`least_totals` for [n, 2**N] subset works and [n] capacities at once; huge where none."""
    huge = 1 << 40
    size = works.shape[1]
    cost = np.where(works <= capacity[:, None], works, huge).T
    reached = np.full((size, replicas, len(works)), huge)
    reached[0, 0] = 0
    for mask in range(1, size):
        low, rest = mask & -mask, mask & (mask - 1)
        sub = rest
        while True:
            via = np.roll(reached[mask ^ sub ^ low], 1, axis=0) + cost[sub | low]
            np.minimum(reached[mask], via, out=reached[mask])
            if not sub:
                break
            sub = (sub - 1) & rest
    return reached[-1, 0]


@pytest.mark.parametrize(("total", "replicas"), [*product(range(3, 9), (1, 2, 3, 4))])
def test_ten_thousand_small_steps_have_the_least_total_work(total, replicas):
    if total < replicas:
        pytest.skip("fewer trajectories than replicas")
    rng = np.random.default_rng(total * 10 + replicas)
    steps = []
    while len(steps) < 450:
        trajectories = random_trajectories(rng, total)
        trajectories = sorted(trajectories + random_trajectories(rng, total))[:total]
        if len(trajectories) == total:
            steps.append((trajectories, max(map(len, trajectories)) + int(rng.integers(0, 20))))
    works = np.array([subset_works(trajectories) for trajectories, _ in steps])
    least = least_totals_of_many(works, np.array([c for _, c in steps]), replicas)
    for (trajectories, capacity), expected in zip(steps, least.tolist(), strict=True):
        work = work_of(trajectories)
        if expected >= 1 << 40:
            with pytest.raises(PlanError, match="Raise the capacity"):
                plan_groups(work, replicas, capacity, "best")
            continue
        plan = plan_groups(work, replicas, capacity, "best")
        assert plan.objective.total_work == expected
        assert total_work_lower_bound(work, replicas, capacity) <= expected
    assert len(steps) == 450


def least_objective(trajectories, replicas, capacity):
    """Least J over all set partitions, each with every schedule."""
    works = subset_works(trajectories)
    found = []
    for groups in set_partitions(range(len(trajectories))):
        sizes = sorted((int(works[sum(1 << i for i in g)]) for g in groups), reverse=True)
        if len(groups) % replicas == 0 and sizes[0] <= capacity:
            maxima = sum(sizes[::replicas])
            found.append((sum(sizes), maxima, least_replica_maximum(np.array(sizes), replicas)))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(3))
def test_small_steps_have_the_least_objective(seed):
    for trajectories, replicas, capacity in cases(seed, 100, 6):
        expected = least_objective(trajectories, replicas, capacity)
        if expected is None:
            continue
        plan = plan_groups(work_of(trajectories), replicas, capacity, "best")
        assert tuple(plan.objective)[:2] == expected[:2]
        assert plan.objective.replica_maximum == expected[2]


@pytest.mark.parametrize("few", [0, 512])
@pytest.mark.parametrize("most", [8, 14, 40])
def test_no_planner_beats_the_best_and_every_plan_is_valid(most, few, monkeypatch):
    """Also with the searches that only larger steps are planned by."""
    monkeypatch.setattr(best, "EXACT_LIMIT", 0)
    monkeypatch.setattr(best, "DISSOLVED_LIMIT", few)
    monkeypatch.setattr(paper, "EXACT_LIMIT", few)
    optimal = known = 0
    for trajectories, replicas, capacity in cases(most, 60, most):
        work = work_of(trajectories)
        objectives = {}
        for planner in ("contiguous", "hierarchical", "paper", "best"):
            try:
                plan = plan_groups(work, replicas, capacity, planner)
            except PlanError:
                continue
            works = checked_works(trajectories, plan.groups, replicas, capacity)
            assert plan.works.tolist() == works
            assert plan.objective == evaluate(plan.works, plan.replica, plan.slot)
            places = set(zip(plan.replica.tolist(), plan.slot.tolist(), strict=True))
            assert places == {*product(range(replicas), range(len(works) // replicas))}
            objectives[planner] = plan.objective
        if objectives:
            assert objectives["best"] == min(objectives.values())
            bound = total_work_lower_bound(work, replicas, capacity)
            assert bound <= objectives["best"].total_work
        if most == 8 and objectives:
            least = least_totals(subset_works(trajectories), capacity, replicas)
            known += 1
            optimal += objectives["best"].total_work == least
    # Without the enumeration the search alone is nearly always optimal.
    assert optimal >= 0.97 * known


def test_a_step_that_fits_one_microbatch_is_not_searched(monkeypatch):
    def refuse(*_):
        raise AssertionError("searched")

    monkeypatch.setattr(best, "_candidates", refuse)
    monkeypatch.setattr(best, "exact_groups", refuse)
    paths = [[1, 2, 3 + i % 7, i] for i in range(40)] + [[90 + i] for i in range(9)]
    work = work_of(sorted(paths))
    whole = len({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)})
    plan = plan_groups(work, 1, whole, "best")
    assert [group.tolist() for group in plan.groups] == [list(range(49))]
    assert tuple(plan.objective) == (whole, whole, whole)
    for replicas, capacity in ((1, whole - 1), (2, whole)):
        with pytest.raises(AssertionError, match="searched"):
            plan_groups(work, replicas, capacity, "best")


def large_step():
    """More trajectories than any limit of the planners, and the paper's plan is the lightest."""
    rng = np.random.default_rng(358)
    lengths = rng.integers(5, 60, 520)
    lcp = np.minimum(rng.integers(0, 50, 520), np.minimum(lengths, np.roll(lengths, 1)))
    lcp[0] = 0
    return IntervalWork.build(lengths, lcp), 4, int(lengths.max())


def test_the_papers_plan_is_considered_at_any_size(monkeypatch):
    work, replicas, capacity = large_step()
    assert len(work) > max(best.DISSOLVED_LIMIT, paper.EXACT_LIMIT)
    rival = plan_groups(work, replicas, capacity, "paper").objective
    assert plan_groups(work, replicas, capacity, "best").objective <= rival

    def refuse(*_):
        raise PlanError("left out")

    monkeypatch.setattr(best, "paper_groups", refuse)
    assert plan_groups(work, replicas, capacity, "best").objective > rival


def test_permuting_the_input_gives_the_same_groups():
    rng = np.random.default_rng(3)
    for most in (8, 30):
        for _ in range(25):
            trajectories = random_trajectories(rng, most)
            batch = batch_of(trajectories)
            order = rng.permutation(len(trajectories))
            capacity = max(map(len, trajectories)) + 10
            plain = plan_step(batch, replicas=1, capacity=capacity)
            permuted = plan_step(batch.select(order), replicas=1, capacity=capacity)
            assert permuted.objective == plain.objective
            found = [
                # Exact duplicates are interchangeable: groups are compared by what they hold.
                sorted(sorted(tokens[i] for i in m.members.tolist()) for m in plan.microbatches)
                for plan, tokens in (
                    (plain, trajectories),
                    (permuted, [trajectories[i] for i in order]),
                )
            ]
            assert found[0] == found[1]


def test_the_same_step_is_planned_the_same_way_twice():
    trajectories = random_trajectories(np.random.default_rng(5), 60)
    work = work_of(trajectories)
    first, second = (plan_groups(work, 2, 40, "best") for _ in range(2))
    assert [g.tolist() for g in first.groups] == [g.tolist() for g in second.groups]
    assert first.replica.tolist() == second.replica.tolist()


@pytest.mark.parametrize(
    ("name", "replicas", "capacity", "at_most", "gap"),
    [
        ("toolbench_dfsdt", 4, 20_571, 89_136, 0.001),
        ("toolbench_dfsdt", 2, 8_192, 99_284, 0.007),
        ("toolbench_dfsdt", 4, 8_192, 99_382, 0.007),
        ("taubench_airline", 2, 65_536, 588_166, 0.001),
        ("taubench_airline", 4, 20_571, 686_499, 0.001),
        ("reflexion_react", 4, 4_096, 143_488, 0.012),
        ("whissle_medagentbench", 4, 65_536, 714_283, 0.001),
        ("tot_game24", 2, 8_192, 164_098, 0.001),
        ("tot_game24", 4, 20_571, 163_487, 0.001),
    ],
)
def test_real_trajectories_reach_known_totals(shared_data, name, replicas, capacity, at_most, gap):
    column = pq.read_table(shared_data / f"{name}.parquet", columns=["token_ids"])["token_ids"]
    work = IntervalWork.build(*arrays_of(sorted(map(tuple, column.to_pylist()))))
    plan = plan_groups(work, replicas, capacity, "best")
    bound = total_work_lower_bound(work, replicas, capacity)
    assert plan.objective.total_work <= at_most
    assert bound <= plan.objective.total_work <= (1 + gap) * bound
