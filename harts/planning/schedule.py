"""Replicas and slots for microbatches of known work (Section 3.2, Eq. 4).

Shapes: K microbatches, D replicas, K/D slots; work in compact tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harts.errors import PlanError
from harts.planning.intervals import IntArray


class Objective(NamedTuple):
    """J of Eq. 4, compared term by term; smaller is better. Units: compact tokens."""

    total_work: int
    slot_maxima: int
    replica_maximum: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Replica ``replica[K]`` and slot ``slot[K]`` of every microbatch, with its objective."""

    replica: IntArray
    slot: IntArray
    objective: Objective


def schedule_microbatches(works: IntArray, replicas: int) -> Schedule:
    """Slots of D microbatches of neighbouring work, each slot's heaviest to the idlest replica.

    Microbatches are sorted by work, heaviest first; equal works keep their order and equally
    loaded replicas their number, so the result is a function of ``works[K]`` alone.

    Raises:
        PlanError: K is not a positive multiple of D.
    """
    works = np.asarray(works, np.int64)
    if replicas < 1 or works.size == 0 or works.size % replicas:
        raise PlanError(
            f"{works.size} microbatches cannot be scheduled on {replicas} replicas: expected a "
            "positive multiple of the replica count. Change the partition or the replica count."
        )
    order = np.argsort(-works, kind="stable").reshape(-1, replicas)
    slot = np.empty(works.size, np.int64)
    slot[order] = np.arange(order.shape[0])[:, None]
    replica = np.empty(works.size, np.int64)
    load = np.zeros(replicas, np.int64)
    for heaviest_first in order:
        idlest_first = np.argsort(load, kind="stable")
        replica[heaviest_first] = idlest_first
        load[idlest_first] += works[heaviest_first]
    return Schedule(replica=replica, slot=slot, objective=evaluate(works, replica, slot))


def evaluate(works: NDArray[np.int64], replica: IntArray, slot: IntArray) -> Objective:
    """Objective J (Eq. 4) of a schedule: arrays [K] of work, replica and slot."""
    slot_maxima = np.zeros(int(slot.max()) + 1, np.int64)
    np.maximum.at(slot_maxima, slot, works)
    load = np.zeros(int(replica.max()) + 1, np.int64)
    np.add.at(load, replica, works)
    return Objective(int(works.sum()), int(slot_maxima.sum()), int(load.max()))
