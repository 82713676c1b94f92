"""Compact execution against its truth: each trajectory alone through the library's own forward.

Shapes: P semantic log-prob positions · A vocabulary · E experts · L MoE layers.

The truth never packs trajectories and never touches a HARTS operator, so the two sides share
nothing but the weights and the objective. In ``float64_everywhere`` they agree to rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from harts.models import PolicyOutput
from harts.models.families import ModelFamily
from harts.models.own_forms import OwnForms
from harts.objectives import PolicyObjective, StepTargets
from harts.ops.router import RouterStatistics, load_balancing_loss, router_statistics
from harts.planning.step import StepPlan
from harts.training.step import RouterLosses, StepOutcome, StepTotals, microbatch_loss
from harts.trajectories import TrajectoryBatch


class _Float64Mode(TorchFunctionMode):
    """Reads every request for float32 as one for float64.

    Library classes cast to float32 inside norms, gates, routers and rotary embeddings; a truth
    run must not lose digits there.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wide, **named)


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """A scope in which casts to float32 keep float64.

    Torch leaves such a scope in backward, where only a checkpointed layer would need it: give it
    to ``TreePolicy.set_recomputation`` as well.
    """
    with _Float64Mode():
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row of a fidelity table."""

    name: str
    error: float
    """Largest absolute difference over the largest absolute truth."""
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN is not."""
        return self.error <= self.bound


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest |value - truth| over largest |truth|; a zero truth must be met exactly."""
    if truth.numel() == 0:
        return 0.0
    difference = float((value.double() - truth.double()).abs().max())
    scale = float(truth.double().abs().max())
    return difference if difference == 0.0 or scale == 0.0 else difference / scale


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient; zeros where none arrived."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def run_alone(
    model: PreTrainedModel,
    family: ModelFamily,
    batch: TrajectoryBatch,
    plan: StepPlan,
    targets: StepTargets,
    objective: PolicyObjective,
    router: RouterLosses,
) -> StepOutcome:
    """Accumulate a step's gradients with every trajectory in a forward of its own.

    The losses couple trajectories only through log-probs and summed router statistics. So each
    trajectory runs once for these numbers, the loss gives their gradients, and each runs once
    more to push those into the parameters: one trajectory's graph lives at a time.

    Args:
        model: a library model that is not prepared.
        family: its family, for the router.
        batch: the step's trajectories.
        plan: names the microbatches over which router statistics are summed.
        targets: ``prepare_step`` of the whole batch.
        objective: the policy objective.
        router: coefficients of the router losses.
    """
    routers = family.routers(model)
    top_k = routers[0].top_k if routers else 0
    alone = _Alone(model, family, routers)
    counted = plan.counted
    totals = StepTotals(batch, len(counted))
    if router.load_balancing == "global":
        totals.set_expert_counts(_counts_alone(alone, batch))
    for microbatch in counted:
        members = microbatch.members.tolist()
        tokens = [_tokens(batch, row) for row in members]
        with torch.no_grad():
            outputs = [alone(t) for t in tokens]
        summed = _leaf(_sum_outputs(outputs))
        loss = microbatch_loss(
            summed,
            targets.select(microbatch.members),
            objective,
            router,
            top_k=top_k,
            scale=totals.scale,
        )
        torch.autograd.backward(loss.total)
        _push_back(alone, tokens, summed)
        totals.add_logprobs(members, summed.logprobs)
        totals.add_scalars(summed.router, loss)
    return totals.outcome()


def logprobs_alone(model: PreTrainedModel, family: ModelFamily, batch: TrajectoryBatch) -> Tensor:
    """[P] log-probs of the batch, one trajectory a forward, without a graph."""
    alone = _Alone(model, family, [])
    with torch.no_grad():
        return torch.cat([alone(_tokens(batch, row)).logprobs for row in range(len(batch))])


def _counts_alone(alone: "_Alone", batch: TrajectoryBatch) -> dict[int, Tensor]:
    """[E] assignments over all trajectories, by MoE layer."""
    with torch.no_grad():
        outputs = [alone(_tokens(batch, row)) for row in range(len(batch))]
    return {i: s.counts for i, s in enumerate(_sum_outputs(outputs).router)}


class _Alone:
    """The library's forward of one trajectory, [n] tokens, in the terms of a policy output."""

    def __init__(
        self, model: PreTrainedModel, family: ModelFamily, routers: Sequence[nn.Module]
    ) -> None:
        self._model = model
        self._family = family
        self._routers = routers
        self._own_forms = OwnForms(model)

    def __call__(self, tokens: Tensor) -> PolicyOutput:
        recorded: list[tuple[Tensor, Tensor]] = []

        def record(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
            recorded.append((output[0], output[2]))

        hooks = [r.register_forward_hook(record) for r in self._routers]
        try:
            with self._own_forms():
                logits = self._model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        predicted = torch.log_softmax(logits[:-1], dim=-1)
        return PolicyOutput(
            logprobs=predicted.gather(1, tokens[1:].unsqueeze(1)).squeeze(1),
            router=tuple(self._statistics(*pair) for pair in recorded),
        )

    def _statistics(self, logits: Tensor, selected: Tensor) -> RouterStatistics:
        once = torch.ones(len(logits), dtype=torch.int64, device=logits.device)
        found = router_statistics(logits, selected, once, self._family.router_score)
        own = load_balancing_loss(found, selected.shape[1])
        return replace(found, sequence_losses=own)


def _tokens(batch: TrajectoryBatch, row: int) -> Tensor:
    first, last = batch.offsets[row], batch.offsets[row + 1]
    return torch.from_numpy(batch.tokens[first:last].astype("int64"))


def _sum_outputs(outputs: Sequence[PolicyOutput]) -> PolicyOutput:
    """Log-probs laid end to end, router statistics summed before any product."""
    layers = zip(*(o.router for o in outputs), strict=True)
    return PolicyOutput(
        logprobs=torch.cat([o.logprobs for o in outputs]),
        router=tuple(_sum(layer) for layer in layers),
    )


def _sum(statistics: Sequence[RouterStatistics]) -> RouterStatistics:
    total = statistics[0]
    for more in statistics[1:]:
        total = total + more
    return total


def _leaf(output: PolicyOutput) -> PolicyOutput:
    return PolicyOutput(
        logprobs=output.logprobs.requires_grad_(),
        router=tuple(
            RouterStatistics(
                mass=s.mass.requires_grad_(),
                counts=s.counts,
                z_sum=s.z_sum.requires_grad_(),
                tokens=s.tokens,
                sequence_losses=_sequence_losses(s).requires_grad_(),
            )
            for s in output.router
        ),
    )


def _push_back(alone: _Alone, tokens: Sequence[Tensor], summed: PolicyOutput) -> None:
    """Run every trajectory again and start its backward from the gradients of the sums."""
    lengths = [len(t) - 1 for t in tokens]
    parts = torch.split(_gradient(summed.logprobs), lengths)
    for trajectory, part in zip(tokens, parts, strict=True):
        output = alone(trajectory)
        outputs = [output.logprobs]
        starts = [part]
        for own, total in zip(output.router, summed.router, strict=True):
            outputs += [own.mass, own.z_sum, _sequence_losses(own)]
            starts += [_gradient(x) for x in (total.mass, total.z_sum, _sequence_losses(total))]
        torch.autograd.backward(outputs, starts)


def _sequence_losses(statistics: RouterStatistics) -> Tensor:
    assert statistics.sequence_losses is not None
    return statistics.sequence_losses


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def compare_outcomes(
    compact: StepOutcome, truth: StepOutcome, *, label: str, bound: float
) -> list[Comparison]:
    """Rows for log-probs, losses and expert counts of the same step run in two ways."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {"log-probs": (compact.logprobs, truth.logprobs)}
    for name in ("policy_loss", "z_loss", "load_balancing_loss", "loss"):
        a, b = getattr(compact, name), getattr(truth, name)
        pairs[name.replace("_", " ")] = (_scalar(a), _scalar(b))
    counts = [torch.stack(list(o.expert_counts)) for o in (compact, truth) if o.expert_counts]
    if counts:
        pairs["expert counts"] = (counts[0], counts[1])
    return [
        Comparison(name=f"{label}: {name}", error=relative_error(a, b), bound=bound)
        for name, (a, b) in pairs.items()
    ]


def compare_gradients(
    compact: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, label: str, bound: float
) -> Comparison:
    """One row: the worst parameter, each measured against its own largest true gradient."""
    errors = {name: relative_error(compact[name], truth[name]) for name in truth}
    worst = max(errors, key=errors.__getitem__)
    return Comparison(
        name=f"{label}: every gradient of {len(errors)} (worst {worst})",
        error=errors[worst],
        bound=bound,
    )


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
