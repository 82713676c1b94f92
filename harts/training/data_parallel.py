"""One step on several processes: each runs its replica's slots, gradients are those of one process.

Any wrapper that averages gradients over the processes will do: DistributedDataParallel, FSDP2
(``fully_shard``), or what ``accelerate`` makes of them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from harts.errors import InputError
from harts.models import TreePolicy
from harts.objectives import PolicyObjective, StepTargets
from harts.planning.step import Microbatch, StepPlan
from harts.training.step import (
    RouterLosses,
    StepOutcome,
    StepSums,
    StepTotals,
    count_experts,
    run_microbatch,
)
from harts.trajectories import TrajectoryBatch


def run_replica(
    policy: nn.Module,
    batch: TrajectoryBatch,
    plan: StepPlan,
    targets: StepTargets,
    objective: PolicyObjective,
    router: RouterLosses,
    *,
    group: dist.ProcessGroup | None = None,
    on_microbatch: Callable[[Microbatch], None] | None = None,
) -> StepOutcome:
    """Run this process's slots of a step, in lock step with the other replicas.

    The wrapper averages gradients over D processes, once, after the last slot; the loss is
    multiplied by D, so that the result is their sum: the gradient of `run_step`.

    Args:
        policy: a `TreePolicy`, wrapped to average gradients.
        batch: all trajectories of the step, the same in every process.
        plan: the same in every process, for as many replicas as there are processes.
        targets: ``prepare_step`` of the whole batch.
        objective: the policy objective.
        router: coefficients of the router losses.
        group: the data-parallel processes; all of them by default.
        on_microbatch: called after each microbatch, for progress.

    Returns:
        The whole step's losses, metrics and expert counts (on the CPU), the same in every process;
        log-probs of this replica's trajectories, NaN for the others.

    Raises:
        InputError: a plan for another number of replicas, or a policy that nothing averages.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    _check(plan, size)
    synchronise, inner = _wrapping(policy)
    own = [m for m in plan.microbatches if m.replica == rank]
    total = StepTotals(batch, len(plan.counted))
    if router.load_balancing == "global":
        total.set_expert_counts(_step_counts(policy, batch, own, group))
    for slot, microbatch in enumerate(own):
        with synchronise(slot + 1 == len(own)):
            run_microbatch(
                policy,
                batch,
                microbatch,
                targets,
                objective,
                router,
                total,
                top_k=inner.top_k,
                scale=size,
            )
        if on_microbatch is not None:
            on_microbatch(microbatch)
    total.sums = _sum_over_replicas(total.sums, group)
    return total.outcome()


def _check(plan: StepPlan, processes: int) -> None:
    if plan.replicas != processes:
        raise InputError(
            f"the plan is for {plan.replicas} replicas, and {processes} processes run it; plan the "
            f"step with replicas={processes}"
        )


def _step_counts(
    policy: nn.Module,
    batch: TrajectoryBatch,
    own: Sequence[Microbatch],
    group: dist.ProcessGroup | None,
) -> dict[int, Tensor]:
    """[E] assignments of the whole step by MoE layer, after a forward of this replica's slots."""
    counted = StepSums(expert_counts=count_experts(policy, batch, own))
    summed = _sum_over_replicas(counted, group).expert_counts
    device = next(policy.parameters()).device
    return {layer: counts.to(device) for layer, counts in enumerate(summed)}


def _wrapping(
    policy: nn.Module,
) -> tuple[Callable[[bool], AbstractContextManager[Any]], TreePolicy]:
    """How the wrapper is told whether a backward is the step's last, and the policy inside."""
    if isinstance(policy, FSDPModule):
        sharded = policy

        @contextlib.contextmanager
        def reduce_gradients(last: bool) -> Any:
            sharded.set_requires_gradient_sync(last)
            yield

        return reduce_gradients, cast(TreePolicy, policy)
    if isinstance(policy, nn.parallel.DistributedDataParallel):
        replicated = policy
        inner = cast(TreePolicy, policy.module)
        return lambda last: contextlib.nullcontext() if last else replicated.no_sync(), inner
    raise InputError(
        f"nothing averages the gradients of {type(policy).__name__} over processes; wrap the "
        "TreePolicy in DistributedDataParallel, fully_shard or accelerator.prepare"
    )


def _sum_over_replicas(own: StepSums, group: dist.ProcessGroup | None) -> StepSums:
    """In the order of the ranks, so that every process has the same digits."""
    everyone: list[StepSums | None] = [None] * dist.get_world_size(group)
    counts = tuple(layer.cpu() for layer in own.expert_counts)
    dist.all_gather_object(everyone, dataclasses.replace(own, expert_counts=counts), group=group)
    return sum((part for part in everyone if part is not None), StepSums())
