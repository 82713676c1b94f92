"""``harts bench``: gate on correctness, then measure."""

import json as json_format
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from harts.files import check_writable, replace_text

if TYPE_CHECKING:
    from harts.bench.measure import Result
    from harts.bench.ortools_baseline import SolverLimits

Benchmark = Literal["cpu-step", "planning", "ops"]

OPTIONS_OF: dict[Benchmark, dict[str, object]] = {
    "cpu-step": {"tokens": 60_000},
    "planning": {
        "steps": "1-10",
        "replicas": "2,4",
        "capacity": 65_536,
        "planners": "best,paper,contiguous,hierarchical",
        "ortools_limits": "1/10,5/20,20/60",
        "no_ortools": False,
        "growth": None,
        "growth_tokens": 420_000_000,
    },
    "ops": {"parts": "delta-rule,attention,convolution,log-probs"},
}
"""Options that belong to one benchmark, and the defaults that stand for None."""


def _own(benchmark: Benchmark, help: str, *flags: str, **bounds: Any) -> Any:
    """An option of one benchmark, on a panel of its own; ``bounds`` are min and max."""
    return typer.Option(*flags, help=help, rich_help_panel=f"Options of {benchmark}", **bounds)


Tokens = Annotated[
    int | None, _own("cpu-step", "Tokens of the measured step (default 60000).", min=1)
]
Steps = Annotated[
    str | None, _own("planning", "Synthetic steps, as 1-3,7; none for files only (default 1-10).")
]
Replicas = Annotated[str | None, _own("planning", "Replica counts D (default 2,4).")]
Capacity = Annotated[
    int | None,
    _own("planning", "Compact tokens of a microbatch (default 65536).", min=1, max=2**63 - 1),
]
Planners = Annotated[str | None, _own("planning", "best and others to compare (default all).")]
OrtoolsLimits = Annotated[
    str | None,
    _own("planning", "Seconds a tree/a packing of the baseline (default 1/10,5/20,20/60)."),
]
NoOrtools = Annotated[
    bool | None, _own("planning", "Leave the OR-Tools baseline out.", "--no-ortools")
]
Growth = Annotated[
    Path | None, _own("planning", "Also measure growing steps, and plot them here (PNG).")
]
GrowthTokens = Annotated[
    int | None, _own("planning", "Largest growing step (default 420000000).", min=1)
]
Parts = Annotated[
    str | None,
    _own("ops", "Operators (default delta-rule,attention,convolution,log-probs)."),
]


