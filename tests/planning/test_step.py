"""The step plan: its invariants, its stable JSON, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from harts.errors import InputError, PlanError
from harts.planning.step import StepPlan, check_plan, plan_step
from harts.trajectories import read_trajectories
from tests.forests import batch_of, random_batch


def groups(plan: StepPlan) -> set[frozenset[int]]:
    return {frozenset(m.members.tolist()) for m in plan.microbatches}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_random_plans_hold_every_invariant(replicas: int) -> None:
    rng = np.random.default_rng(replicas)
    for _ in range(100):
        batch = random_batch(rng, trajectories=replicas * int(rng.integers(1, 5)))
        capacity = int(batch.lengths.max() + rng.integers(0, 60))
        plan = plan_step(batch, replicas=replicas, capacity=capacity, chunk_size=4)
        check_plan(plan, len(batch))
        works = np.array([m.compact_tokens for m in plan.microbatches])
        grid = works.reshape(-1, replicas)
        expected = (works.sum(), grid.max(axis=1).sum(), grid.sum(axis=0).max())
        assert tuple(plan.objective) == expected
        assert plan.lower_bound <= works.sum()
        assert plan.merged_tokens <= works.sum() <= plan.raw_tokens


def test_permuting_the_input_permutes_the_groups() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        batch = random_batch(rng, trajectories=9)
        batch = batch.select(np.unique(batch_keys(batch), return_index=True)[1])
        order = rng.permutation(len(batch))
        options = {"replicas": 1, "capacity": int(batch.lengths.max()) + 20, "chunk_size": 4}
        plain = plan_step(batch, **options)
        permuted = plan_step(batch.select(order), **options)
        assert permuted.objective == plain.objective
        assert {frozenset(order[list(g)].tolist()) for g in groups(permuted)} == groups(plain)


def batch_keys(batch: object) -> list[bytes]:
    return [batch.trajectory(i).tobytes() for i in range(len(batch))]  # type: ignore[attr-defined]


def test_capacity_counts_shared_tokens_once_so_high_branching_trees_fit() -> None:
    """Peers' fault 14: capacity is the packed, compact size; path lengths do not add up."""
    trunk = list(range(50))
    batch = batch_of([[*trunk, 100 + i] for i in range(200)])
    plan = plan_step(batch, replicas=1, capacity=250)
    assert len(plan.microbatches) == 1
    assert plan.objective.total_work == 250


def test_json_is_the_stable_form(tmp_path: Path) -> None:
    batch = batch_of([[1] * 63 + [2] * 9, [1] * 63 + [3] * 80, [1] * 63 + [3] * 4 + [4]])
    plan = plan_step(batch, replicas=1, capacity=1000)
    path = tmp_path / "plan.json"
    plan.save(path)
    found = json.loads(path.read_text())
    timings = found.pop("timings_s")
    assert list(timings) == ["load", "forest", "microbatches", "calls"]
    assert found == {
        "version": 1,
        "D": 1,
        "T": 1000,
        "chunk_size": 64,
        "objective": [153, 153, 153],
        "lower_bound": 153,
        "raw_tokens": 283,
        "merged_tokens": 153,
        "microbatches": [
            {
                "replica": 0,
                "slot": 0,
                "members": [0, 1, 2],
                "compact_tokens": 153,
                "replay_tokens": 63 + 3,
                "tree": {
                    "segments": [
                        {"id": 0, "parent": None, "len": 63},
                        {"id": 1, "parent": 0, "len": 9},
                        {"id": 2, "parent": 0, "len": 4},
                        {"id": 3, "parent": 2, "len": 76},
                        {"id": 4, "parent": 2, "len": 1},
                    ]
                },
                "calls": {
                    "rounds": [
                        [
                            {"chain": [0, 1], "init": None, "replay": [0, 0], "request": []},
                            {"chain": [2, 3], "init": None, "replay": [0, 63], "request": [64]},
                        ],
                        [
                            {
                                "chain": [4],
                                "init": {"seg": 2, "pos": 64},
                                "replay": [64, 67],
                                "request": [],
                            }
                        ],
                    ]
                },
            }
        ],
    }


def test_a_plan_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    plan = plan_step(batch_of([[1, 2]]), replicas=1, capacity=8)
    with pytest.raises(InputError, match="cannot write the plan"):
        plan.save(tmp_path / "missing" / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_refusals_name_the_trajectory_and_the_remedy() -> None:
    batch = batch_of([[1, 2], [9, 8, 7, 6], [3]])
    with pytest.raises(PlanError, match=r"trajectory 1 has 4 tokens.*at least 4"):
        plan_step(batch, replicas=1, capacity=3)
    with pytest.raises(PlanError, match=r"3 trajectories cannot fill 4 replicas"):
        plan_step(batch, replicas=4, capacity=10)
    with pytest.raises(InputError, match="planner must be one of"):
        plan_step(batch, replicas=1, capacity=10, planner="fast")  # type: ignore[arg-type]


def test_counts_below_1_are_refused() -> None:
    good = {"replicas": 1, "capacity": 8, "chunk_size": 4}
    for name in good:
        with pytest.raises(PlanError, match=rf"must be at least 1; got .*{name}=0"):
            plan_step(batch_of([[1, 2]]), **{**good, name: 0})


def test_best_finds_a_plan_that_no_contiguous_partition_gives() -> None:
    batch = batch_of([(1, 0), (0, 0, 0, 0, 0, 1, 1), (0, 0, 0, 1, 1, 1, 1, 0)])
    plan = plan_step(batch, replicas=2, capacity=9)
    assert groups(plan) == {frozenset({0, 1}), frozenset({2})}
    assert plan.objective.total_work == 17
    with pytest.raises(PlanError, match="contiguous"):
        plan_step(batch, replicas=2, capacity=9, planner="contiguous")


def test_check_plan_catches_each_broken_invariant() -> None:
    batch = batch_of([[1, 2], [9, 8, 7, 6], [3]])
    plan = plan_step(batch, replicas=1, capacity=4)
    first, second = plan.microbatches[0], plan.microbatches[-1]
    broken = {
        "exactly once": {"microbatches": (first,) * len(plan.microbatches)},
        "every slot": {
            "microbatches": tuple(dataclasses.replace(m, slot=0) for m in (first, second))
        },
        "capacity is 2": {"capacity": 2},
        "the objective counts": {"objective": plan.objective._replace(total_work=1)},
    }
    for message, change in broken.items():
        with pytest.raises(PlanError, match=message):
            check_plan(dataclasses.replace(plan, **change), len(batch))  # type: ignore[arg-type]


def test_without_sharing_work_is_every_token() -> None:
    batch = batch_of([[1, 2], [1, 2], [1, 2, 3]])
    plan = plan_step(batch, replicas=1, capacity=100, share=False)
    assert plan.objective.total_work == plan.raw_tokens == 7
    assert all(len(m.calls.rounds) == 1 for m in plan.microbatches)


@pytest.mark.parametrize(
    ("name", "replicas", "capacity"),
    [("tot_game24", 4, 8192), ("toolbench_dfsdt", 2, 8192), ("whissle_medagentbench", 4, 65_536)],
)
def test_real_files_are_planned(shared_data: Path, name: str, replicas: int, capacity: int) -> None:
    batch = read_trajectories([shared_data / f"{name}.parquet"])
    plan = plan_step(batch, replicas=replicas, capacity=capacity)
    assert plan.objective.total_work < batch.raw_tokens / 2
    assert plan.objective.total_work <= 1.05 * plan.lower_bound
