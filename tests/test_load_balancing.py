"""The load-balancing loss over trajectories and over a step: each trajectory alone is the truth."""

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import harts.training.step as step_module
from harts.errors import InputError
from harts.fidelity import (
    compare_gradients,
    compare_outcomes,
    float64_everywhere,
    gradients,
    run_alone,
)
from harts.models import prepare
from harts.models.families import family_named
from harts.objectives import GRPO, prepare_step
from harts.ops.router import TrajectoryRows, router_statistics
from harts.planning.step import plan_step
from harts.training.step import BalancingForm, RouterLosses, StepOutcome, run_step
from tests.forests import batch_of, lay_out

VOCABULARY = 40
BOUND = 1e-9
Found = tuple[StepOutcome, dict[str, torch.Tensor]]
FORMS: list[BalancingForm] = ["sequence", "global"]
SCORES = {"softmax": "qwen3_next", "sigmoid": "bailing_hybrid"}
CAPACITIES = (1 << 20, 150)


def losses(form: BalancingForm) -> RouterLosses:
    return RouterLosses(z_coefficient=0.0, load_balancing_coefficient=0.5, load_balancing=form)


def trajectories() -> Any:
    """Forks, a repeated trajectory, a strict prefix, one token, and no shared first token."""
    rng = np.random.default_rng(3)
    trunk, side, own = (rng.integers(0, VOCABULARY, n) for n in (70, 30, 40))
    paths = [
        np.concatenate([trunk, own]),
        np.concatenate([trunk, side]),
        np.concatenate([trunk, side]),
        np.concatenate([trunk[:50], own]),
        trunk[:60],
        np.concatenate([trunk, side, own[:7]]),
        (trunk[:1] + 1) % VOCABULARY,
        np.concatenate([(trunk[:1] + 1) % VOCABULARY, own]),
    ]
    return batch_of([p.tolist() for p in paths], rewards=np.arange(len(paths), dtype=np.float64))


class Step:
    """One family's step: compact, and each trajectory alone."""

    def __init__(self, model_type: str) -> None:
        torch.manual_seed(0)
        self.family = family_named(model_type)
        with float64_everywhere():
            self.model = self.family.small_model(VOCABULARY).double().train()
            self.policy = prepare(copy.deepcopy(self.model))
        self.batch = trajectories()
        self.targets = prepare_step(self.batch, GRPO())

    def run(self, form: BalancingForm, capacity: int) -> Found:
        self.policy.zero_grad()
        with float64_everywhere():
            outcome = run_step(self.policy, *self._arguments(form, capacity))
        return outcome, gradients(self.policy.model)

    @cache  # noqa: B019
    def truth(self, form: BalancingForm) -> Found:
        self.model.zero_grad()
        with float64_everywhere():
            outcome = run_alone(self.model, self.family, *self._arguments(form, CAPACITIES[1]))
        return outcome, gradients(self.model)

    def _arguments(self, form: BalancingForm, capacity: int) -> Any:
        plan = plan_step(self.batch, replicas=1, capacity=capacity)
        assert (len(plan.counted) > 1) == (capacity < 1000)
        return self.batch, plan, self.targets, GRPO(), losses(form)


@pytest.fixture(scope="module", params=SCORES)
def step(request: pytest.FixtureRequest) -> Step:
    return Step(SCORES[request.param])


def differences(left: Any, right: Any) -> list[str]:
    rows = [
        *compare_outcomes(left[0], right[0], label="", bound=BOUND),
        compare_gradients(left[1], right[1], label="", bound=BOUND),
    ]
    # The z-loss is of a microbatch in every form.
    return [row.name for row in rows if not row.passed and "z loss" not in row.name]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_equals_each_trajectory_alone(step: Step, form: BalancingForm) -> None:
    assert differences(step.run(form, CAPACITIES[1]), step.truth(form)) == []


@pytest.mark.parametrize("form", FORMS)
def test_no_plan_changes_these_forms(step: Step, form: BalancingForm) -> None:
    whole, cut = (step.run(form, capacity) for capacity in CAPACITIES)
    assert differences(whole, cut) == []


