"""What ``harts bench planning`` must show: each acceptance figure beside its bound."""

from collections.abc import Iterator, Sequence

from harts.bench.measure import Result
from harts.bench.planning import Row, balances

STATED_CAPACITY = 65_536
"""T that the bounds on gap and balance are for."""
STATED_REPLICAS = 4
"""D that the bounds on balance are for."""
STEP_TOKENS = 42_329_859
"""S of the paper's first step, which the bound on time is for."""


def judge_plans(rows: Sequence[Row], capacity: int) -> list[Result]:
    """Bounds on "best": against every rival, and on synthetic steps against the paper's figures."""
    results = list(_against_rivals(rows))
    synthetic = [row for row in rows if row.synthetic and row.planner == "best"]
    if synthetic and capacity == STATED_CAPACITY:
        results += _gaps(synthetic)
        results += _balance([row for row in synthetic if row.replicas == STATED_REPLICAS])
    if synthetic:
        results += _times(synthetic)
    return results


def _against_rivals(rows: Sequence[Row]) -> Iterator[Result]:
    best = {(row.workload, row.replicas): row for row in rows if row.planner == "best"}
    for planner in dict.fromkeys(row.planner for row in rows if row.planner != "best"):
        rivals = [row for row in rows if row.planner == planner]
        lost = [r for r in rivals if r.objective < best[r.workload, r.replicas].objective]
        yield Result(
            name=f"plans in which {planner} has the smaller J",
            value=len(lost),
            unit="plans",
            bound=0,
            detail=", ".join(f"{r.workload} D={r.replicas}" for r in lost) or f"of {len(rivals)}",
        )


def _gaps(rows: Sequence[Row]) -> Iterator[Result]:
    for replicas in dict.fromkeys(row.replicas for row in rows):
        worst = max((row for row in rows if row.replicas == replicas), key=lambda row: row.gap)
        yield Result(
            name=f"largest gap to the lower bound, D={replicas}",
            value=100 * worst.gap,
            unit="%",
            bound=1.5,
            detail=f"{worst.workload}: {worst.objective.total_work:,} / {worst.lower_bound:,}",
        )


def _balance(rows: Sequence[Row]) -> Iterator[Result]:
    for line in balances(rows):
        pooled = f"{line.slots} slots of {len(rows)} steps"
        for name, value, bound, paper in (
            ("imbalance within a slot, P50", line.slot_p50, 0.03, "0.0247"),
            ("imbalance within a slot, P95", line.slot_p95, 1.0, "2.1379"),
            ("imbalance of step totals, P50", line.total_p50, 0.1, "0.2607"),
            ("imbalance of step totals, largest", line.total_max, 0.5, "1.1050"),
        ):
            yield Result(
                name=f"{name}, D={line.replicas}",
                value=100 * value,
                unit="%",
                bound=bound,
                detail=f"{pooled}; paper {paper}",
            )


def _times(rows: Sequence[Row]) -> Iterator[Result]:
    slowest = max(rows, key=lambda row: row.planning_s / row.raw_tokens)
    stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in slowest.seconds.items())
    yield Result(
        name="planning time for 42M tokens",
        value=slowest.planning_s / slowest.raw_tokens * STEP_TOKENS,
        unit="s",
        bound=0.5,
        detail=f"from {slowest.workload}, {slowest.raw_tokens / 1e6:.1f}M tokens: {stages} s",
    )
    longest = max(rows, key=lambda row: row.seconds["calls"])
    yield Result(
        name="call planning of a whole step",
        value=longest.seconds["calls"],
        unit="s",
        bound=0.1,
        detail=longest.workload,
    )
