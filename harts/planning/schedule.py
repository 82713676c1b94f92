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


def level_schedule(works: IntArray, replicas: int) -> Schedule:
    """Slots as `schedule_microbatches`, replicas so that their totals differ less; J no larger.

    Blocks of neighbouring works have the least sum of slot maxima of any slots, so only the third
    term of Eq. 4 is open. Slots whose works differ most are assigned first, heaviest to idlest;
    then, while it lowers the larger load, the two works of one slot that level the most loaded
    replica and another best change places. The greedy schedule is kept where it is as good.
    """
    greedy = schedule_microbatches(works, replicas)
    slots = int(greedy.slot.max()) + 1
    grid = np.asarray(works, np.int64)[np.lexsort((-works, greedy.slot))].reshape(slots, replicas)
    order = np.argsort(grid[:, 0] - grid[:, -1], kind="stable")[::-1]
    place = np.empty((slots, replicas), np.int64)  # column of ``grid`` that each replica runs
    load = np.zeros(replicas, np.int64)
    for j in order.tolist():
        place[j, np.argsort(load, kind="stable")] = np.arange(replicas)
        load += grid[j, place[j]]
    _swap_levelling(grid, place)
    replica = np.empty(works.size, np.int64)
    microbatch = np.lexsort((-works, greedy.slot)).reshape(slots, replicas)
    replica[np.take_along_axis(microbatch, place, axis=1)] = np.arange(replicas)
    levelled = Schedule(
        replica=replica, slot=greedy.slot, objective=evaluate(works, replica, greedy.slot)
    )
    return levelled if levelled.objective < greedy.objective else greedy


def _swap_levelling(grid: IntArray, place: IntArray) -> None:
    """Exchange works within slots, in ``place``, while the most loaded replica gets lighter."""
    runs = np.take_along_axis(grid, place, axis=1)
    for _ in range(4 * grid.size):
        load = runs.sum(axis=0)
        most = int(np.argmax(load))
        given = runs[:, most, None] - runs
        larger = np.maximum(load[most] - given, load + given)
        j, other = divmod(int(np.argmin(larger)), larger.shape[1])
        if larger[j, other] >= load[most]:
            break
        for table in (runs, place):
            table[j, [most, other]] = table[j, [other, most]]