def bench(
    name: Annotated[Benchmark, typer.Argument(help="What to measure.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Trajectory files; default: synthetic workloads.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    tokens: Tokens = None,
    steps: Steps = None,
    replicas: Replicas = None,
    capacity: Capacity = None,
    planners: Planners = None,
    ortools_limits: OrtoolsLimits = None,
    no_ortools: NoOrtools = None,
    growth: Growth = None,
    growth_tokens: GrowthTokens = None,
    parts: Parts = None,
) -> None:
    """Measure ratios side by side in one run; exit 1 when a figure misses its bound.

    cpu-step: a training step on the CPU, shared against trajectory-wise, and its operators.

    planning: every planner and an OR-Tools baseline on the steps of the paper's Tables 2 and 3.

    ops: operators on a GPU, against yardsticks.

    Example: harts bench cpu-step --data rollouts.parquet --json figures.json

    Example: harts bench planning --steps 1-3 --replicas 4 --no-ortools
    """
    given = {
        "tokens": tokens,
        "steps": steps,
        "replicas": replicas,
        "capacity": capacity,
        "planners": planners,
        "ortools_limits": ortools_limits,
        "no_ortools": no_ortools,
        "growth": growth,
        "growth_tokens": growth_tokens,
        "parts": parts,
    }
    options = _options_of(name, given)
    if json is not None:
        check_writable(json, "the figures")
    if name == "cpu-step":
        results, figures = _cpu_step(data, repeats, options)
        title = f"{name}: medians of {repeats}, side by side"
    elif name == "ops":
        results, figures = _ops(options)
        title = f"{name}: medians on this GPU"
    else:
        results, figures = _planning(data, repeats, json, options)
        title = f"{name}: best against its bounds"
    _show(title, results)
    if json is not None:
        _write(json, {**figures, "results": [{**asdict(r), "passed": r.passed} for r in results]})
    if not all(r.passed for r in results):
        raise typer.Exit(1)


def _options_of(name: Benchmark, given: dict[str, Any]) -> dict[str, Any]:
    """Values of the benchmark's own options; those of another one are refused."""
    for other in get_args(Benchmark):
        for option in OPTIONS_OF[other] if other != name else ():
            if given[option] is not None:
                flag = f"--{option.replace('_', '-')}"
                raise typer.BadParameter(f"{flag} is an option of {other}, not of {name}")
    defaults = OPTIONS_OF[name].items()
    return {k: default if given[k] is None else given[k] for k, default in defaults}


def _cpu_step(
    data: list[Path] | None, repeats: int, options: dict[str, Any]
) -> tuple[list["Result"], dict[str, Any]]:
    from transformers.utils import logging

    from harts.bench.cpu_step import cpu_step
    from harts.bench.measure import environment
    from harts.synth import synthesize
    from harts.trajectories import read_trajectories

    # The library's reference paths, which it warns about, are among what is measured.
    logging.set_verbosity_error()
    batch = read_trajectories(data) if data else synthesize("tiny", 0)
    with Console().status("starting") as status:
        results = cpu_step(batch, options["tokens"], repeats, status.update)
    return results, {
        "command": f"harts bench cpu-step --tokens {options['tokens']} --repeats {repeats}",
        "data": [f.name for f in data or []] or ["synthetic tiny, seed 0"],
        "environment": environment(),
    }


def _ops(options: dict[str, Any]) -> tuple[list["Result"], dict[str, Any]]:
    from harts.bench.measure import commit
    from harts.bench.ops import gpu_environment, measure_parts

    names = options["parts"].split(",")
    with Console().status("starting") as status:
        reports = measure_parts(names, status.update)
    return [r for report in reports.values() for r in report.results], {
        "command": f"harts bench ops --parts {','.join(names)}",
        "environment": {"commit": commit(), **gpu_environment()},
        "figures": {name: report.figures for name, report in reports.items()},
    }


def _planning(
    data: list[Path] | None, repeats: int, json: Path | None, options: dict[str, Any]
) -> tuple[list["Result"], dict[str, Any]]:
    """Plan everything, show the tables, and keep what is done in ``json`` as the run goes on."""
    from harts.bench.measure import environment
    from harts.bench.planning import (
        Missing,
        PlanningOptions,
        Row,
        file_workloads,
        measure_plans,
        synthetic_workloads,
    )
    from harts.bench.planning_bounds import judge_plans
    from harts.cli.planning_tables import show_plans

    chosen = PlanningOptions(
        replicas=_numbers("replicas", options["replicas"]),
        capacity=options["capacity"],
        planners=tuple(options["planners"].split(",")),
        limits=() if options["no_ortools"] else _limits(options["ortools_limits"]),
        repeats=repeats,
    )
    steps = () if options["steps"] == "none" else _numbers("steps", options["steps"])
    workloads = [*synthetic_workloads(steps), *file_workloads(data or [])]
    if not workloads and options["growth"] is None:
        raise typer.BadParameter("nothing to plan: give --steps, --data or --growth")
    figures: dict[str, Any] = {
        "command": _command(data, repeats, options),
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
                _write(json, figures)
    show_plans(rows, missing)
    results = judge_plans(rows, chosen.capacity)
    if options["growth"] is not None:
        grown, figures["growth"] = _growth(options["growth"], options["growth_tokens"])
        results += grown
    return results, figures


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


def _command(data: list[Path] | None, repeats: int, options: dict[str, Any]) -> str:
    """The command line again, without folders."""
    words = ["harts bench planning"]
    words += [f"--data {file.name}" for file in data or []]
    words.append(f"--repeats {repeats}")
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value not in (None, False) and value != OPTIONS_OF["planning"][option]:
            words.append(f"{flag} {value.name if isinstance(value, Path) else value}")
    return " ".join(words)


def _show(title: str, results: Sequence["Result"]) -> None:
    table = Table(title=title)
    for column in ("figure", "value", "bound", "", "how"):
        table.add_column(column)
    for r in results:
        verdict = "[green]ok[/]" if r.passed else "[bold red]MISSED[/]"
        bound = f"{'>=' if r.at_least else '<='} {r.bound:g} {r.unit}"
        table.add_row(r.name, f"{r.value:.3f} {r.unit}", bound, verdict, r.detail)
    Console().print(table)


def _write(path: Path, report: dict[str, Any]) -> None:
    replace_text(path, json_format.dumps(report, indent=1) + "\n", "the figures")
