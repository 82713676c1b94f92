"""``harts bench``: gate on correctness, then measure."""

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table


def bench(
    name: Annotated[Literal["cpu-step"], typer.Argument(help="What to measure.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Trajectory files; default: a synthetic workload.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the measured step.")] = 60_000,
    repeats: Annotated[int, typer.Option(help="Timed rounds; medians are reported.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Measure ratios side by side in one run; exit 1 when a figure misses its bound.

    cpu-step: a training step on the CPU, shared against trajectory-wise, and its operators.

    Example: harts bench cpu-step --data rollouts.parquet --json figures.json
    """
    from transformers.utils import logging

    from harts.bench.cpu_step import cpu_step
    from harts.bench.measure import environment
    from harts.synth import synthesize
    from harts.trajectories import read_trajectories

    # The library's reference paths, which it warns about, are among what is measured.
    logging.set_verbosity_error()
    batch = read_trajectories(data) if data else synthesize("tiny", 0)
    console = Console()
    with console.status("starting") as status:
        results = cpu_step(batch, tokens, repeats, status.update)
    table = Table(title=f"{name}: medians of {repeats}, side by side")
    for column in ("figure", "value", "bound", "", "how"):
        table.add_column(column)
    for r in results:
        verdict = "[green]ok[/]" if r.passed else "[bold red]MISSED[/]"
        bound = f"{'>=' if r.at_least else '<='} {r.bound:g} {r.unit}"
        table.add_row(r.name, f"{r.value:.3f} {r.unit}", bound, verdict, r.detail)
    console.print(table)
    if json is not None:
        command = f"harts bench {name} --tokens {tokens} --repeats {repeats}"
        sources = [f.name for f in data or []] or ["synthetic tiny, seed 0"]
        report = {
            "command": command,
            "data": sources,
            "environment": environment(),
            "results": [{**asdict(r), "passed": r.passed} for r in results],
        }
        json.write_text(json_format.dumps(report, indent=1) + "\n")
    if not all(r.passed for r in results):
        raise typer.Exit(1)
