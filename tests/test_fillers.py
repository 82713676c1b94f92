"""Fillers: plans where D divides no number of microbatches, and steps that they leave alone."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import harts.training.step as step_module
from harts.errors import PlanError
from harts.fidelity import (
    Comparison,
    compare_gradients,
    compare_outcomes,
    float64_everywhere,
    gradients,
    run_alone,
)
from harts.models import PolicyOutput, TreePolicy, prepare
from harts.models.bailing_hybrid import FAMILY, small_model
from harts.objectives import GRPO, prepare_step
from harts.planning.step import Planner, StepPlan, check_plan, plan_step
from harts.planning.verify import verify_plan
from harts.training.step import RouterLosses, StepOutcome, run_step
from harts.trajectories import TrajectoryBatch
from tests.forests import batch_of, random_batch

VOCABULARY = 40
ROUTER = RouterLosses(z_coefficient=1e-2, load_balancing_coefficient=1e-1)
PLANNERS: list[Planner] = ["best", "paper", "contiguous", "hierarchical"]


def fillers(plan: StepPlan) -> list[int]:
    return [m.members.tolist()[0] for m in plan.microbatches if m.filler]


@pytest.mark.parametrize("planner", PLANNERS)
def test_fewer_trajectories_than_replicas_are_filled_up(planner: Planner) -> None:
    batch = batch_of([[1, 2, 3, 4], [1, 2, 9], [7, 7, 7, 7]])
    plan = plan_step(batch, replicas=4, capacity=10, planner=planner, fillers=True)
    assert plan.slots == 1
    assert fillers(plan) == [1], "the shortest trajectory"
    assert plan.objective == (4 + 3 + 4 + 3, 4, 4)
    assert sorted(m.members.tolist() for m in plan.counted) == [[0], [1], [2]]
    verify_plan(plan, batch)
    marks = [m.get("filler") for m in plan.to_json()["microbatches"]]
    assert sorted(marks, key=bool) == [None, None, None, True]


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_count_that_cannot_be_aligned_is_filled_up(planner: Planner) -> None:
    batch = batch_of([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    with pytest.raises(PlanError, match=r"--fillers"):
        plan_step(batch, replicas=2, capacity=3, planner=planner)
    plan = plan_step(batch, replicas=2, capacity=3, planner=planner, fillers=True)
    assert plan.slots == 2
    assert len(fillers(plan)) == 1
    assert plan.lower_bound == 9
    verify_plan(plan, batch)


def test_a_microbatch_is_split_rather_than_filled_where_that_costs_no_more() -> None:
    trunk = list(range(10))
    batch = batch_of([[*trunk, 50 + i] for i in range(3)] + [[99, 98, 97]])
    plan = plan_step(batch, replicas=8, capacity=100, fillers=True)
    # Repeating 3 tokens is cheaper than repeating the trunk; splitting off the stranger is free.
    assert sorted(len(m.members) for m in plan.counted) == [1, 3]
    assert fillers(plan) == [3] * 6
    assert plan.objective.total_work == 10 + 3 + 3 + 6 * 3


def test_a_filler_predicts_at_least_one_token_where_it_can() -> None:
    plan = plan_step(batch_of([[1], [2, 3]]), replicas=3, capacity=10, fillers=True)
    assert fillers(plan) == [1]


def test_without_need_there_are_no_fillers_and_the_same_plan() -> None:
    batch = random_batch(np.random.default_rng(0), trajectories=8)
    options = {"replicas": 2, "capacity": 200, "chunk_size": 4}
    plain, filled = plan_step(batch, **options), plan_step(batch, fillers=True, **options)
    a, b = plain.to_json(), filled.to_json()
    assert a.pop("timings_s").keys() == b.pop("timings_s").keys()
    assert a == b


def test_random_filled_plans_hold_every_invariant() -> None:
    rng = np.random.default_rng(0)
    used = 0
    for i in range(120):
        batch = random_batch(rng, trajectories=int(rng.integers(1, 9)))
        plan = plan_step(
            batch,
            replicas=int(rng.integers(2, 7)),
            capacity=int(batch.lengths.max() + rng.integers(0, 30)),
            chunk_size=4,
            planner=PLANNERS[i % 4],
            share=i % 3 > 0,
            fillers=True,
        )
        check_plan(plan, len(batch))
        verify_plan(plan, batch)
        used += len(plan.counted) < len(plan.microbatches)
    assert used > 30


def test_the_order_of_the_input_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        batch = random_batch(rng, trajectories=5)
        capacity = int(batch.lengths.max()) + 5
        plans = [
            plan_step(b, replicas=7, capacity=capacity, fillers=True)
            for b in (batch, batch.select(rng.permutation(5)))
        ]
        assert plans[0].objective == plans[1].objective
        assert len(plans[0].counted) == len(plans[1].counted)


def test_the_refusal_names_the_option_only_where_it_helps() -> None:
    batch = batch_of([[1, 2], [9, 8, 7, 6], [3]])
    with pytest.raises(PlanError, match=r"3 trajectories cannot fill 4 .*fillers=True.*--fillers"):
        plan_step(batch, replicas=4, capacity=10)
    for fill, reason in ((False, "cannot fill 4"), (True, "has 4 tokens")):
        with pytest.raises(PlanError, match=reason) as error:
            plan_step(batch, replicas=4, capacity=3, fillers=fill)
        assert "fillers" not in str(error.value)
        with pytest.raises(PlanError, match="replicas=0"):
            plan_step(batch, replicas=0, capacity=10, fillers=fill)


# A step with fillers against the same step without


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    batch: TrajectoryBatch
    filled: StepPlan
    policy: TreePolicy
    plain: StepOutcome
    plain_gradients: dict[str, torch.Tensor]

    def run(self, plan: StepPlan) -> tuple[StepOutcome, dict[str, torch.Tensor]]:
        self.policy.zero_grad()
        targets = prepare_step(self.batch, GRPO())
        with float64_everywhere():
            outcome = run_step(self.policy, self.batch, plan, targets, GRPO(), ROUTER)
        return outcome, gradients(self.policy.model)

    def differences(self, plan: StepPlan) -> list[Comparison]:
        outcome, found = self.run(plan)
        return [
            *compare_outcomes(outcome, self.plain, label="filled", bound=1e-12),
            compare_gradients(found, self.plain_gradients, label="filled", bound=1e-12),
        ]


def rollouts() -> TrajectoryBatch:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCABULARY, 70).tolist()
    tails = [rng.integers(0, VOCABULARY, n).tolist() for n in (9, 3, 60)]
    tokens = [trunk + tail for tail in tails] + [rng.integers(0, VOCABULARY, 12).tolist()]
    return batch_of(tokens, rewards=rng.normal(size=4), tree_ids=["a", "a", "b", "b"])


@pytest.fixture(scope="module")
def step() -> Step:
    torch.manual_seed(0)
    batch = rollouts()
    filled = plan_step(batch, replicas=6, capacity=200, fillers=True)
    assert 0 < len(filled.counted) < len(filled.microbatches) == 6
    with float64_everywhere():
        policy = prepare(small_model(VOCABULARY).double().train())
    made = Step(batch=batch, filled=filled, policy=policy, plain=None, plain_gradients={})
    outcome, found = made.run(without_fillers(filled))
    return dataclasses.replace(made, plain=outcome, plain_gradients=found)


def without_fillers(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, microbatches=plan.counted)


def failures(rows: list[Comparison]) -> set[str]:
    return {row.name.split(":")[1].split(" of ")[0].strip() for row in rows if not row.passed}


def test_fillers_change_no_gradient_loss_router_loss_or_count(step: Step) -> None:
    rows = step.differences(step.filled)
    assert failures(rows) == set()
    assert {"filled: loss", "filled: z loss", "filled: load balancing loss"} <= {
        row.name for row in rows
    }
    assert "filled: expert counts" in {row.name for row in rows}


def test_a_filled_step_equals_each_trajectory_alone(step: Step) -> None:
    torch.manual_seed(0)
    with float64_everywhere():
        model = small_model(VOCABULARY).double().train()
        targets = prepare_step(step.batch, GRPO())
        truth = run_alone(model, FAMILY, step.batch, step.filled, targets, GRPO(), ROUTER)
    outcome, found = step.run(step.filled)
    rows = compare_outcomes(outcome, truth, label="compact", bound=1e-9)
    rows.append(compare_gradients(found, gradients(model), label="compact", bound=1e-9))
    assert failures(rows) == set()


def test_fillers_run_forward_and_backward(step: Step) -> None:
    """Their replica must join every collective operation, those of backward too."""
    forward, backward = [], []
    layer = step.policy.model.get_decoder().layers[0]
    hooks = [
        layer.register_forward_hook(lambda *_: forward.append(1)),
        layer.register_full_backward_hook(lambda *_: backward.append(1)),
    ]
    done: list[bool] = []
    try:
        run_step(
            step.policy,
            step.batch,
            step.filled,
            prepare_step(step.batch, GRPO()),
            GRPO(),
            ROUTER,
            on_microbatch=lambda m: done.append(m.filler),
        )
    finally:
        for hook in hooks:
            hook.remove()
    assert len(forward) == len(backward) == len(step.filled.microbatches)
    assert done == [m.filler for m in step.filled.microbatches]


def unmarked(plan: StepPlan) -> StepPlan:
    microbatches = [dataclasses.replace(m, filler=False) for m in plan.microbatches]
    return dataclasses.replace(plan, microbatches=tuple(microbatches))


def test_mutation_a_filler_that_counts_is_caught(step: Step) -> None:
    found = failures(step.differences(unmarked(step.filled)))
    assert {"policy loss", "z loss", "expert counts", "every gradient"} <= found


def only_logprobs(output: PolicyOutput) -> torch.Tensor:
    return 1e-6 * output.logprobs.sum()


def only_router(output: PolicyOutput) -> torch.Tensor:
    return 1e-6 * output.router[0].z_sum


@pytest.mark.parametrize("loss", [only_logprobs, only_router])
def test_mutation_a_filler_with_a_small_weight_is_caught(
    step: Step, monkeypatch: pytest.MonkeyPatch, loss: Callable[[PolicyOutput], torch.Tensor]
) -> None:
    monkeypatch.setattr(step_module, "filler_loss", loss)
    assert failures(step.differences(step.filled)) == {"every gradient"}


def test_mutation_router_losses_averaged_over_fillers_too_are_caught(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = step_module.microbatch_loss

    def over_all(*args: Any, scale: step_module.StepScale, **rest: Any) -> object:
        one_more = dataclasses.replace(scale, microbatches=scale.microbatches + 1)
        return right(*args, scale=one_more, **rest)

    monkeypatch.setattr(step_module, "microbatch_loss", over_all)
    assert {"loss", "every gradient"} <= failures(step.differences(step.filled))


def test_the_weight_of_a_filler_is_zero(step: Step) -> None:
    assert step_module.FILLER_WEIGHT == 0.0
    policy = copy.deepcopy(step.policy)
    policy.zero_grad()
    none_counted = [dataclasses.replace(m, filler=True) for m in step.filled.microbatches]
    for microbatch in none_counted:
        output = policy(step_module.build_layout(step.batch, microbatch.forest, microbatch.calls))
        torch.autograd.backward(step_module.filler_loss(output))
    assert all(not p.grad.any() for p in policy.parameters() if p.grad is not None)
    assert sum(p.grad is not None for p in policy.parameters()) > 20