def test_a_plan_changes_the_microbatch_form(step: Step) -> None:
    whole, cut = (step.run("microbatch", capacity) for capacity in CAPACITIES)
    assert any("load balancing" in name for name in differences(whole, cut))


def test_in_one_microbatch_the_global_form_is_that_of_the_microbatch(step: Step) -> None:
    whole, same = (step.run(form, CAPACITIES[0]) for form in ("global", "microbatch"))
    assert differences(whole, same) == []


def test_the_forms_differ(step: Step) -> None:
    found = {form: step.run(form, CAPACITIES[0])[0].load_balancing_loss for form in FORMS}
    assert abs(found["sequence"] - found["global"]) > 1e-3


def test_mutation_counts_of_one_microbatch_for_those_of_the_step_are_caught(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = step_module.count_experts
    monkeypatch.setattr(step_module, "count_experts", lambda p, b, m: right(p, b, m[:1]))
    found = differences(step.run("global", CAPACITIES[1]), step.truth("global"))
    assert any("gradient" in name for name in found)


Change = Callable[[TrajectoryRows], TrajectoryRows]
MISTAKES: dict[str, Change] = {
    "a repeated trajectory counts once": lambda rows: dataclasses.replace(
        rows, passes=rows.passes * (rows.passes.cumsum(0) <= 1)
    ),
    "a length too long": lambda rows: dataclasses.replace(rows, lengths=rows.lengths + 1),
    "rows in the run before theirs": lambda rows: dataclasses.replace(
        rows, runs=(rows.runs - 1).clamp(min=0)
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mutation_of_the_runs_is_caught(
    step: Step, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    truth = step.truth("sequence")
    right = TrajectoryRows.from_layout
    monkeypatch.setattr(TrajectoryRows, "from_layout", lambda *args: MISTAKES[name](right(*args)))
    found = differences(step.run("sequence", CAPACITIES[1]), truth)
    assert any("gradient" in name for name in found)


def test_runs_say_which_trajectories_pass_every_row() -> None:
    _, _, layout = lay_out(trajectories(), chunk_size=64, row_multiple=7)
    rows = TrajectoryRows.from_layout(layout)
    assert layout.rows > layout.compact_rows
    assert (rows.runs[layout.compact_rows :] == rows.passes.shape[1]).all()
    padded = torch.cat([rows.passes, torch.zeros(len(rows.passes), 1).double()], 1)
    passes_row = padded[:, rows.runs]
    for i, path in enumerate(np.split(layout.member_rows, layout.member_offsets[1:-1])):
        assert passes_row[i].nonzero()[:, 0].tolist() == sorted(path.tolist())
        assert rows.lengths[i] == len(path)


def test_rows_on_several_ranks_add_up_and_padding_may_hold_anything() -> None:
    _, _, layout = lay_out(trajectories(), chunk_size=64, row_multiple=7)
    torch.manual_seed(1)
    logits = torch.randn(layout.rows, 6, dtype=torch.float64)
    selected = logits.topk(2).indices
    logits[layout.compact_rows :] = torch.nan
    selected[layout.compact_rows :] = -1
    rows, q = TrajectoryRows.from_layout(layout), torch.from_numpy(layout.multiplicity)
    counts: list[torch.Tensor] = []

    def keep(own: torch.Tensor) -> torch.Tensor:
        counts.append(own)
        return own

    def part(cut: slice, over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        own = dataclasses.replace(rows, runs=rows.runs[cut])
        found = router_statistics(
            logits[cut], selected[cut], q[cut], trajectories=own, over_ranks=over_ranks
        )
        return found.sequence_losses

    halves = [slice(0, 64), slice(64, None)]
    whole = part(slice(None), lambda own: own)
    for cut in halves:
        part(cut, keep)
    summed = sum(part(cut, lambda _own: counts[0] + counts[1]) for cut in halves)
    assert whole.isfinite()
    assert abs(float(summed - whole)) < 1e-12 * float(whole)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match=r"one of .*'global'.*got 'step'"):
        losses("step")  # type: ignore[arg-type]
