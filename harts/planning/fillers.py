"""Filler microbatches: what idle replicas run where no number of microbatches fits D.

All replicas must run equally many microbatches, or collective operations would wait forever. With
fewer trajectories than replicas, or where the microbatches that are needed cannot be made a
multiple of D, a short trajectory is repeated with weight zero.

Shapes: N trajectories, K microbatches, D replicas; work in compact tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts.errors import PlanError
from harts.planning.best import Grouping, Planner, plan_groups
from harts.planning.grouping import compact_works, in_order
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.schedule import level_schedule, schedule_microbatches
from harts.planning.trie import PrefixTrie

WAY_OUT = (
    "Or let replicas without work run filler microbatches of weight zero: fillers=True in Python, "
    "--fillers on the command line, plan.fillers=true in a training configuration."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilledGrouping:
    """A grouping, whose last ``fillers`` groups repeat a trajectory with weight zero."""

    grouping: Grouping
    fillers: int


def plan_filled_groups(
    work: IntervalWork,
    replicas: int,
    capacity: int,
    planner: Planner,
    *,
    fillers: bool,
    trie: PrefixTrie | None = None,
    trajectories: IntArray | None = None,
) -> FilledGrouping:
    """Group and schedule as `plan_groups`; with ``fillers``, also where D divides no count.

    Fillers count in the objective, since they take the time of their tokens, and are used only if
    there is no plan without them.

    Raises:
        PlanError: no plan exists; where fillers would allow one, the message says so.
    """

    def grouped(parts: int) -> Grouping:
        return plan_groups(work, parts, capacity, planner, trie=trie, trajectories=trajectories)

    try:
        return FilledGrouping(grouping=grouped(replicas), fillers=0)
    except PlanError as error:
        # Where D divides N, a microbatch for each trajectory would do: the count is not at fault.
        would_help = replicas > 1 and len(work) % replicas and work.lengths.max() <= capacity
        if would_help and not fillers:
            raise PlanError(f"{error} {WAY_OUT}") from error
        if replicas < 2 or not fillers:
            raise
    return _filled(work, grouped(1).groups, replicas, planner)


def _filled(
    work: IntervalWork, groups: Sequence[IntArray], replicas: int, planner: Planner
) -> FilledGrouping:
    """Bring the count up to a multiple of D, by splits while they cost no more than a filler."""
    filler = _shortest(work)
    length = int(work.lengths[filler])
    split = _cheap_splits(work, groups, -len(groups) % replicas, length)
    missing = -len(split) % replicas
    works = np.append(compact_works(work, split), np.full(missing, length, np.int64))
    schedule = schedule_microbatches if planner == "paper" else level_schedule
    places = schedule(works, replicas)
    grouping = Grouping(
        groups=(*split, *[np.array([filler], np.int64)] * missing),
        works=works,
        replica=places.replica,
        slot=places.slot,
        objective=places.objective,
    )
    return FilledGrouping(grouping=grouping, fillers=missing)


def _shortest(work: IntervalWork) -> int:
    """The first shortest trajectory that predicts a token, so that backward runs everywhere."""
    useful = np.where(work.lengths > 1, work.lengths, np.iinfo(np.int64).max)
    return int(np.argmin(useful))


def _cheap_splits(
    work: IntervalWork, groups: Sequence[IntArray], most: int, limit: int
) -> list[IntArray]:
    """Groups after at most ``most`` splits, cheapest first, of at most ``limit`` tokens each.

    A split between neighbours of a group repeats their LCP, whatever else is split (Eq. 6).
    """
    flat = np.concatenate(groups)
    costs = np.asarray(work.pairwise_lcp(flat[:-1], flat[1:]), np.int64)
    bounds = np.cumsum([group.size for group in groups])[:-1]
    costs[bounds - 1] = np.iinfo(np.int64).max
    cheapest = np.argsort(costs, kind="stable")[:most]
    cuts = cheapest[costs[cheapest] <= limit] + 1
    return in_order(np.split(flat, np.sort(np.append(cuts, bounds))))
