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
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each file that are compared.")
    ] = 12_000,
    steps: Annotated[int, typer.Option(min=0, help="Optimiser steps compared; 0 for none.")] = 20,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights and metadata.")
    ] = 0,
) -> None:
    """Compare log-probs, losses and every gradient in float64 on the CPU.

    The truth runs each trajectory alone through the library's own forward. Exit status 1 means
    that a bound was passed.

    Example: harts check --data rollouts.parquet --tokens 10000
    """
    from transformers.utils import logging

    from harts.checking import CheckOptions, check_batch, model_builder
    from harts.excerpts import bounded_excerpt
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
        sample = bounded_excerpt(batch, tokens)
        size = f"{len(sample)} trajectories, {sample.raw_tokens:,} tokens"
        table = Table(title=f"{name}: compact against each trajectory alone, float64; {size}")
        # Narrow terminals break the names of parameters, which nobody could guess from a part.
        table.add_column("compared", overflow="fold")
        table.add_column("largest\nrelative error", justify="right", no_wrap=True)
        table.add_column("bound", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        with console.status("starting") as status:
            for row in check_batch(batch, build, options, status.update):
                verdict = "[green]ok[/]" if row.passed else "[bold red]PAST BOUND[/]"
                table.add_row(_short(row.name), f"{row.error:.2e}", f"{row.bound:.0e}", verdict)
                worst = worst and row.passed
        console.print(table)
    if not worst:
        raise typer.Exit(1)


def _short(name: str) -> str:
    """A row's name, with `layer 3.attention...` for `model.layers.3.attention...`."""
    return name.replace("model.layers.", "layer ")
