"""Tables 2 and 3 of the paper for the terminal, from the rows of ``harts bench planning``."""

from collections.abc import Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harts.bench.planning import Missing, Row, balances

WIDTH = 150
"""Columns that the tables need; a narrower terminal wraps their lines."""


def show_plans(rows: Sequence[Row], missing: Sequence[Missing]) -> None:
    """Print work and time (Table 2) and J for each D, then balance (Table 3)."""
    console = Console()
    console.width = max(console.width, WIDTH)
    for replicas in dict.fromkeys(row.replicas for row in rows):
        chosen = [row for row in rows if row.replicas == replicas]
        console.print(_work_table(chosen, replicas))
        console.print(_objective_table(chosen, replicas))
    synthetic = [row for row in rows if row.synthetic]
    if synthetic:
        console.print(_balance_table(synthetic))
    for none in missing:
        console.print(
            f"no plan: {none.workload}, D={none.replicas}, {none.planner}: {none.reason}",
            markup=False,
        )


def _by_workload(rows: Sequence[Row]) -> list[dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.workload, {})[row.planner] = row
    return list(found.values())


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.planner for row in rows))


def _work_table(rows: Sequence[Row], replicas: int) -> Table:
    rivals = _names(rows)[1:]
    table = Table(
        title=f"Table 2, D={replicas}: compact tokens and planning time",
        caption="rivals: compact tokens over best's, planning time over best's",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("workload", "paths", "raw tokens", "compact", "gap", "time"):
        justify: Literal["left", "right"] = "left" if column == "workload" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for name in rivals:
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for plans in _by_workload(rows):
        best = plans["best"]
        table.add_row(
            best.workload,
            f"{best.trajectories:,}",
            f"{best.raw_tokens:,}",
            f"{best.objective.total_work:,}",
            f"{best.gap:.2%}",
            f"{best.planning_s:.3f} s",
            *(_ratios(plans.get(name), best) for name in rivals),
        )
    return table


def _ratios(row: Row | None, best: Row) -> str:
    if row is None:
        return "no plan"
    work = row.objective.total_work / best.objective.total_work
    return f"{work:.6f} x\n{row.planning_s / best.planning_s:.3g} x"


def _objective_table(rows: Sequence[Row], replicas: int) -> Table:
    table = Table(
        title=f"J of Eq. 4, D={replicas}",
        caption="total work, sum of slot maxima, heaviest replica",
    )
    table.add_column("workload")
    names = _names(rows)
    for name in names:
        table.add_column(name, justify="right")
    for plans in _by_workload(rows):
        found = [plans.get(name) for name in names]
        cells = ("\n".join(f"{v:,}" for v in r.objective) if r else "no plan" for r in found)
        table.add_row(plans["best"].workload, *cells)
    return table


def _balance_table(rows: Sequence[Row]) -> Table:
    steps = len({row.workload for row in rows})
    table = Table(title=f"Table 3: imbalance in percent, pooled over {steps} synthetic steps")
    table.add_column("planner")
    for column in ("D", "slots", "slot P50", "slot P95", "totals P50", "totals max"):
        table.add_column(column, justify="right")
    for line in balances(rows):
        shares = (line.slot_p50, line.slot_p95, line.total_p50, line.total_max)
        table.add_row(
            line.planner,
            str(line.replicas),
            str(line.slots),
            *(f"{100 * share:.4f}" for share in shares),
        )
    return table
