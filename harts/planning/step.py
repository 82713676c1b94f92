"""Plan one optimisation step: which trajectories share a microbatch, where it runs, in which calls.

This is the entry of the planning stages; see sections 3.2 and 3.3 of the paper.
"""

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from harts.errors import InputError, PlanError
from harts.files import replace_text
from harts.forest import Int, PrefixForest
from harts.planning.best import Planner as Planner
from harts.planning.bound import total_work_lower_bound
from harts.planning.calls import CallPlan, PackedSequence, plan_calls
from harts.planning.contiguous import check_capacity
from harts.planning.fillers import FilledGrouping, plan_filled_groups
from harts.planning.intervals import IntervalWork
from harts.planning.schedule import Objective
from harts.planning.trie import PrefixTrie
from harts.trajectories import TrajectoryBatch

PLAN_VERSION = 1
MOST_REPLICAS = 1 << 16
"""Replicas that are filled up; each costs memory, and without fillers N bounds them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Trajectories that run together on one replica, and how their tree runs."""

    replica: int
    slot: int
    forest: PrefixForest
    calls: CallPlan
    filler: bool = False
    """Repeats a trajectory of another microbatch with weight zero, so that its replica runs as many
    microbatches as the others; its members are no part of the step."""

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
    """J of Eq. 4; fillers count, since they take the time of their tokens."""
    lower_bound: int
    """No plan of these trajectories has less total work than this, fillers aside."""
    raw_tokens: int
    merged_tokens: int
    """Compact tokens if all trajectories were one microbatch, G of Eq. 7."""
    timings_s: Mapping[str, float]
    microbatches: tuple[Microbatch, ...]
    batch_digest: str | None = None
    """SHA-256 of the planned trajectories, where `harts.planning.stored` took it."""

    @property
    def counted(self) -> tuple[Microbatch, ...]:
        """The microbatches that hold the step's trajectories: all but fillers."""
        return tuple(m for m in self.microbatches if not m.filler)

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
            **({} if self.batch_digest is None else {"batch_digest": self.batch_digest}),
            "microbatches": [_microbatch_json(m) for m in self.microbatches],
        }

    def save(self, path: Path) -> None:
        """Write the plan as JSON, all of it or nothing.

        Raises:
            InputError: the file cannot be written.
        """
        replace_text(path, json.dumps(self.to_json()), "the plan")


def plan_step(
    batch: TrajectoryBatch,
    *,
    replicas: int,
    capacity: int,
    chunk_size: int = 64,
    planner: Planner = "best",
    share: bool = True,
    fillers: bool = False,
) -> StepPlan:
    """Plan a step over all trajectories of ``batch``.

    Args:
        batch: the trajectories of one optimisation step.
        replicas: D, data-parallel replicas; each runs the same number of microbatches.
        capacity: T, compact tokens that one microbatch may hold.
        chunk_size: B, chunk length of the model's linear attention.
        planner: how memberships are found; "best" takes the best of all that exist.
        share: False plans trajectory-wise training, each trajectory a tree of its own.
        fillers: where no number of microbatches fits D, such as N < D, repeat a short trajectory
            with weight zero instead of refusing.

    Raises:
        PlanError: a number below 1; a trajectory above ``capacity``; or, without ``fillers``,
            N < D or no grouping found whose count D divides. "best" is exact to N = 8: there is
            none. Beyond, no other planner finds one; "contiguous" takes only sorted neighbours.
        InputError: no such planner.
    """
    _check_arguments(batch, replicas, capacity, chunk_size, planner, fillers)
    began = time.perf_counter()
    forest = PrefixForest.build(batch, share=share)
    sorted_at = time.perf_counter()
    work = IntervalWork.build(forest.lengths, forest.lcp)
    trie = PrefixTrie.build(work)
    # No microbatch holds more than all tokens: a capacity past every integer type is as good.
    limit = min(capacity, batch.raw_tokens)
    filled = plan_filled_groups(work, replicas, limit, planner, fillers=fillers, trie=trie)
    # D need not divide the number of microbatches that hold trajectories where fillers add to it.
    divisor = 1 if filled.fillers else replicas
    lower_bound = total_work_lower_bound(work, divisor, limit, trie)
    grouped_at = time.perf_counter()
    microbatches = _microbatches(forest, filled, chunk_size)
    plan = StepPlan(
        replicas=replicas,
        capacity=capacity,
        chunk_size=chunk_size,
        objective=filled.grouping.objective,
        lower_bound=lower_bound,
        raw_tokens=batch.raw_tokens,
        merged_tokens=forest.compact_tokens,
        timings_s={
            "load": 0.0,
            "forest": sorted_at - began,
            "microbatches": grouped_at - sorted_at,
            "calls": time.perf_counter() - grouped_at,
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
    members = np.sort(np.concatenate([m.members for m in plan.counted]))
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


def _check_arguments(
    batch: TrajectoryBatch,
    replicas: int,
    capacity: int,
    chunk_size: int,
    planner: Planner,
    fillers: bool,
) -> None:
    if planner not in get_args(Planner):
        raise InputError(f"planner must be one of {get_args(Planner)}, got {planner!r}")
    if min(replicas, capacity, chunk_size) < 1:
        raise PlanError(
            f"replicas, capacity and chunk_size must be at least 1; got replicas={replicas}, "
            f"capacity={capacity}, chunk_size={chunk_size}. Correct the arguments."
        )
    if fillers and replicas > MOST_REPLICAS:
        raise PlanError(
            f"fillers for {replicas} replicas would be more microbatches than any step has; give "
            f"at most {MOST_REPLICAS:,} replicas"
        )
    if fillers or len(batch) >= replicas:  # else that there are too few is told first
        check_capacity(batch.lengths, capacity, batch.describe_row)


def _microbatches(
    forest: PrefixForest, filled: FilledGrouping, chunk_size: int
) -> list[Microbatch]:
    """Microbatches with their calls, in the order of the groups; the last ones are fillers."""
    grouping = filled.grouping
    places = zip(grouping.groups, grouping.replica.tolist(), grouping.slot.tolist(), strict=True)
    made = [
        _microbatch(forest.subset(group), replica, slot, chunk_size)
        for group, replica, slot in places
    ]
    for k in range(len(made) - filled.fillers, len(made)):
        made[k] = dataclasses.replace(made[k], filler=True)
    return made


def _microbatch(forest: PrefixForest, replica: int, slot: int, chunk_size: int) -> Microbatch:
    calls = plan_calls(forest.segment_parent, forest.segment_start, forest.segment_end, chunk_size)
    return Microbatch(replica=replica, slot=slot, forest=forest, calls=calls)


def _microbatch_json(microbatch: Microbatch) -> dict[str, Any]:
    forest = microbatch.forest
    segments = zip(forest.segment_parent.tolist(), forest.segment_lengths.tolist(), strict=True)
    return {
        "replica": microbatch.replica,
        "slot": microbatch.slot,
        **({"filler": True} if microbatch.filler else {}),
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
