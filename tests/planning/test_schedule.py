"""Slots and replicas: the greedy rule, the objective, and what the rule guarantees."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.errors import PlanError
from harts.planning.exact import least_replica_maximum
from harts.planning.schedule import Objective, evaluate, level_schedule, schedule_microbatches


def works_and_replicas():
    return st.integers(1, 4).flatmap(
        lambda replicas: st.integers(1, 4).flatmap(
            lambda slots: st.tuples(
                st.lists(st.integers(1, 9), min_size=slots * replicas, max_size=slots * replicas),
                st.just(replicas),
            )
        )
    )


def test_the_heaviest_of_a_slot_goes_to_the_idlest_replica():
    # Slots (9, 8), (6, 2), (2, 1). Loads: 9|8, then 6 to replica 1: 11|14, then 2 to replica 0.
    schedule = schedule_microbatches(np.array([2, 9, 1, 6, 8, 2]), 2)
    assert schedule.slot.tolist() == [1, 0, 2, 1, 0, 2]
    assert schedule.replica.tolist() == [0, 0, 1, 1, 1, 0]
    assert schedule.objective == Objective(28, 9 + 6 + 2, 15)


def test_objective_of_a_hand_made_schedule():
    works = np.array([5, 4, 3, 2])
    objective = evaluate(works, np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]))
    assert objective == Objective(total_work=14, slot_maxima=8, replica_maximum=8)
    crossed = evaluate(works, np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]))
    assert crossed == Objective(14, 8, 7)
    assert crossed < objective


@given(works_and_replicas())
def test_every_replica_runs_one_microbatch_a_slot(case):
    works, replicas = case
    schedule = schedule_microbatches(np.array(works), replicas)
    places = sorted(zip(schedule.slot.tolist(), schedule.replica.tolist(), strict=True))
    slots = len(works) // replicas
    assert places == [(j, d) for j in range(slots) for d in range(replicas)]
    ordered = sorted(zip(schedule.slot.tolist(), [-w for w in works], strict=True))
    assert [-w for _, w in ordered] == sorted(works, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_no_other_slots_have_a_smaller_sum_of_maxima(works, replicas):
    least = min(
        sum(max(order[i : i + replicas]) for i in range(0, len(works), replicas))
        for order in permutations(works)
    )
    assert schedule_microbatches(np.array(works), replicas).objective.slot_maxima == least


@given(works_and_replicas())
def test_objective_is_summed_as_equation_4_says(case):
    works, replicas = case
    schedule = schedule_microbatches(np.array(works), replicas)
    grid = np.zeros((replicas, len(works) // replicas), np.int64)
    grid[schedule.replica, schedule.slot] = works
    expected = (grid.sum(), grid.max(axis=0).sum(), grid.sum(axis=1).max())
    assert schedule.objective == expected


@pytest.mark.parametrize(("works", "replicas"), [([], 2), ([1, 2, 3], 2), ([1], 0)])
def test_a_count_that_replicas_do_not_divide_is_refused(works, replicas):
    with pytest.raises(PlanError, match="positive multiple of the replica count"):
        schedule_microbatches(np.array(works, np.int64), replicas)


@given(works_and_replicas())
def test_levelling_keeps_the_slots_and_never_loads_a_replica_more(case):
    works, replicas = np.array(case[0]), case[1]
    greedy, level = schedule_microbatches(works, replicas), level_schedule(works, replicas)
    assert level.objective == evaluate(works, level.replica, level.slot)
    assert level.objective <= greedy.objective
    assert level.objective.slot_maxima == greedy.objective.slot_maxima
    places = sorted(zip(level.slot.tolist(), level.replica.tolist(), strict=True))
    assert places == [(j, d) for j in range(works.size // replicas) for d in range(replicas)]


def test_levelling_is_close_to_the_best_assignment():
    rng = np.random.default_rng(0)
    reached = [], []
    for _ in range(200):
        replicas = int(rng.integers(2, 4))
        works = rng.integers(100, 1000, replicas * int(rng.integers(2, 5)))
        least = least_replica_maximum(-np.sort(-works), replicas)
        for found, schedule in zip(reached, (schedule_microbatches, level_schedule), strict=True):
            found.append(schedule(works, replicas).objective.replica_maximum / least - 1)
    greedy, level = np.mean(reached, axis=1)
    assert level <= 0.01
    assert level <= greedy / 2


def test_levelling_a_thousand_slots_is_even():
    works = np.random.default_rng(1).integers(20_000, 65_537, 4000)
    objective = level_schedule(works, 4).objective
    assert objective.replica_maximum <= (1 + 1e-5) * objective.total_work / 4
