"""Gradients of one optimisation step: every microbatch of a plan through a policy.

Shapes: S semantic positions · N trajectories · P = S - N log-prob positions · E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from harts.errors import InputError
from harts.layout import CompactLayout, build_layout
from harts.models import PolicyOutput, TreePolicy
from harts.objectives import ObjectiveOutput, PolicyObjective, StepTargets
from harts.ops.router import RouterStatistics, load_balancing_loss, z_loss
from harts.planning.step import Microbatch, StepPlan
from harts.trajectories import TrajectoryBatch

BalancingForm = Literal["microbatch", "sequence", "global"]
FILLER_WEIGHT = 0.0
"""What the log-probs of a filler microbatch weigh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """Coefficients of the MoE router losses.

    By the convention of training engines the z-loss is a mean over a microbatch, averaged over the
    step's microbatches, fillers aside; so, unlike the policy loss, it depends on the plan.
    """

    z_coefficient: float = 0.0
    load_balancing_coefficient: float = 0.0
    load_balancing: BalancingForm = "microbatch"
    """Over which tokens assignments and probabilities are averaged before they are multiplied: a
    microbatch's, as with the z-loss; each trajectory's, then averaged over the trajectories of the
    step; or all of the step. No plan changes the latter two. The last runs every forward twice,
    since the assignments of the whole step must be known before the first backward."""

    def __post_init__(self) -> None:
        for name in ("z_coefficient", "load_balancing_coefficient"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.load_balancing not in get_args(BalancingForm):
            raise InputError(
                f"load_balancing must be one of {get_args(BalancingForm)}, got "
                f"{self.load_balancing!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepScale:
    """What the router losses of a step are averaged over; layers have numbers of the caller's."""

    microbatches: int
    """Over all replicas, fillers aside."""
    trajectories: int
    expert_counts: Mapping[int, Tensor] = field(default_factory=dict)
    """[E] assignments of the whole step by layer, where the balancing form needs them."""

    def balancing(
        self, form: BalancingForm, statistics: RouterStatistics, top_k: int, layer: int
    ) -> Tensor:
        """What one microbatch adds to the load-balancing loss of a layer, without coefficient."""
        if form == "sequence":
            assert statistics.sequence_losses is not None
            return statistics.sequence_losses / self.trajectories
        if form == "global":
            return load_balancing_loss(statistics, top_k, self.expert_counts[layer])
        return load_balancing_loss(statistics, top_k) / self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchLoss:
    """The scalars of one microbatch; its ``total`` is what backward starts from."""

    total: Tensor
    policy: ObjectiveOutput
    z_loss: Tensor
    """Mean over the MoE layers of what this microbatch adds to the step's loss, before its
    coefficient; 0 in a dense model."""
    load_balancing_loss: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutcome:
    """What one step measured; gradients are in the parameters."""

    loss: float
    policy_loss: float
    z_loss: float
    load_balancing_loss: float
    metrics: dict[str, float]
    logprobs: Tensor
    """[P] detached, in the order of the batch."""
    expert_counts: tuple[Tensor, ...]
    """[E] assignments of the whole step, one a MoE layer."""


def microbatch_loss(
    output: PolicyOutput,
    targets: StepTargets,
    objective: PolicyObjective,
    router: RouterLosses,
    *,
    top_k: int,
    scale: StepScale,
) -> MicrobatchLoss:
    """Policy loss of one microbatch and its share of the router losses.

    Args:
        output: log-probs [P] and router statistics of the microbatch.
        targets: the whole step's targets, selected for the microbatch's members.
        objective: GRPO, PPO or any other function of log-probs in original order.
        router: coefficients of the router losses.
        top_k: experts per token.
        scale: of the step.
    """
    policy = objective(output.logprobs, targets)
    zero = output.logprobs.new_zeros(())
    layers = max(len(output.router), 1)
    z = sum((z_loss(s) for s in output.router), zero) / (layers * scale.microbatches)
    form = router.load_balancing
    balances = (scale.balancing(form, s, top_k, i) for i, s in enumerate(output.router))
    balance = sum(balances, zero) / layers
    router_total = router.z_coefficient * z + router.load_balancing_coefficient * balance
    return MicrobatchLoss(
        total=policy.loss + router_total * layers,
        policy=policy,
        z_loss=z.detach(),
        load_balancing_loss=balance.detach(),
    )


def filler_loss(output: PolicyOutput) -> Tensor:
    """A loss of weight zero, whose backward still runs through every layer of the model.

    A filler repeats a trajectory that counts elsewhere, so it must add to no gradient, loss, router
    statistic or expert count; but its replica must join each collective operation of the others.
    """
    router = (s.mass.sum() + s.z_sum for s in output.router)
    return FILLER_WEIGHT * sum(router, output.logprobs.sum())


def run_step(
    policy: TreePolicy,
    batch: TrajectoryBatch,
    plan: StepPlan,
    targets: StepTargets,
    objective: PolicyObjective,
    router: RouterLosses,
    *,
    on_microbatch: Callable[[Microbatch], None] | None = None,
) -> StepOutcome:
    """Accumulate the gradients of a whole step, slot by slot, all replicas in this process.

    Fillers run forward and backward like the others, and leave nothing behind.

    Args:
        policy: the prepared model; gradients are added to its parameters.
        batch: the trajectories that ``plan`` was made for.
        plan: microbatches, slots and replicas.
        targets: ``prepare_step`` of the whole batch.
        objective: the policy objective.
        router: coefficients of the router losses.
        on_microbatch: called after each microbatch, for progress.
    """
    total = StepTotals(batch, len(plan.counted))
    if router.load_balancing == "global":
        counts = count_experts(policy, batch, plan.microbatches)
        total.set_expert_counts(dict(enumerate(counts)))
    for microbatch in plan.microbatches:
        run_microbatch(
            policy, batch, microbatch, targets, objective, router, total, top_k=policy.top_k
        )
        if on_microbatch is not None:
            on_microbatch(microbatch)
    return total.outcome()


@torch.no_grad()
def count_experts(
    policy: Callable[..., PolicyOutput], batch: TrajectoryBatch, microbatches: Sequence[Microbatch]
) -> tuple[Tensor, ...]:
    """[E] assignments of microbatches, one a MoE layer; fillers run, and count for nothing."""
    total = StepSums()
    for microbatch in microbatches:
        output = policy(build_layout(batch, microbatch.forest, microbatch.calls))
        if not microbatch.filler:
            total += StepSums(expert_counts=tuple(s.counts for s in output.router))
    return total.expert_counts


def run_microbatch(
    policy: Callable[..., PolicyOutput],
    batch: TrajectoryBatch,
    microbatch: Microbatch,
    targets: StepTargets,
    objective: PolicyObjective,
    router: RouterLosses,
    total: "StepTotals",
    *,
    top_k: int,
    scale: float = 1.0,
) -> None:
    """Forward and backward of one microbatch; what it measured goes into ``total``.

    ``scale`` multiplies the loss that backward starts from, and nothing else.
    """
    layout = build_layout(batch, microbatch.forest, microbatch.calls)
    output = policy(layout, sequence_losses=router.load_balancing == "sequence")
    if microbatch.filler:
        torch.autograd.backward(filler_loss(output))
        return
    loss = microbatch_loss(
        output,
        targets.select(layout.members),
        objective,
        router,
        top_k=top_k,
        scale=total.scale,
    )
    torch.autograd.backward(loss.total * scale)
    total.add(layout, output, loss)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSums:
    """Numbers of a step that are sums over its microbatches; ``+`` joins two parts of a step."""

    loss: float = 0.0
    policy_loss: float = 0.0
    z_loss: float = 0.0
    load_balancing_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    expert_counts: tuple[Tensor, ...] = ()
    """[E] one a MoE layer; empty before the first microbatch."""

    def __add__(self, other: "StepSums") -> "StepSums":
        counts = [s.expert_counts for s in (self, other) if s.expert_counts]
        return StepSums(
            loss=self.loss + other.loss,
            policy_loss=self.policy_loss + other.policy_loss,
            z_loss=self.z_loss + other.z_loss,
            load_balancing_loss=self.load_balancing_loss + other.load_balancing_loss,
            metrics={
                name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0)
                for name in {**self.metrics, **other.metrics}
            },
            expert_counts=tuple(sum(layer[1:], layer[0]) for layer in zip(*counts, strict=True)),
        )


class StepTotals:
    """Sums the outcomes of microbatches into the outcome of their step."""

    def __init__(self, batch: TrajectoryBatch, microbatches: int) -> None:
        self._offsets = batch.position_offsets
        self._logprobs: Tensor | None = None
        self.scale = StepScale(microbatches=microbatches, trajectories=len(batch))
        self.sums = StepSums()

    def set_expert_counts(self, counts: Mapping[int, Tensor]) -> None:
        """Tell the assignments [E] of the whole step, by layer, before its first loss."""
        self.scale = replace(self.scale, expert_counts=counts)

    def add(self, layout: CompactLayout, output: PolicyOutput, loss: MicrobatchLoss) -> None:
        """Add one microbatch; its log-probs go to their trajectories' places."""
        self.add_logprobs(layout.members.tolist(), output.logprobs)
        self.add_scalars(output.router, loss)

    def add_logprobs(self, members: Sequence[int], logprobs: Tensor) -> None:
        """Place the log-probs of whole trajectories, in the order of ``members``."""
        if self._logprobs is None:
            self._logprobs = self._no_logprobs(logprobs.dtype)
        taken = 0
        for member in members:
            first, last = (int(x) for x in self._offsets[member : member + 2])
            part = logprobs[taken : taken + last - first]
            self._logprobs[first:last] = part.detach().cpu()
            taken += last - first

    def add_scalars(self, router: Sequence[RouterStatistics], loss: MicrobatchLoss) -> None:
        """Add the losses, metrics and expert counts of one microbatch."""
        self.sums += StepSums(
            loss=float(loss.total.detach()),
            policy_loss=float(loss.policy.loss.detach()),
            z_loss=float(loss.z_loss),
            load_balancing_loss=float(loss.load_balancing_loss),
            metrics={name: float(value) for name, value in loss.policy.metrics.items()},
            expert_counts=tuple(s.counts for s in router),
        )

    def outcome(self) -> StepOutcome:
        """What has been added; log-probs of trajectories that have not are NaN."""
        logprobs = self._logprobs
        return StepOutcome(
            **{f.name: getattr(self.sums, f.name) for f in fields(StepSums)},
            logprobs=self._no_logprobs(torch.float32) if logprobs is None else logprobs,
        )

    def _no_logprobs(self, dtype: torch.dtype) -> Tensor:
        return torch.full((int(self._offsets[-1]),), torch.nan, dtype=dtype)
