"""``harts check``: compact execution against each trajectory alone; exit 1 past tolerance."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def check(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Trajectory files, each compared on its own; default: a synthetic one."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="A supported model type (a small random model), or a model directory."),
    ] = "bailing_hybrid",
    tokens: Annotated[int, typer.Option(help="Tokens of each file that are compared.")] = 24_000,
    steps: Annotated[int, typer.Option(help="Optimiser steps compared; 0 for none.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of weights and metadata.")] = 0,
) -> None:
    """Compare log-probs, losses and every gradient in float64 on the CPU.

    The truth runs each trajectory alone through the library's own forward. Exit status 1 means
    that a bound was passed.

    Example: harts check --data rollouts.parquet --tokens 10000
    """
    from transformers.utils import logging

    from harts.checking import CheckOptions, check_batch, model_builder
    from harts.synth import synthesize
    from harts.trajectories import read_trajectories

    # The library's reference paths, which it warns about, are what this compares with.
    logging.set_verbosity_error()
    options = CheckOptions(tokens=tokens, steps=steps, seed=seed)
    build = model_builder(model, seed)
    console = Console()
    worst = True
    batches = {str(f): read_trajectories(f) for f in data or []} or {
        "synthetic (tiny)": synthesize("tiny", seed)
    }
    for name, batch in batches.items():
        table = Table(title=f"{name}: compact against each trajectory alone, float64")
        table.add_column("compared")
        table.add_column("largest relative error", justify="right")
        table.add_column("bound", justify="right")
        table.add_column("")
        with console.status("starting") as status:
            for row in check_batch(batch, build, options, status.update):
                verdict = "[green]ok[/]" if row.passed else "[bold red]PAST BOUND[/]"
                table.add_row(row.name, f"{row.error:.2e}", f"{row.bound:.0e}", verdict)
                worst = worst and row.passed
        console.print(table)
    if not worst:
        raise typer.Exit(1)
