"""The second half of ``harts fidelity``: losses and gradients of a step (paper, Table 5).

Trajectory-wise (A) is the reference, as in `harts.bench.replay`; the same packed to another
capacity (B) says how much rounding alone changes. Log-probs are also held against a float32 run of
the same weights.

Shapes: P semantic log-prob positions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harts.bench.replay import REFERENCE, REPLAY, RERUN, pinned_to, plans_of
from harts.layout import build_layout
from harts.models import TreePolicy
from harts.objectives import GRPO, StepTargets, prepare_step
from harts.planning.step import StepPlan, plan_step
from harts.training.step import RouterLosses, StepTotals, run_step
from harts.trajectories import TrajectoryBatch

Progress = Callable[[str], None]
_PIECE = 1 << 26
"""Numbers of a gradient that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """A GRPO step of one execution against baseline A's."""

    name: str
    recompute: bool
    """Whether it recomputed every layer in backward; baseline A did not."""
    loss: float
    """|difference| of the loss."""
    off_policy_loss: float
    """The same, with baseline A's log-probs as those of the policy that sampled."""
    gradient: float | None
    """Norm of the difference over the norm, of all gradients as one vector; None if all are zero,
    as they are where the rewards within each tree are equal."""
    gradient_cosine: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Losses, gradients and log-probs of whole steps."""

    steps: tuple[StepErrors, ...]
    logprob_error: dict[str, float]
    """Of each execution, mean |difference| from a float32 run, in nats; empty in float32."""


def compare_steps(
    policy: TreePolicy,
    batch: TrajectoryBatch,
    *,
    capacity: int,
    experts: Sequence[Tensor] | None = None,
    progress: Progress,
) -> StepReport:
    """Run GRPO steps both ways, with recomputation and without. Leaves the model in float32.

    Args:
        policy: the prepared model, on any device.
        batch: the trajectories.
        capacity: T of baseline A and of the compact executions.
        experts: of `reference_experts`, for all executions and the float32 run; each chooses its
            own where None.
        progress: told what runs.
    """
    with pinned_to(policy, batch, experts):
        return _compare_steps(policy, batch, capacity, progress)


def _compare_steps(
    policy: TreePolicy, batch: TrajectoryBatch, capacity: int, progress: Progress
) -> StepReport:
    plans = plans_of(batch, capacity)
    before = {}
    for name, plan in plans.items():
        progress(f"log-probs, {name}")
        before[name] = _logprobs(policy, batch, plan)
    progress(f"step, {REFERENCE}")
    on = dataclasses.replace(prepare_step(batch, GRPO()), old_logprobs=None)
    off = dataclasses.replace(on, old_logprobs=before[REFERENCE])
    policy.set_recomputation("none")
    reference = _Step.run(policy, batch, plans[REFERENCE], on, off)
    steps = []
    for name in (RERUN, REPLAY):
        for recompute in (False, True):
            progress(f"step, {name}, {'with' if recompute else 'without'} recomputation")
            policy.set_recomputation("full" if recompute else "none")
            found = _Step.run(policy, batch, plans[name], on, off)
            steps.append(_errors(name, recompute, found, reference))
            del found
    policy.zero_grad()
    return StepReport(steps=tuple(steps), logprob_error=_against_float32(policy, batch, before))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    loss: float
    off_policy_loss: float
    gradients: list[Tensor]

    @classmethod
    def run(
        cls,
        policy: TreePolicy,
        batch: TrajectoryBatch,
        plan: StepPlan,
        on: StepTargets,
        off: StepTargets,
    ) -> "_Step":
        losses = []
        for targets in (off, on):
            policy.zero_grad()
            outcome = run_step(policy, batch, plan, targets, GRPO(), RouterLosses())
            losses.append(outcome.policy_loss)
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        policy.zero_grad()
        return cls(loss=losses[1], off_policy_loss=losses[0], gradients=gradients)


def _errors(name: str, recompute: bool, found: _Step, reference: _Step) -> StepErrors:
    sums = torch.zeros(4, dtype=torch.float64)
    for ours, theirs in zip(found.gradients, reference.gradients, strict=True):
        for a, b in zip(*(torch.split(x.flatten(), _PIECE) for x in (ours, theirs)), strict=True):
            x, y = a.float(), b.float()
            parts = ((x - y).square().sum(), y.square().sum(), x.square().sum(), torch.dot(x, y))
            sums += torch.stack([p.double().cpu() for p in parts])
    difference, square, other, product = sums.tolist()
    return StepErrors(
        name=name,
        recompute=recompute,
        loss=abs(found.loss - reference.loss),
        off_policy_loss=abs(found.off_policy_loss - reference.off_policy_loss),
        gradient=_ratio(difference**0.5, square**0.5),
        gradient_cosine=_ratio(product, (square * other) ** 0.5),
    )


def _ratio(value: float, size: float) -> float | None:
    return value / size if size else None


def _against_float32(
    policy: TreePolicy, batch: TrajectoryBatch, found: Mapping[str, Tensor]
) -> dict[str, float]:
    if next(policy.parameters()).dtype == torch.float32:
        return {}
    policy.model.float()
    # Every trajectory alone in a microbatch of its own length: nothing is shared or replayed.
    alone = plan_step(batch, replicas=1, capacity=int(batch.lengths.max()), share=False)
    truth = _logprobs(policy, batch, alone)
    return {name: float((x - truth).abs().mean()) for name, x in found.items()}


@torch.no_grad()
def _logprobs(policy: TreePolicy, batch: TrajectoryBatch, plan: StepPlan) -> Tensor:
    """[P] float64 log-probs in the order of the batch."""
    total = StepTotals(batch, len(plan.counted))
    for microbatch in plan.microbatches:
        layout = build_layout(batch, microbatch.forest, microbatch.calls)
        total.add_logprobs(layout.members.tolist(), policy(layout).logprobs.double())
    return total.outcome().logprobs
