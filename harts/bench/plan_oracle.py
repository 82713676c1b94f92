"""An independent reading of a step plan: everything is found again from raw tokens.

No prefix forest, no sorting of trajectories and no interval work is used. Every position gets a
64-bit key of its whole prefix (tokens, places and, where the batch has them, identities); equal
keys are one compact token, so the compact work of a microbatch is the number of different keys
among its members. Two different prefixes of a batch share a key with a probability of about
S^2 / 2^65, which is below 1e-4 at 42M tokens.

Shapes: S semantic positions · N trajectories · K microbatches · D replicas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harts.errors import PlanError
from harts.forest import PrefixForest
from harts.planning.schedule import Objective
from harts.planning.step import StepPlan
from harts.trajectories import TrajectoryBatch

Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStep:
    """What a plan claims, whoever made it: [K] input rows, replica, slot and compact work."""

    members: tuple[NDArray[np.int64], ...]
    replica: NDArray[np.int64]
    slot: NDArray[np.int64]
    works: NDArray[np.int64]
    objective: Objective
    seconds: Mapping[str, float]
    """Time of each stage, loading apart."""
    note: str = ""

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """The claims of a HARTS plan."""
        parts = plan.microbatches
        return cls(
            members=tuple(m.members for m in parts),
            replica=np.array([m.replica for m in parts], np.int64),
            slot=np.array([m.slot for m in parts], np.int64),
            works=np.array([m.compact_tokens for m in parts], np.int64),
            objective=plan.objective,
            seconds={k: t for k, t in plan.timings_s.items() if k != "load"},
        )

    @property
    def planning_s(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())

    def slot_works(self) -> NDArray[np.int64]:
        """Compact work of every slot and replica; [K/D, D]."""
        grid = np.zeros((int(self.slot.max()) + 1, int(self.replica.max()) + 1), np.int64)
        grid[self.slot, self.replica] = self.works
        return grid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixOracle:
    """The compact token of every position of a batch: ``tokens[S]`` in 0..G-1."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    merged_tokens: int
    """G: different prefixes of the whole batch."""

    @classmethod
    def build(cls, batch: TrajectoryBatch) -> Self:
        """Key every prefix and number the different keys by a hash table."""
        keys = np.empty(batch.raw_tokens, np.uint64)
        for start, stop in pairwise(batch.offsets.tolist()):
            identity = None if batch.identity is None else batch.identity[start:stop]
            keys[start:stop] = _prefix_keys(batch.tokens[start:stop], identity)
        numbered = pa.array(keys).dictionary_encode()
        return cls(
            tokens=numbered.indices.to_numpy(),
            offsets=batch.offsets,
            merged_tokens=len(numbered.dictionary),
        )

    def compact_work(self, members: NDArray[np.int64]) -> int:
        """Different prefixes among the trajectories of input rows ``members``."""
        seen = np.zeros(self.merged_tokens, np.bool_)
        for member in members.tolist():
            seen[self.tokens[self.offsets[member] : self.offsets[member + 1]]] = True
        return int(np.count_nonzero(seen))


def check_planned_step(
    name: str, plan: PlannedStep, oracle: PrefixOracle, replicas: int, capacity: int
) -> None:
    """Check a plan's coverage, capacity, places, works and objective against the oracle.

    Raises:
        PlanError: the first that does not hold, with ``name``.
    """
    rows = np.concatenate(plan.members).tolist()
    trajectories = oracle.offsets.size - 1
    if sorted(rows) != list(range(trajectories)):
        raise PlanError(f"{name}: expected each of {trajectories} trajectories in one microbatch")
    count = len(plan.members)
    if count % replicas:
        raise PlanError(f"{name}: {count} microbatches cannot be {replicas} equal shares")
    places = sorted(zip(plan.slot.tolist(), plan.replica.tolist(), strict=True))
    if places != [(j, d) for j in range(count // replicas) for d in range(replicas)]:
        raise PlanError(f"{name}: expected one microbatch in each slot of {replicas} replicas")
    works = [oracle.compact_work(members) for members in plan.members]
    if max(works) > capacity:
        raise PlanError(f"{name}: a microbatch has {max(works)} tokens, capacity is {capacity}")
    if works != plan.works.tolist():
        raise PlanError(f"{name}: compact works differ from those of the raw tokens")
    objective = _objective(works, plan)
    if objective != plan.objective:
        raise PlanError(f"{name}: objective is {objective}, the plan says {plan.objective}")


def check_bound(name: str, lower_bound: int, plan: PlannedStep) -> None:
    """Check that a plan does not beat the lower bound on total work.

    Raises:
        PlanError: it does, so the bound is wrong.
    """
    if plan.objective.total_work < lower_bound:
        raise PlanError(
            f"{name}: total work {plan.objective.total_work} is below the bound {lower_bound}"
        )


def check_forest(forest: PrefixForest, oracle: PrefixOracle) -> None:
    """Check that the forest of a whole batch has as many compact tokens as the oracle.

    Raises:
        PlanError: it has not.
    """
    if forest.compact_tokens != oracle.merged_tokens:
        raise PlanError(
            f"the forest has {forest.compact_tokens} compact tokens, the raw tokens "
            f"{oracle.merged_tokens}"
        )


def _objective(works: list[int], plan: PlannedStep) -> Objective:
    """J of Eq. 4, written out."""
    slots: dict[int, int] = {}
    loads: dict[int, int] = {}
    for work, slot, replica in zip(works, plan.slot.tolist(), plan.replica.tolist(), strict=True):
        slots[slot] = max(slots.get(slot, 0), work)
        loads[replica] = loads.get(replica, 0) + work
    return Objective(sum(works), sum(slots.values()), max(loads.values()))


def _prefix_keys(tokens: NDArray[np.int32], identity: NDArray[np.int64] | None) -> Keys:
    """Key of every prefix: the wrapping sum of well-mixed (place, token, identity) words."""
    place = np.arange(1, tokens.size + 1, dtype=np.uint64)
    words = _mixed(place * np.uint64(0x9E3779B97F4A7C15)) ^ tokens.astype(np.uint64)
    if identity is not None:
        words = _mixed(words) ^ identity.view(np.uint64)
    return np.cumsum(_mixed(words), dtype=np.uint64)


def _mixed(words: Keys) -> Keys:
    """Finalizer of splitmix64: every input bit changes half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
