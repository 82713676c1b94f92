"""A run against trajectory-wise training: step time side by side, and the numbers in float64.

Shapes: S semantic positions · P semantic log-prob positions.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from harts.errors import InputError
from harts.excerpts import bounded_excerpt
from harts.fidelity import float64_everywhere, gradients, relative_error, run_alone
from harts.models import TreePolicy, prepare
from harts.models.families import family_of
from harts.objectives import PolicyObjective, StepTargets, prepare_step
from harts.planning.step import StepPlan
from harts.training.model import plain_copy
from harts.training.step import RouterLosses, StepOutcome, run_step
from harts.trajectories import TrajectoryBatch

FIDELITY_BOUND = 1e-9
"""Differences that rounding in float64 explains; past it, compact execution is at fault."""
Planning = Callable[[TrajectoryBatch, bool], StepPlan]
"""Plans a batch; the flag says whether trajectories share tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig:
    """What is compared with trajectory-wise training when a run ends."""

    enabled: bool = True
    repeats: int = 3
    """Timed steps of each kind, in turns; the medians are reported."""
    tokens: int = 3000
    """Tokens of the excerpt whose log-probs and gradients are compared in float64."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InputError(f"repeats must be at least 1, got {self.repeats}")
        if self.tokens < 2:
            raise InputError(f"tokens must be at least 2, got {self.tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Forward and backward of one step in both ways, through the same code."""

    shared_s: float
    trajectory_wise_s: float
    shared_plan: StepPlan
    trajectory_wise_plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Largest differences between compact execution and each trajectory alone, in float64."""

    logprob: float
    """Largest absolute difference of a log-prob, in nats."""
    gradient: float
    """Largest difference of a gradient entry, over its parameter's largest entry."""
    parameters: int
    trajectories: int
    tokens: int
    compact_tokens: int

    @property
    def passed(self) -> bool:
        """Whether both differences are within `FIDELITY_BOUND`; NaN is not."""
        return self.logprob <= FIDELITY_BOUND and self.gradient <= FIDELITY_BOUND


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedStep:
    """A step as both ways run it."""

    batch: TrajectoryBatch
    objective: PolicyObjective
    router: RouterLosses
    plan: Planning


def time_step(
    policy: TreePolicy, step: ComparedStep, repeats: int, progress: Callable[[str], None]
) -> StepTimes:
    """Time forward and backward of a step, shared and trajectory-wise in turns.

    Planning and the optimiser are left out: the first is the same order of small on both sides,
    the second is the same. Gradients are cleared afterwards.
    """
    targets = prepare_step(step.batch, step.objective)
    plans = [step.plan(step.batch, share) for share in (True, False)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        for plan, spent in zip(plans, seconds, strict=True):
            progress(f"timing the step in both ways, {repeat + 1} of {repeats}")
            policy.zero_grad()
            _finish_kernels(policy)
            began = time.perf_counter()
            run_step(policy, step.batch, plan, targets, step.objective, step.router)
            _finish_kernels(policy)
            spent.append(time.perf_counter() - began)
    policy.zero_grad()
    shared, alone = (statistics.median(s) for s in seconds)
    return StepTimes(
        shared_s=shared,
        trajectory_wise_s=alone,
        shared_plan=plans[0],
        trajectory_wise_plan=plans[1],
    )


def measure_fidelity(
    model: PreTrainedModel, step: ComparedStep, tokens: int, progress: Callable[[str], None]
) -> Fidelity:
    """Compare an excerpt of a step in float64 with each trajectory alone in the library's model.

    The weights are the run's, copied; the run's own model and gradients stay as they are. The
    truth is computed on the CPU, compact execution on the device of the run, in the PyTorch forms
    that take float64.
    """
    sample = _with_advantages(bounded_excerpt(step.batch, tokens), step.objective)
    targets = prepare_step(sample, step.objective)
    plan = step.plan(sample, True)
    with float64_everywhere():
        truth_model, compact_model = plain_copy(model), plain_copy(model).to(model.device)
        progress(f"float64: each of {len(sample)} trajectories alone")
        truth = run_alone(
            truth_model, family_of(model), sample, plan, targets, step.objective, step.router
        )
        progress("float64: shared")
        compact = run_step(
            prepare(compact_model), sample, plan, targets, step.objective, step.router
        )
    true_gradients, compact_gradients = gradients(truth_model), gradients(compact_model)
    errors = [relative_error(compact_gradients[n].cpu(), t) for n, t in true_gradients.items()]
    return Fidelity(
        logprob=_largest_difference(compact, truth),
        gradient=float(np.max(errors)),  # unlike max, this keeps a NaN
        parameters=len(true_gradients),
        trajectories=len(sample),
        tokens=sample.raw_tokens,
        compact_tokens=plan.objective.total_work,
    )


def _finish_kernels(policy: TreePolicy) -> None:
    """Wait for what a GPU was told to do; the CPU does it at once."""
    if policy.model.device.type == "cuda":
        torch.cuda.synchronize()


def _largest_difference(compact: StepOutcome, truth: StepOutcome) -> float:
    return float((compact.logprobs - truth.logprobs).abs().max())


def _with_advantages(sample: TrajectoryBatch, objective: PolicyObjective) -> TrajectoryBatch:
    """The excerpt; where it has no advantage but 0, some are drawn, so that gradients are not 0."""
    targets: StepTargets | None
    try:
        targets = prepare_step(sample, objective)
    except InputError:
        targets = None
    if targets is not None and bool(torch.any(targets.advantages != 0)):
        return sample
    drawn = np.random.default_rng(0).normal(size=sample.raw_tokens).astype(np.float32)
    return dataclasses.replace(
        sample, advantages=drawn, loss_mask=np.ones(sample.raw_tokens, np.bool_)
    )
