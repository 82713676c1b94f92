"""One optimisation step on Megatron's schedules: a plan goes in, losses and gradients come out.

Shapes: P log-prob positions · E experts.

Gradients are sums over microbatches, replicas and ranks: the weights of the objective carry the
denominators of the whole step. Megatron is told so by ``calculate_per_token_loss`` with no tokens
to divide by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from harts.errors import InputError
from harts.layout import CompactLayout, build_layout
from harts.megatron.packet import RouterTask, TreePacket, make_packet
from harts.megatron.ranks import current_ranks
from harts.megatron.router import TreeRouter
from harts.megatron.support import check_supported
from harts.objectives import PolicyObjective, StepTargets
from harts.planning.step import Microbatch, StepPlan
from harts.training.step import FILLER_WEIGHT, RouterLosses, StepOutcome, StepSums, StepTotals
from harts.trajectories import TrajectoryBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """What the microbatches of a step share."""

    batch: TrajectoryBatch
    plan: StepPlan
    targets: StepTargets
    objective: PolicyObjective
    router: RouterLosses
    total: StepTotals


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slot:
    """A microbatch, laid out and cut for this rank."""

    microbatch: Microbatch
    layout: CompactLayout
    packet: TreePacket


@dataclass(slots=True, kw_only=True, eq=False)
class _Measured:
    """What one rank knows of a step."""

    sums: StepSums = field(default_factory=StepSums)
    """Policy loss and metrics; empty but on one rank of each replica."""
    layers: dict[int, tuple[float, float, Tensor]] = field(default_factory=dict)
    """z-loss, load-balancing loss and counts [E] of this rank's rows, by number of the layer."""


