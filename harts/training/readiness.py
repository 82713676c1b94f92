"""What would stop a later step, found before the first one: nothing has been written by then."""

from typing import Any

import numpy as np

from harts.errors import InputError, PlanError
from harts.forest import PrefixForest
from harts.objectives import PolicyObjective
from harts.planning.fillers import WAY_OUT
from harts.planning.intervals import IntervalWork
from harts.planning.step import plan_step
from harts.training.data import TreeSampler
from harts.trajectories import TrajectoryBatch

_NAMED = 4
"""Trees that a message names, at most."""


def check_objective(batch: TrajectoryBatch, objective: PolicyObjective) -> None:
    """Refuse data without a column that the objective reads.

    Raises:
        InputError: the reference KL is wanted, and the data have no ref_logprobs.
    """
    if objective.needs_reference and batch.ref_logprobs is None:
        raise InputError(
            f"{type(objective).__name__} with objective.kl_coefficient above 0 needs the reference "
            "policy's log-probs, and the data have no ref_logprobs column. Add the column, or set "
            "objective.kl_coefficient=0."
        )


def check_lengths(batch: TrajectoryBatch, capacity: int) -> None:
    """Refuse a trajectory that fits no microbatch.

    Raises:
        PlanError: names the longest trajectory.
    """
    row = int(batch.lengths.argmax())
    if batch.lengths[row] > capacity:
        raise PlanError(
            f"{batch.describe_row(row)} has {batch.lengths[row]} tokens, plan.capacity is "
            f"{capacity}: a trajectory is never split. Raise plan.capacity to at least "
            f"{batch.lengths[row]}, or drop the trajectory."
        )


def check_steps(sampler: TreeSampler, steps: range, options: dict[str, Any]) -> None:
    """Refuse steps (from 0) whose trajectories cannot be shared out over the replicas.

    Too few trajectories are found in every step; a count of microbatches that no multiple of the
    replicas fits is found in the first epoch of ``steps``, by planning each step in question.

    Raises:
        PlanError: names the first such step, its trees and what to change.
    """
    replicas = options["replicas"]
    if replicas == 1 or options["fillers"]:
        return
    sizes = np.array([tree.size for tree in sampler.data.trees])
    drawn = [sampler.trees(step) for step in steps]
    for step, trees in zip(steps, drawn, strict=True):
        if (count := int(sizes[trees].sum())) < replicas:
            raise PlanError(
                f"{_describe(sampler, step)} has {count} trajectories, plan.replicas is "
                f"{replicas}: every replica needs one. Lower plan.replicas to at most {count}, "
                f"raise trees_per_step from {sampler.trees_per_step} if the epoch then leaves no "
                f"smaller rest, or add trajectories. {WAY_OUT}"
            )
    for step, trees in list(zip(steps, drawn, strict=True))[: sampler.steps_per_epoch]:
        # Where D divides the count, one microbatch for each trajectory is a plan.
        if int(sizes[trees].sum()) % replicas:
            _check_plan(sampler, step, options)


def _check_plan(sampler: TreeSampler, step: int, options: dict[str, Any]) -> None:
    batch = sampler.data.batch.select(sampler.rows(step))
    most = len(batch) // options["replicas"] * options["replicas"]
    if options["planner"] in ("best", "contiguous") and _fewest(batch, options["capacity"]) <= most:
        return
    try:
        plan_step(batch, **options)
    except PlanError as error:
        raise PlanError(f"{_describe(sampler, step)}, plan.replicas: {error}") from error


def _fewest(batch: TrajectoryBatch, capacity: int) -> int:
    """The fewest microbatches of neighbours in sorted order; any larger number exists as well."""
    forest = PrefixForest.build(batch)
    stops = IntervalWork.build(forest.lengths, forest.lcp).last_stops(capacity)
    count = start = 0
    while start < len(batch):
        count, start = count + 1, int(stops[start])
    return count


def _describe(sampler: TreeSampler, step: int) -> str:
    data = sampler.data
    names = [repr(data.batch.tree_ids[data.trees[tree][0]]) for tree in sampler.trees(step)]
    shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"step {step + 1} ({'tree' if len(names) == 1 else 'trees'} {shown})"
