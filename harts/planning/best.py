"""Choosing memberships: the planners by name, and the best of all of them.

Every planner gives groups of sorted positions; a `Grouping` is such groups with their slots,
replicas and objective. J compares total work first, so of several groupings only those of least
total are balanced further (`harts.planning.balance` never changes a total).

Shapes: N trajectories, K microbatches, D replicas; work in compact tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harts.errors import PlanError
from harts.planning.balance import balance_slots
from harts.planning.contiguous import best_contiguous, check_feasible, least_contiguous_work
from harts.planning.exact import EXACT_LIMIT, exact_groups
from harts.planning.grouping import compact_works, from_cuts
from harts.planning.hierarchical import dissolve_aligned, hierarchical_groups
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.paper import paper_groups
from harts.planning.schedule import Objective, Schedule, level_schedule, schedule_microbatches
from harts.planning.trie import PrefixTrie

Planner = Literal["best", "paper", "contiguous", "hierarchical"]

DISSOLVED_LIMIT = 512
"""N up to which ``best`` takes the microbatches of every planner apart, not of one alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grouping:
    """Microbatches of any membership, each with its place.

    ``groups[k]`` are ascending sorted positions, ordered by first member; ``works``, ``replica``
    and ``slot`` are [K]; ``objective`` is J of Eq. 4.
    """

    groups: tuple[IntArray, ...]
    works: IntArray
    replica: IntArray
    slot: IntArray
    objective: Objective


def plan_groups(
    work: IntervalWork,
    replicas: int,
    capacity: int,
    planner: Planner,
    *,
    trie: PrefixTrie | None = None,
    trajectories: IntArray | None = None,
) -> Grouping:
    """Group and schedule by one planner.

    Args:
        work: interval work of the sorted trajectories.
        replicas: D.
        capacity: T, most compact tokens of one microbatch.
        planner: "paper" keeps the paper's schedule; the others level replica totals.
        trie: the trie of ``work``, if it has been built already.
        trajectories: the caller's index of each sorted trajectory, for error messages.

    Raises:
        PlanError: no plan exists or this planner finds none; says what to change.
    """
    check_feasible(work, replicas, capacity, trajectories)
    trie = PrefixTrie.build(work) if trie is None else trie
    if planner == "paper":
        return _scheduled(
            work, paper_groups(work, replicas, capacity), replicas, schedule_microbatches
        )
    if planner == "contiguous":
        return _scheduled(work, _contiguous(work, replicas, capacity), replicas, level_schedule)
    if planner == "hierarchical":
        groups = hierarchical_groups(work, replicas, capacity, trie)
        return _balanced(work, trie, groups, replicas, capacity)
    return _best(work, trie, replicas, capacity)


def _best(work: IntervalWork, trie: PrefixTrie, replicas: int, capacity: int) -> Grouping:
    """Least J of all planners, of their refinements, and of every partition where N is small.

    With one replica J is the work alone, and no plan has less than one microbatch of everything:
    where that fits, nothing is searched.
    """
    everything = [np.arange(len(work))]
    if replicas == 1 and int(compact_works(work, everything)[0]) <= capacity:
        return _scheduled(work, everything, replicas, level_schedule)
    if len(work) <= EXACT_LIMIT:
        groups = exact_groups(work, replicas, capacity)
        return _scheduled(work, groups, replicas, level_schedule)
    candidates = _candidates(work, trie, replicas, capacity)
    totals = [int(compact_works(work, groups).sum()) for groups in candidates]
    least = [g for g, total in zip(candidates, totals, strict=True) if total == min(totals)]
    plans = [_balanced(work, trie, groups, replicas, capacity) for groups in least]
    return min(plans, key=lambda plan: plan.objective)


def _candidates(
    work: IntervalWork, trie: PrefixTrie, replicas: int, capacity: int
) -> list[list[IntArray]]:
    """Groups of every planner that finds some; of a small step also taken apart again.

    A planner is left out only where no plan of its can have as little work as the first.
    """
    found: list[list[IntArray]] = []
    errors: list[PlanError] = []

    def attempt(planner: Callable[..., list[IntArray]], *arguments: object) -> None:
        try:
            found.append(planner(*arguments))
        except PlanError as error:
            errors.append(error)

    attempt(hierarchical_groups, work, replicas, capacity, trie)
    packed = int(compact_works(work, found[0]).sum()) if found else None
    if packed is None or least_contiguous_work(work, capacity) <= packed:
        attempt(_contiguous, work, replicas, capacity)
    small = len(work) <= DISSOLVED_LIMIT
    attempt(paper_groups, work, replicas, capacity, None if small else packed)
    if small:
        # Of least work at any count, too: what is taken apart may lose just what D asks for.
        for groups in (*found[:], _contiguous(work, 1, capacity)):
            attempt(dissolve_aligned, work, groups, replicas, capacity)
    if not found:
        raise errors[0]
    return found


def _contiguous(work: IntervalWork, replicas: int, capacity: int) -> list[IntArray]:
    return from_cuts(work, best_contiguous(work.lengths, work.lcp, replicas, capacity).cuts)


def _balanced(
    work: IntervalWork, trie: PrefixTrie, groups: list[IntArray], replicas: int, capacity: int
) -> Grouping:
    balanced = balance_slots(work, trie, groups, replicas, capacity)
    before = _scheduled(work, groups, replicas, level_schedule)
    after = _scheduled(work, balanced, replicas, level_schedule)
    return min(after, before, key=lambda plan: plan.objective)


def _scheduled(
    work: IntervalWork,
    groups: list[IntArray],
    replicas: int,
    schedule: Callable[[IntArray, int], Schedule],
) -> Grouping:
    works = compact_works(work, groups)
    places = schedule(works, replicas)
    return Grouping(
        groups=tuple(np.asarray(group, np.int64) for group in groups),
        works=works,
        replica=places.replica,
        slot=places.slot,
        objective=places.objective,
    )