class MegatronEngine:
    """Runs steps on model chunks that Megatron's ``DistributedDataParallel`` wraps."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Take the chunks of this rank: `build_model`'s, each wrapped.

        Raises:
            UnsupportedError: the configuration has a setting that trees cannot have.
            InputError: a chunk that nothing wraps.
        """
        self.chunks: list[Any] = list(chunks)
        self.config = get_model_config(self.chunks[0])
        self.ranks = current_ranks()
        check_supported(self.config, self.ranks)
        for chunk in self.chunks:
            if not hasattr(chunk, "finish_grad_sync"):
                raise InputError(
                    f"nothing reduces the gradients of {type(chunk).__name__}; wrap each chunk in "
                    "megatron.core.distributed.DistributedDataParallel"
                )
        if self.config.finalize_model_grads_func is None:
            self.config.finalize_model_grads_func = finalize_model_grads
        if self.config.no_sync_func is None and self.chunks[0].ddp_config.overlap_grad_reduce:
            hooks = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]

    def run_step(
        self,
        batch: TrajectoryBatch,
        plan: StepPlan,
        targets: StepTargets,
        objective: PolicyObjective,
        router: RouterLosses,
    ) -> StepOutcome:
        """Gradients of a whole step, in Megatron's buffers; every rank calls this alike.

        Gradient buffers are cleared first. Afterwards the gradients are reduced and the expert
        bias, if the model has one, has moved: call ``optimizer.step()``.

        Args:
            batch: all trajectories of the step, the same on every rank.
            plan: the same on every rank, for as many replicas as there are data-parallel ranks.
            targets: ``prepare_step`` of the whole batch.
            objective: the policy objective.
            router: coefficients and form of the router losses.

        Returns:
            The whole step's losses, metrics and expert counts, the same on every rank;
            log-probs of this replica's trajectories, NaN for the others.

        Raises:
            InputError: the plan does not fit the parallel sizes.
        """
        self._check(plan)
        step = _Step(
            batch=batch,
            plan=plan,
            targets=targets,
            objective=objective,
            router=router,
            total=StepTotals(batch, len(plan.counted)),
        )
        own = [m for m in plan.microbatches if m.replica == self.ranks.dp_rank]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if router.load_balancing == "global":
            self._run(step, own, only_counts=True)
            device = next(self.chunks[0].parameters()).device
            counts = _sum_over_ranks(self._everyone(_Measured(layers=self._layers())))
            step.total.set_expert_counts({n: layer[2].to(device) for n, layer in counts.items()})
        self._run(step, own)
        return self._outcome(step)

    def _run(self, step: _Step, own: Sequence[Microbatch], *, only_counts: bool = False) -> None:
        """Run the slots of one replica on Megatron's schedule."""
        slots = _Shared(partial(self._lay_out, step, only_counts=only_counts), own)
        schedule: Any = get_forward_backward_func()
        schedule(
            forward_step_func=partial(_forward, step),
            data_iterator=[slots.iterator() for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(own),
            seq_length=max(m.compact_tokens for m in own) + self._parts,
            micro_batch_size=1,
            forward_only=only_counts,
        )

    @property
    def _parts(self) -> int:
        return self.ranks.tp_size * self.ranks.cp_size

    def _check(self, plan: StepPlan) -> None:
        if plan.replicas != self.ranks.dp_size:
            raise InputError(
                f"the plan is for {plan.replicas} replicas, and {self.ranks.dp_size} data-parallel "
                f"ranks run it; plan the step with replicas={self.ranks.dp_size}"
            )
        if len(self.chunks) > 1 and plan.slots % self.ranks.pp_size:
            raise InputError(
                f"interleaved pipeline stages run slots in groups of {self.ranks.pp_size}, and the "
                f"plan has {plan.slots}; plan with another capacity, or build the model without "
                "virtual stages"
            )

    def _lay_out(self, step: _Step, microbatch: Microbatch, *, only_counts: bool = False) -> _Slot:
        layout = build_layout(
            step.batch, microbatch.forest, microbatch.calls, row_multiple=self._parts
        )
        task = RouterTask(losses=step.router, scale=step.total.scale, only_counts=only_counts)
        packet = make_packet(
            layout,
            self.ranks,
            next(self.chunks[0].parameters()).device,
            router=None if microbatch.filler else task,
        )
        return _Slot(microbatch=microbatch, layout=layout, packet=packet)

    def _outcome(self, step: _Step) -> StepOutcome:
        """Join what every rank measured, in the order of the ranks."""
        step.total.sums = _join(self._everyone(self._measured(step)), step.router)
        outcome = step.total.outcome()
        if self.ranks.pp_size > 1:
            logprobs = outcome.logprobs.to(next(self.chunks[0].parameters()).device)
            dist.broadcast(
                logprobs,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
            outcome.logprobs.copy_(logprobs)
        return outcome

    def _measured(self, step: _Step) -> _Measured:
        measured = _Measured(layers=self._layers())
        # Only the last stage has a loss, and its tensor- and context-parallel ranks have the same.
        if self.ranks.tp_rank == self.ranks.cp_rank == 0:
            measured.sums = step.total.sums
        return measured

    def _layers(self) -> dict[int, tuple[float, float, Tensor]]:
        """What the routers of this rank added up since the last call."""
        layers: dict[int, tuple[float, float, Tensor]] = {}
        for chunk in self.chunks:
            for module in get_attr_wrapped_model(chunk, "modules")():
                if isinstance(module, TreeRouter):
                    taken = module.take_totals()
                    layers[module.layer_number] = (
                        float(taken.z_loss),
                        float(taken.load_balancing_loss),
                        taken.counts.cpu(),
                    )
        return layers

    def _everyone(self, own: _Measured) -> list[_Measured]:
        """What every rank measured, in the order of the ranks."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return everyone


class _Shared:
    """Microbatches made once, when first asked for, and read by every chunk in order."""

    def __init__(self, make: Callable[[Microbatch], _Slot], own: Sequence[Microbatch]) -> None:
        self._make = make
        self._own = own
        self._made: dict[int, _Slot] = {}

    def iterator(self) -> Iterator[_Slot]:
        for number in itertools.count():
            if number >= len(self._own):
                return
            if number not in self._made:
                self._made[number] = self._make(self._own[number])
            yield self._made[number]


def _forward(step: _Step, slots: Iterator[_Slot], model: Any) -> tuple[Tensor, Any]:
    """Megatron's forward step: the model's output and what turns it into a loss."""
    slot = next(slots)
    tree, rows = slot.packet.tree, slot.packet.context_rows
    assert tree is not None
    output = model(
        input_ids=tree.tokens[rows].unsqueeze(0),
        position_ids=tree.positions[rows].unsqueeze(0),
        attention_mask=None,
        packed_seq_params=slot.packet,
    )
    return output, partial(_loss, step, slot)


def _loss(step: _Step, slot: _Slot, logprobs: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The microbatch's loss, no tokens to divide by, and nothing to log."""
    none = torch.zeros((), dtype=torch.int, device=logprobs.device)
    task = slot.packet.router
    if task is None or task.only_counts:
        return FILLER_WEIGHT * logprobs.sum(), none, {}
    policy = step.objective(logprobs, step.targets.select(slot.layout.members))
    step.total.add_logprobs(slot.layout.members.tolist(), logprobs)
    value = float(policy.loss.detach())
    step.total.sums += StepSums(
        loss=value,
        policy_loss=value,
        metrics={name: float(metric) for name, metric in policy.metrics.items()},
    )
    return policy.loss, none, {}


def _join(everyone: Sequence[_Measured], router: RouterLosses) -> StepSums:
    sums = sum((m.sums for m in everyone), StepSums())
    layers = _sum_over_ranks(everyone)
    if not layers:
        return sums
    z = sum(layer[0] for layer in layers.values())
    balance = sum(layer[1] for layer in layers.values())
    return sums + StepSums(
        loss=router.z_coefficient * z + router.load_balancing_coefficient * balance,
        z_loss=z / len(layers),
        load_balancing_loss=balance / len(layers),
        expert_counts=tuple(layers[number][2] for number in sorted(layers)),
    )


def _sum_over_ranks(everyone: Sequence[_Measured]) -> dict[int, tuple[float, float, Tensor]]:
    """By number of the layer."""
    layers: dict[int, tuple[float, float, Tensor]] = {}
    for measured in everyone:
        for number, (z, balance, counts) in measured.layers.items():
            before = layers.get(number, (0.0, 0.0, torch.zeros_like(counts)))
            layers[number] = (before[0] + z, before[1] + balance, before[2] + counts)
    return layers
