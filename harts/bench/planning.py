"""``harts bench planning``: Tables 2 and 3 of the paper, for every planner and the baseline.

Every plan is checked against raw tokens before any figure is given. Planning time is forest,
microbatches and calls; loading is apart.

Shapes: S semantic positions · N trajectories · K microbatches · D replicas; work in compact tokens.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from harts.bench.ortools_baseline import PartitionTable, SolverLimits, ortools_plan
from harts.bench.ortools_models import require_ortools
from harts.bench.plan_oracle import (
    PlannedStep,
    PrefixOracle,
    check_bound,
    check_forest,
    check_planned_step,
)
from harts.errors import InputError, PlanError
from harts.forest import PrefixForest
from harts.planning.best import Planner
from harts.planning.intervals import IntervalWork
from harts.planning.schedule import Objective
from harts.planning.step import StepPlan, plan_step
from harts.synth import synthesize
from harts.trajectories import TrajectoryBatch, read_trajectories

Progress = Callable[[str], None]

PLANNERS: tuple[Planner, ...] = get_args(Planner)
LIMITS = tuple(
    SolverLimits(tree_s=tree, packing_s=packing) for tree, packing in ((1, 10), (5, 20), (20, 60))
)
STEPS = tuple(range(1, 11))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """What is planned, by whom.

    Attributes:
        replicas: values of D.
        capacity: T.
        planners: of HARTS; "best", which the others are compared with, is among them.
        limits: the baseline's time limits; none leaves the baseline out.
        repeats: plans by "best" that are timed; the one of median time is reported.
    """

    replicas: tuple[int, ...] = (2, 4)
    capacity: int = 65_536
    planners: tuple[Planner, ...] = PLANNERS
    limits: tuple[SolverLimits, ...] = LIMITS
    repeats: int = 3

    def __post_init__(self) -> None:
        unknown = [p for p in self.planners if p not in PLANNERS]
        if unknown or "best" not in self.planners:
            raise InputError(
                f"planners must be among {', '.join(PLANNERS)} and hold 'best', got "
                f"{', '.join(self.planners)}"
            )
        if not self.replicas or min(*self.replicas, self.capacity, self.repeats) < 1:
            raise InputError(f"replicas, capacity and repeats must be at least 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Trajectories to plan, made or read when their turn comes."""

    name: str
    synthetic: bool
    load: Callable[[], TrajectoryBatch]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One plan of one workload: what Tables 2 and 3 are made of."""

    workload: str
    synthetic: bool
    trajectories: int
    raw_tokens: int
    merged_tokens: int
    lower_bound: int
    replicas: int
    planner: str
    objective: Objective
    slot_works: NDArray[np.int64]
    """[K/D, D] compact work of every slot and replica."""
    seconds: Mapping[str, float]
    note: str = ""

    @property
    def planning_s(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())

    @property
    def gap(self) -> float:
        """Total work above the lower bound, as a fraction of it."""
        return self.objective.total_work / self.lower_bound - 1

    def to_json(self) -> dict[str, Any]:
        """Every figure, and the works that the imbalances come from."""
        figures = asdict(self)
        figures["objective"] = list(self.objective)
        figures["slot_works"] = self.slot_works.tolist()
        return {**figures, "planning_s": self.planning_s, "gap": self.gap}


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A planner that found no plan, and why."""

    workload: str
    replicas: int
    planner: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A line of Table 3: imbalances (Eq. 23) as fractions, pooled over steps."""

    planner: str
    replicas: int
    slots: int
    slot_p50: float
    slot_p95: float
    total_p50: float
    total_max: float


def synthetic_workloads(steps: Sequence[int]) -> list[Workload]:
    """The steps of the paper's Table 2 by number, seed 0.

    Raises:
        InputError: a number outside 1 to 10.
    """
    if wrong := sorted(set(steps) - set(STEPS)):
        raise InputError(f"steps must be within 1 to 10, got {wrong}")

    def make(step: int) -> Callable[[], TrajectoryBatch]:
        return lambda: synthesize(f"table2-{step}", 0)

    return [Workload(name=f"step {s}", synthetic=True, load=make(s)) for s in steps]


def file_workloads(files: Sequence[Path]) -> list[Workload]:
    """One workload a file, named by the file; equal names are numbered."""

    def make(file: Path) -> Callable[[], TrajectoryBatch]:
        return lambda: read_trajectories([file])

    stems = [file.stem for file in files]
    names = [
        stem if stems.count(stem) == 1 else f"{stem} ({stems[:i].count(stem) + 1})"
        for i, stem in enumerate(stems)
    ]
    return [
        Workload(name=name, synthetic=False, load=make(file))
        for name, file in zip(names, files, strict=True)
    ]


def measure_plans(
    workloads: Sequence[Workload], options: PlanningOptions, progress: Progress
) -> Iterator[list[Row | Missing]]:
    """Plan and check one workload after another; the rows of each.

    Raises:
        PlanError: "best" finds no plan, or a plan is not what it says.
        HartsError: OR-Tools is not installed.
    """
    if options.limits:
        require_ortools()
    for number, workload in enumerate(workloads, 1):
        yield _measure(workload, options, _prefixed(progress, f"{number}/{len(workloads)}"))


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda message: progress(f"{prefix} {message}")


def _measure(
    workload: Workload, options: PlanningOptions, progress: Progress
) -> list[Row | Missing]:
    progress(f"{workload.name}: loading")
    batch = workload.load()
    progress(f"{workload.name}: numbering prefixes for the independent check")
    oracle = PrefixOracle.build(batch)
    baseline = _Baseline(batch)
    check_forest(baseline.forest, oracle)
    rows: list[Row | Missing] = []
    for replicas in options.replicas:
        progress(f"{workload.name}, D={replicas}: best")
        best, bound = _timed_plan(batch, replicas, options)
        found: dict[str, PlannedStep | str] = {"best": best}
        for planner in options.planners:
            if planner != "best":
                progress(f"{workload.name}, D={replicas}: {planner}")
                found[planner] = _plan_or_reason(batch, replicas, options, planner)
        for limits in options.limits:
            name = f"OR-Tools {limits}"
            say = _prefixed(progress, f"{workload.name}, D={replicas}: {name},")
            found[name] = baseline.plan(replicas, options.capacity, limits, say)
        for name, plan in found.items():
            if isinstance(plan, str):
                rows.append(
                    Missing(workload=workload.name, replicas=replicas, planner=name, reason=plan)
                )
                continue
            label = f"{workload.name}, D={replicas}, {name}"
            check_planned_step(label, plan, oracle, replicas, options.capacity)
            check_bound(label, bound, plan)
            rows.append(_row(workload, batch, oracle, bound, replicas, name, plan))
    return rows


def _row(
    workload: Workload,
    batch: TrajectoryBatch,
    oracle: PrefixOracle,
    bound: int,
    replicas: int,
    planner: str,
    plan: PlannedStep,
) -> Row:
    return Row(
        workload=workload.name,
        synthetic=workload.synthetic,
        trajectories=len(batch),
        raw_tokens=batch.raw_tokens,
        merged_tokens=oracle.merged_tokens,
        lower_bound=bound,
        replicas=replicas,
        planner=planner,
        objective=plan.objective,
        slot_works=plan.slot_works(),
        seconds=plan.seconds,
        note=plan.note,
    )


def _timed_plan(
    batch: TrajectoryBatch, replicas: int, options: PlanningOptions
) -> tuple[PlannedStep, int]:
    """The plan by "best" whose time is the median of the repeats, and the lower bound."""
    plans = [_plan(batch, replicas, options, "best") for _ in range(options.repeats)]
    steps = sorted((PlannedStep.of(plan) for plan in plans), key=lambda step: step.planning_s)
    return steps[len(steps) // 2], max(plan.lower_bound for plan in plans)


def _plan_or_reason(
    batch: TrajectoryBatch, replicas: int, options: PlanningOptions, planner: Planner
) -> PlannedStep | str:
    try:
        return PlannedStep.of(_plan(batch, replicas, options, planner))
    except PlanError as error:
        return str(error)


def _plan(
    batch: TrajectoryBatch, replicas: int, options: PlanningOptions, planner: Planner
) -> StepPlan:
    return plan_step(batch, replicas=replicas, capacity=options.capacity, planner=planner)


class _Baseline:
    """The baseline on one batch, with the partitions of its trees kept over D."""

    def __init__(self, batch: TrajectoryBatch) -> None:
        began = time.perf_counter()
        self.forest = PrefixForest.build(batch)
        self.work = IntervalWork.build(self.forest.lengths, self.forest.lcp)
        self.forest_s = time.perf_counter() - began
        self.tree_ids = [batch.tree_ids[row] for row in self.forest.members.tolist()]
        self.table = PartitionTable()

    def plan(
        self, replicas: int, capacity: int, limits: SolverLimits, progress: Progress
    ) -> PlannedStep | str:
        """The plan within ``limits``, or why there is none."""
        try:
            plan = ortools_plan(
                self.work,
                self.tree_ids,
                replicas,
                capacity,
                limits,
                table=self.table,
                progress=progress,
            )
        except PlanError as error:
            return str(error)
        return PlannedStep(
            members=tuple(self.forest.members[group] for group in plan.groups),
            replica=plan.replica,
            slot=plan.slot,
            works=plan.works,
            objective=plan.objective,
            seconds={"forest": self.forest_s, "microbatches": plan.seconds},
            note=f"{plan.proved} of {plan.solves} models solved to proven optimality",
        )


def balances(rows: Sequence[Row]) -> list[Balance]:
    """Table 3 of rows of several steps: a line for each D and planner, in order of appearance."""
    lines = []
    for replicas, planner in dict.fromkeys((row.replicas, row.planner) for row in rows):
        grids = [r.slot_works for r in rows if (r.replicas, r.planner) == (replicas, planner)]
        slots = np.concatenate([_imbalance(grid) for grid in grids])
        totals = [float(_imbalance(grid.sum(axis=0, keepdims=True))[0]) for grid in grids]
        lines.append(
            Balance(
                planner=planner,
                replicas=replicas,
                slots=slots.size,
                slot_p50=float(np.percentile(slots, 50)),
                slot_p95=float(np.percentile(slots, 95)),
                total_p50=median(totals),
                total_max=max(totals),
            )
        )
    return lines


def _imbalance(works: NDArray[np.int64]) -> NDArray[np.float64]:
    """Eq. 23 of every row of ``works[n, D]``: the heaviest over the mean, less one."""
    return np.asarray(works.max(axis=1) / works.mean(axis=1) - 1, np.float64)
