"""The paper's planner: all of section 3.2, as a baseline and as ``--planner paper``.

Base candidates are contiguous, exact for every count of Eq. 8 when N <= N_0 and evolved from the
natural partition for sampled counts beyond. A greedy candidate of any membership is added, some
candidates are refined, each is scheduled, and Eq. 4 decides. docs/paper-planner.md lists what the
paper leaves open and what is chosen here.

Shapes: N trajectories, K microbatches, D replicas; work in compact tokens.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from harts.errors import PlanError
from harts.planning.contiguous import (
    ContiguousTable,
    candidate_counts,
    check_feasible,
    fewest_contiguous,
    least_contiguous_work,
    natural_partition,
)
from harts.planning.evolution import evolve_partition, sampled_counts
from harts.planning.greedy import greedy_plan
from harts.planning.grouping import compact_works, cuts_of, from_cuts
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.local_refinement import most_repaired, refine
from harts.planning.schedule import Objective, schedule_microbatches

EXACT_LIMIT = 512
"""N_0: up to this many trajectories every count of Eq. 8 is solved exactly."""
SAMPLED_COUNTS = 32
"""Q_max: counts of Eq. 8 that are tried beyond N_0."""
REFINED_ANCHORS = 3
"""B_ref: candidates that are refined beyond N_0."""

Origin = Literal["exact", "evolved", "greedy", "refined"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A grouping with its works [K] and where it came from."""

    origin: Origin
    groups: tuple[IntArray, ...]
    works: IntArray

    @property
    def total(self) -> int:
        """Total compact work, the first term of Eq. 4."""
        return int(self.works.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperPlan:
    """The chosen candidate and its schedule.

    ``groups[k]`` are ascending positions in the sorted order, ordered by first member. ``works``,
    ``replica`` and ``slot`` are [K]; ``candidates`` counts what Eq. 4 compared.
    """

    groups: tuple[IntArray, ...]
    works: IntArray
    replica: IntArray
    slot: IntArray
    objective: Objective
    origin: Origin
    candidates: int


def paper_groups(
    work: IntervalWork, replicas: int, capacity: int, most: int | None = None
) -> list[IntArray]:
    """Groups of the paper's plan: ascending positions in the sorted order, by first member.

    With ``most``, only if that plan has at most so many tokens; what cannot is not searched for.

    Raises:
        PlanError: as `paper_plan`, or the plan is heavier than ``most``.
    """
    check_feasible(work, replicas, capacity)
    candidates = paper_candidates(work, replicas, capacity, most)
    return list(_best(work, candidates, replicas, capacity).groups)


def paper_plan(
    work: IntervalWork,
    replicas: int,
    capacity: int,
    *,
    trajectories: IntArray | None = None,
) -> PaperPlan:
    """Plan one step as section 3.2 says.

    Args:
        work: interval work of the N trajectories in lexicographic order.
        replicas: data-parallel degree D.
        capacity: most compact tokens T of one microbatch.
        trajectories: the caller's index of each sorted trajectory, for error messages.

    Equal objectives take the earlier candidate: base by count, then greedy, then refined.

    Raises:
        PlanError: fewer trajectories than replicas, a trajectory above capacity, or no candidate
            whose count D divides.
    """
    check_feasible(work, replicas, capacity, trajectories)
    return _best(work, paper_candidates(work, replicas, capacity), replicas, capacity)


def _best(
    work: IntervalWork, candidates: list[Candidate], replicas: int, capacity: int
) -> PaperPlan:
    if not candidates:
        raise PlanError(
            f"the paper's planner found no grouping of {len(work)} trajectories within "
            f"{capacity:,} tokens each whose count {replicas} replicas divide. Raise the "
            "capacity, use fewer replicas, or add trajectories."
        )
    schedules = [schedule_microbatches(candidate.works, replicas) for candidate in candidates]
    objective, best = min((s.objective, i) for i, s in enumerate(schedules))
    return PaperPlan(
        groups=candidates[best].groups,
        works=candidates[best].works,
        replica=schedules[best].replica,
        slot=schedules[best].slot,
        objective=objective,
        origin=candidates[best].origin,
        candidates=len(candidates),
    )


def paper_candidates(
    work: IntervalWork, replicas: int, capacity: int, most: int | None = None
) -> list[Candidate]:
    """All groupings that Eq. 4 compares; every length must be within ``capacity``.

    With ``most`` those of at most so much total work, which are found without those that have more:
    base candidates are contiguous and boundary refinement keeps them so, so none of them can have
    less than `least_contiguous_work`, and a repair saves no more than `most_repaired`.
    """
    limit = np.iinfo(np.int64).max if most is None else most + most_repaired(work)
    contiguous = 0 if most is None else least_contiguous_work(work, capacity)
    exact = len(work) <= EXACT_LIMIT
    build_base = _exact_candidates if exact else _evolved_candidates
    base = build_base(work, replicas, capacity) if contiguous <= limit else []
    groups = greedy_plan(work, replicas, capacity)
    greedy = None if groups is None else _candidate(work, "greedy", groups)
    anchors = [greedy] if exact else _anchors(base, greedy)
    refined = [
        _candidate(work, "refined", refine(work, list(anchor.groups), capacity))
        for anchor in anchors
        if anchor is not None
        and (anchor.total if cuts_of(list(anchor.groups)) is None else contiguous) <= limit
    ]
    found = base + ([] if greedy is None else [greedy]) + refined
    return [candidate for candidate in found if most is None or candidate.total <= most]


def _exact_candidates(work: IntervalWork, replicas: int, capacity: int) -> list[Candidate]:
    """Exact partition of every count of Eq. 8 that has one."""
    counts = candidate_counts(work, replicas, capacity)
    if not fewest_contiguous(work, capacity) <= counts[-1] <= len(work):
        return []  # the table needs a feasible largest count; a smaller one cannot be feasible
    table = ContiguousTable.build(work, capacity, counts[-1])
    return [
        _candidate(work, "exact", from_cuts(work, table.cuts(count)))
        for count in counts
        if table.total(count) is not None
    ]


def _evolved_candidates(work: IntervalWork, replicas: int, capacity: int) -> list[Candidate]:
    """Natural partition evolved to each sampled count that it reaches."""
    counts = sampled_counts(candidate_counts(work, replicas, capacity), SAMPLED_COUNTS)
    natural = natural_partition(work, capacity)
    partitions = evolve_partition(work, natural, counts, capacity)
    return [_candidate(work, "evolved", from_cuts(work, cuts)) for cuts in partitions.values()]


def _anchors(base: list[Candidate], greedy: Candidate | None) -> list[Candidate]:
    """At most B_ref candidates to refine: greedy, of least work, of count closest to greedy's.

    Ties go to the smaller count; equally close counts to the smaller total first.
    """
    remaining = sorted(base, key=lambda c: (c.total, len(c.groups)))
    if greedy is None:
        return remaining[:1]
    count = len(greedy.groups)
    closest = sorted(remaining[1:], key=lambda c: abs(len(c.groups) - count))
    return [greedy, *remaining[:1], *closest][:REFINED_ANCHORS]


def _candidate(work: IntervalWork, origin: Origin, groups: list[IntArray]) -> Candidate:
    return Candidate(origin=origin, groups=tuple(groups), works=compact_works(work, groups))
