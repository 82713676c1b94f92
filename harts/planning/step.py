"""Plan one optimisation step: which trajectories share a microbatch, where it runs, in which calls.

This is the entry of the planning stages; see sections 3.2 and 3.3 of the paper.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from harts.errors import InputError, PlanError, UnsupportedError
from harts.forest import Int, PrefixForest
from harts.planning.calls import CallPlan, PackedSequence, plan_calls
from harts.planning.contiguous import best_contiguous
from harts.planning.schedule import Objective
from harts.trajectories import TrajectoryBatch

Planner = Literal["best", "paper", "contiguous", "hierarchical"]
PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Trajectories that run together on one replica, and how their tree runs."""

    replica: int
    slot: int
    forest: PrefixForest
    calls: CallPlan

    @property
    def members(self) -> Int:
        """Input rows of the trajectories, ascending."""
        return np.sort(self.forest.members)

    @property
    def compact_tokens(self) -> int:
        """w(M) of Eq. 4: unique, non-replay tokens."""
        return self.forest.compact_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """A full plan of one step; microbatches are ordered by slot, then by replica."""

    replicas: int
    capacity: int
    chunk_size: int
    objective: Objective
    """J of Eq. 4."""
    lower_bound: int
    """No plan of these trajectories has less total work than this."""
    raw_tokens: int
    merged_tokens: int
    """Compact tokens if all trajectories were one microbatch, G of Eq. 7."""
    timings_s: Mapping[str, float]
    microbatches: tuple[Microbatch, ...]

    @property
    def slots(self) -> int:
        """Microbatches that each replica runs one after the other."""
        return len(self.microbatches) // self.replicas

    def to_json(self) -> dict[str, Any]:
        """The stable form that ``harts plan --json`` writes."""
        return {
            "version": PLAN_VERSION,
            "D": self.replicas,
            "T": self.capacity,
            "chunk_size": self.chunk_size,
            "objective": list(self.objective),
            "lower_bound": self.lower_bound,
            "raw_tokens": self.raw_tokens,
            "merged_tokens": self.merged_tokens,
            "timings_s": dict(self.timings_s),
            "microbatches": [_microbatch_json(m) for m in self.microbatches],
        }

    def save(self, path: Path) -> None:
        """Write the plan as JSON, all of it or nothing.

        Raises:
            InputError: the file cannot be written.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(self.to_json()))
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise InputError(f"cannot write the plan to {path}: {error.strerror}") from error


def plan_step(
    batch: TrajectoryBatch,
    *,
    replicas: int,
    capacity: int,
    chunk_size: int = 64,
    planner: Planner = "best",
    share: bool = True,
) -> StepPlan:
    """Plan a step over all trajectories of ``batch``.

    Args:
        batch: the trajectories of one optimisation step.
        replicas: D, data-parallel replicas; each runs the same number of microbatches.
        capacity: T, compact tokens that one microbatch may hold.
        chunk_size: B, chunk length of the model's linear attention.
        planner: how memberships are found; "best" takes the best of all that exist.
        share: False plans trajectory-wise training, each trajectory a tree of its own.

    Raises:
        PlanError: no plan exists; the message says why and what to change.
        UnsupportedError: the planner is not available yet.
    """
    _check_planner(planner)
    began = time.perf_counter()
    forest = PrefixForest.build(batch, share=share)
    sorted_at = time.perf_counter()
    grouping = best_contiguous(
        forest.lengths,
        forest.lcp,
        replicas=replicas,
        capacity=capacity,
        trajectories=forest.members,
    )
    grouped_at = time.perf_counter()
    groups = np.split(np.arange(len(batch)), grouping.cuts)
    microbatches = [
        _microbatch(forest.subset(group), int(replica), int(slot), chunk_size)
        for group, replica, slot in zip(groups, grouping.replica, grouping.slot, strict=True)
    ]
    finished = time.perf_counter()
    plan = StepPlan(
        replicas=replicas,
        capacity=capacity,
        chunk_size=chunk_size,
        objective=grouping.objective,
        lower_bound=grouping.lower_bound,
        raw_tokens=batch.raw_tokens,
        merged_tokens=forest.compact_tokens,
        timings_s={
            "load": 0.0,
            "forest": sorted_at - began,
            "microbatches": grouped_at - sorted_at,
            "calls": finished - grouped_at,
        },
        microbatches=tuple(sorted(microbatches, key=lambda m: (m.slot, m.replica))),
    )
    check_plan(plan, len(batch))
    return plan


def check_plan(plan: StepPlan, trajectories: int) -> None:
    """Check every invariant of a plan's microbatches: coverage, capacity, slots and replicas.

    Raises:
        PlanError: names the first invariant that does not hold.
    """
    members = np.sort(np.concatenate([m.members for m in plan.microbatches]))
    if not np.array_equal(members, np.arange(trajectories)):
        raise PlanError(f"the plan must hold each of {trajectories} trajectories exactly once")
    grid = [(m.slot, m.replica) for m in plan.microbatches]
    expected = [(s, d) for s in range(plan.slots) for d in range(plan.replicas)]
    if grid != expected:
        raise PlanError(
            f"every slot must have one microbatch on each of {plan.replicas} replicas; got "
            f"(slot, replica) pairs {grid}"
        )
    heaviest = max(m.compact_tokens for m in plan.microbatches)
    if heaviest > plan.capacity:
        raise PlanError(
            f"a microbatch holds {heaviest} compact tokens, capacity is {plan.capacity}"
        )
    total = sum(m.compact_tokens for m in plan.microbatches)
    if total != plan.objective.total_work:
        raise PlanError(f"the objective counts {plan.objective.total_work} tokens, found {total}")


def _check_planner(planner: Planner) -> None:
    if planner not in get_args(Planner):
        raise InputError(f"planner must be one of {get_args(Planner)}, got {planner!r}")
    if planner in ("paper", "hierarchical"):
        raise UnsupportedError(
            f"planner {planner!r} is not available yet; use 'contiguous' or 'best'"
        )


def _microbatch(forest: PrefixForest, replica: int, slot: int, chunk_size: int) -> Microbatch:
    calls = plan_calls(forest.segment_parent, forest.segment_start, forest.segment_end, chunk_size)
    return Microbatch(replica=replica, slot=slot, forest=forest, calls=calls)


def _microbatch_json(microbatch: Microbatch) -> dict[str, Any]:
    forest = microbatch.forest
    segments = zip(forest.segment_parent.tolist(), forest.segment_lengths.tolist(), strict=True)
    return {
        "replica": microbatch.replica,
        "slot": microbatch.slot,
        "members": microbatch.members.tolist(),
        "compact_tokens": microbatch.compact_tokens,
        "replay_tokens": microbatch.calls.replay_tokens,
        "tree": {
            "segments": [
                {"id": i, "parent": None if parent < 0 else parent, "len": length}
                for i, (parent, length) in enumerate(segments)
            ]
        },
        "calls": {
            "rounds": [[_sequence_json(s) for s in packed] for packed in microbatch.calls.rounds]
        },
    }


def _sequence_json(sequence: PackedSequence) -> dict[str, Any]:
    state = sequence.initial_state
    return {
        "chain": list(sequence.chain),
        "init": None if state is None else {"seg": state.segment, "pos": state.position},
        "replay": list(sequence.replay),
        "request": list(sequence.boundaries),
    }
