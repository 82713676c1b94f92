"""``harts fidelity``, whole steps: near where they should be, and far where states are wrong."""

from typing import Any

import pytest
import torch

from harts.bench import step_fidelity
from harts.bench.replay import (
    NO_REPLAY,
    REFERENCE,
    REPLAY,
    RERUN,
    measure_replay,
    plans_of,
    reference_experts,
)
from harts.bench.step_fidelity import StepReport, compare_steps
from harts.bench.step_fidelity import _Step as Gradients
from harts.models import prepare
from harts.models.families import family_named
from tests.forests import batch_of, hard_tree

VOCABULARY = 50


def measured(dtype: torch.dtype) -> StepReport:
    torch.manual_seed(0)
    model = family_named("bailing_hybrid").small_model(VOCABULARY).to(dtype)
    return compare_steps(
        prepare(model), hard_tree(VOCABULARY), capacity=700, progress=lambda _: None
    )


def test_in_float32_a_compact_step_is_the_trajectory_wise_one() -> None:
    report = measured(torch.float32)
    assert report.logprob_error == {}
    assert [(s.name, s.recompute) for s in report.steps] == [
        (name, recompute) for name in (RERUN, REPLAY) for recompute in (False, True)
    ]
    for step in report.steps:
        assert step.loss < 1e-8
        assert step.off_policy_loss < 1e-6
        assert step.gradient < 1e-4
        assert step.gradient_cosine == pytest.approx(1, abs=1e-7)


def test_whole_steps_run_with_the_experts_they_are_given() -> None:
    """In forward, in recomputation, and in the float32 run."""
    torch.manual_seed(0)
    policy = prepare(family_named("bailing_hybrid").small_model(VOCABULARY).bfloat16())
    batch = hard_tree(VOCABULARY)
    seen: list[torch.Tensor] = []
    routers = policy.family.routers(policy.model)
    for router in routers:
        router.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    same = torch.arange(policy.top_k).expand(batch.raw_tokens, -1)
    experts = [same for _ in routers]
    compare_steps(policy, batch, capacity=700, experts=experts, progress=lambda _: None)
    assert len(seen) > 20
    for selected in seen:
        assert torch.equal(selected, same[:1].expand_as(selected))


def test_a_dense_model_has_no_experts_to_give() -> None:
    policy = prepare(family_named("qwen3").small_model(VOCABULARY))
    settings: Any = {"capacity": 700, "progress": lambda _: None}
    batch = hard_tree(VOCABULARY)
    experts = reference_experts(policy, batch, **settings)
    assert experts == []
    report = measure_replay(policy, batch, experts=experts, **settings)
    assert all(row.nll_difference[REPLAY] < 1e-4 for row in report.depths)


def test_differences_are_of_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_fidelity, "_PIECE", 2)
    a, b = torch.tensor([3.0, 0.0, 4.0]), torch.zeros(2, 2)
    reference = Gradients(loss=1.0, off_policy_loss=2.0, gradients=[a, b])
    other = Gradients(loss=1.5, off_policy_loss=2.0, gradients=[a, b + 2.5])
    found = step_fidelity._errors("other", False, other, reference)
    assert (found.loss, found.off_policy_loss) == (0.5, 0.0)
    assert found.gradient == pytest.approx(1.0)
    assert found.gradient_cosine == pytest.approx(0.5**0.5)


def test_in_bfloat16_log_probs_are_held_against_float32() -> None:
    report = measured(torch.bfloat16)
    errors = report.logprob_error
    assert set(errors) == {REFERENCE, RERUN, REPLAY, NO_REPLAY}
    assert 1e-3 < errors[REPLAY] < 1.1 * errors[REFERENCE]


def test_baseline_b_is_always_packed_in_another_way() -> None:
    batch = batch_of([list(range(60)), list(range(30, 90)), list(range(50, 80))])
    for capacity in (60, 120, 200):
        plans = plans_of(batch, capacity)
        members = {
            name: sorted(tuple(m.members.tolist()) for m in plans[name].microbatches)
            for name in (REFERENCE, RERUN)
        }
        assert members[REFERENCE] != members[RERUN], capacity
