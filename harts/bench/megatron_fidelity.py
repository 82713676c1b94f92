"""How close two steps on Megatron are: logits, loss and gradients (paper, section 5.4).

Logits are compared by the ranks that hold the head, block by block, each its part of the
vocabulary: no rank ever has all of them.

Shapes: P semantic log-prob positions · n of them compared · D model width · A vocabulary, a of it
on this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from harts.megatron import MegatronEngine
from harts.megatron.head import LogprobHead
from harts.planning.step import StepPlan
from harts.trajectories import TrajectoryBatch

POSITIONS = 1 << 16
"""Positions whose logits are compared, at most; evenly spaced over the step."""
_BLOCK = 1_024
"""Positions whose logits are held at once."""
_PIECE = 1 << 28
"""Numbers of gradients that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """What a step left on this rank."""

    loss: float
    hidden: Tensor | None
    """[n, D] inputs of the head in original order; None on ranks without the head."""
    gradients: list[Tensor]
    """Parts of reduced gradients, which together the ranks hold all of."""


def snapshot(
    engine: MegatronEngine,
    batch: TrajectoryBatch,
    plan: StepPlan,
    run: Callable[[StepPlan], float],
) -> Snapshot:
    """Run a step of ``batch``, which returns its loss, and keep what can be compared."""
    with _recorded_hidden(engine, batch, plan) as hidden:
        loss = run(plan)
    if hidden is not None:
        # Every position was recorded by one rank, and is zero on the others.
        dist.all_reduce(hidden, group=_replicas())
    return Snapshot(loss=loss, hidden=hidden, gradients=list(_own_gradients(engine)))


@torch.no_grad()
def compare(engine: MegatronEngine, reference: Snapshot, other: Snapshot) -> dict[str, float]:
    """Differences of two steps over the same weights, the same numbers on every rank.

    Returns:
        ``mean_cosine`` of full-vocabulary logits, Eq. 27; ``loss_difference``, absolute;
        ``gradient_cosine`` and ``gradient_difference``, relative, of all gradients as one vector.
    """
    device = reference.gradients[0].device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for ours, theirs in _pieces(reference.gradients, other.gradients):
        sums[0] += torch.dot(ours, theirs).double()
        sums[1] += ours.square().sum().double()
        sums[2] += (ours - theirs).square().sum().double()
        sums[3] += theirs.square().sum().double()
    cosines = torch.zeros(2, dtype=torch.float64, device=device)
    if reference.hidden is not None and other.hidden is not None:
        cosines = _logit_cosines(_head(engine), reference.hidden, other.hidden)
    total = torch.cat([sums, cosines])
    dist.all_reduce(total)
    dot, own, apart, their, cosine, count = total.tolist()
    return {
        "mean_cosine": cosine / count,
        "loss_difference": abs(reference.loss - other.loss),
        "gradient_cosine": dot / (own * their) ** 0.5,
        "gradient_difference": (apart / own) ** 0.5,
    }


def _pieces(ours: list[Tensor], theirs: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Both cut alike, small enough for 32-bit sizes and for copies."""
    for a, x in zip(ours, theirs, strict=True):
        yield from zip(torch.split(a, _PIECE), torch.split(x, _PIECE), strict=True)


def _logit_cosines(head: Any, reference: Tensor, other: Tensor) -> Tensor:
    """[2] sum and number of the cosines that this rank contributes."""
    group, replicas = head.tp_group, _replicas()
    held = min(max(head.vocabulary - group.rank() * head.weight.shape[0], 0), head.weight.shape[0])
    weight = head.weight[:held]
    total = torch.zeros(2, dtype=torch.float64, device=reference.device)
    own = slice(replicas.rank(), None, replicas.size())
    for ours, theirs in zip(
        torch.split(reference[own], _BLOCK), torch.split(other[own], _BLOCK), strict=True
    ):
        a, x = (ours @ weight.T).float(), (theirs @ weight.T).float()
        parts = torch.stack([(a * x).sum(1), a.square().sum(1), x.square().sum(1)]).double()
        dist.all_reduce(parts, group=group)
        cosines = parts[0] / (parts[1] * parts[2]).sqrt()
        total += torch.stack([cosines.sum(), torch.ones_like(cosines).sum()])
    return total if group.rank() == 0 else torch.zeros_like(total)


@contextlib.contextmanager
def _recorded_hidden(
    engine: MegatronEngine, batch: TrajectoryBatch, plan: StepPlan
) -> Iterator[Tensor | None]:
    """Fills what it yields with the inputs of the head at the compared positions."""
    head = _head(engine)
    if head is None:
        yield None
        return
    weight = head.weight
    place = _places(int(batch.position_offsets[-1])).to(weight.device)
    found = weight.new_zeros((int(place.max()) + 1, weight.shape[1]))
    # The head runs once for each microbatch of this replica, in order of the slots.
    coming = iter([m for m in plan.microbatches if m.replica == engine.ranks.dp_rank])

    def record(_head: Any, inputs: Any, named: Any) -> None:
        microbatch, packet = next(coming), named["packet"]
        if microbatch.filler:
            return
        hidden = inputs[0].detach()
        if head.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=head.tp_group)
        offsets = batch.position_offsets
        spans = [np.arange(offsets[i], offsets[i + 1]) for i in microbatch.members.tolist()]
        positions = torch.from_numpy(np.concatenate(spans)).to(weight.device)
        at = place[positions[packet.own_positions]]
        found[at[at >= 0]] = hidden[:, 0][packet.target_rows()[at >= 0]]

    hook = head.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def _places(positions: int) -> Tensor:
    """[P] number among the compared positions; -1 for the others."""
    chosen = np.unique(np.linspace(0, positions - 1, min(positions, POSITIONS)).astype(np.int64))
    place = torch.full((positions,), -1)
    place[torch.from_numpy(chosen)] = torch.arange(len(chosen))
    return place


def _head(engine: MegatronEngine) -> Any:
    """The output layer, or None on the ranks of other pipeline stages."""
    for chunk in engine.chunks:
        for module in get_attr_wrapped_model(chunk, "modules")():
            if isinstance(module, LogprobHead):
                return module
    return None


def _replicas() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _own_gradients(engine: MegatronEngine) -> Iterator[Tensor]:
    """The parts that a distributed optimiser would update here, cloned."""
    for chunk in engine.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                yield bucket.grad_data.chunk(group.size())[group.rank()].clone()
