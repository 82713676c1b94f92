"""``harts bench planning``: every planner against bounds and an OR-Tools baseline."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from harts.cli.bench_report import Data, Json, Repeats, check_json, finish, write_figures

if TYPE_CHECKING:
    from harts.bench.measure import Result
    from harts.bench.ortools_baseline import SolverLimits
    from harts.planning.best import Planner


def planning(
    ctx: typer.Context,
    data: Data = None,
    repeats: Repeats = 3,
    json: Json = None,
    steps: Annotated[
        str, typer.Option(help="Synthetic steps, as 1-3,7; none for files only.")
    ] = "1-10",
    replicas: Annotated[str, typer.Option(help="Replica counts D.")] = "2,4",
    capacity: Annotated[
        int, typer.Option(min=1, max=2**63 - 1, help="Compact tokens of a microbatch.")
    ] = 65_536,
    planners: Annotated[str, typer.Option(help="best and others to compare.")] = (
        "best,paper,contiguous,hierarchical"
    ),
    ortools_limits: Annotated[
        str, typer.Option(help="Seconds a tree/a packing of the baseline.")
    ] = "1/10,5/20,20/60",
    no_ortools: Annotated[
        bool, typer.Option("--no-ortools", help="Leave the OR-Tools baseline out.")
    ] = False,
    growth: Annotated[
        Path | None, typer.Option(help="Also measure growing steps, and plot them here (PNG).")
    ] = None,
    growth_tokens: Annotated[int, typer.Option(min=1, help="Largest growing step.")] = 420_000_000,
) -> None:
    """Measure every planner on the steps of the paper's Tables 2 and 3, and on files.

    Example: harts bench planning --steps 1-3 --replicas 4 --no-ortools
    """
    from harts.bench.planning import PlanningOptions, file_workloads, synthetic_workloads

    check_json(json)
    chosen = PlanningOptions(
        replicas=_numbers("replicas", replicas),
        capacity=capacity,
        planners=tuple(cast("list[Planner]", planners.split(","))),
        limits=() if no_ortools else _limits(ortools_limits),
        repeats=repeats,
    )
    numbers = () if steps == "none" else _numbers("steps", steps)
    workloads = [*synthetic_workloads(numbers), *file_workloads(data or [])]
    if not workloads and growth is None:
        raise typer.BadParameter("nothing to plan: give --steps, --data or --growth")
    results, figures = _measure(workloads, chosen, _command(ctx.params, ctx), json)
    if growth is not None:
        grown, figures["growth"] = _growth(growth, growth_tokens)
        results += grown
    finish("planning: best against its bounds", results, figures, json)


def _measure(
    workloads: list[Any], chosen: Any, command: str, json: Path | None
) -> tuple[list["Result"], dict[str, Any]]:
    """Plan everything, show the tables, and keep what is done in ``json`` as the run goes on."""
    from harts.bench.measure import environment
    from harts.bench.planning import Missing, Row, measure_plans
    from harts.bench.planning_bounds import judge_plans
    from harts.cli.planning_tables import show_plans

    figures: dict[str, Any] = {
        "command": command,
        "environment": environment(),
        "load_average": list(os.getloadavg()),
        "capacity": chosen.capacity,
        "plans": [],
        "missing": [],
    }
    rows: list[Row] = []
    missing: list[Missing] = []
    with Console().status("starting") as status:
        for found in measure_plans(workloads, chosen, status.update):
            rows += [row for row in found if isinstance(row, Row)]
            missing += [none for none in found if isinstance(none, Missing)]
            figures["plans"] = [row.to_json() for row in rows]
            figures["missing"] = [asdict(none) for none in missing]
            if json is not None:
                write_figures(json, figures)
    show_plans(rows, missing)
    return judge_plans(rows, chosen.capacity), figures


def _growth(plot: Path, tokens: int) -> tuple[list["Result"], dict[str, Any]]:
    """Measure growing steps up to ``tokens`` and loading, and plot the former."""
    from harts.bench import growth

    with Console().status("growth") as status:
        points = list(growth.measure_growth(tokens, status.update))
        load = growth.measure_load(status.update)
    growth.plot_growth(points, plot)
    figures = {
        "plans": [point.to_json() for point in points],
        "load": {"tokens": load[0], "seconds": load[1]},
    }
    return list(growth.judge_growth(points, load)), figures


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of "1-3,7" in order, each once."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or (last and not last.strip().isdecimal()):
            raise typer.BadParameter(f"--{option} takes numbers and ranges as 1-3,7, got {text!r}")
        if not 1 <= int(first) <= int(last or first):
            raise typer.BadParameter(f"--{option} takes numbers from 1, in order, got {part!r}")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(numbers))


def _limits(text: str) -> tuple["SolverLimits", ...]:
    """The pairs of "1/10,5/20" in seconds."""
    from harts.bench.ortools_baseline import SolverLimits

    try:
        pairs = [tuple(map(float, part.split("/"))) for part in text.split(",")]
        return tuple(SolverLimits(tree_s=tree, packing_s=packing) for tree, packing in pairs)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(
            f"--ortools-limits takes seconds a tree/a packing as 1/10,5/20, got {text!r}"
        ) from error


def _command(options: Mapping[str, Any], ctx: typer.Context) -> str:
    """The command line again, without folders and defaults."""
    defaults = {p.name: p.default for p in ctx.command.params}
    words = ["harts bench planning"]
    words += [f"--data {file.name}" for file in options["data"] or []]
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if option in ("data", "json") or value == defaults[option]:
            continue
        if value is True:
            words.append(flag)
        else:
            words.append(f"{flag} {value.name if isinstance(value, Path) else value}")
    return " ".join(words)
