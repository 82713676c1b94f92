"""``harts synth``: write a seeded synthetic workload."""

from pathlib import Path
from typing import Annotated

import typer

from harts.synth import PRESETS, synthesize
from harts.trajectories import write_trajectories


def synth(
    preset: Annotated[str, typer.Option(help=f"One of: {', '.join(PRESETS)}.")],
    out: Annotated[Path, typer.Option(help="A .parquet or .jsonl file to write.")],
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same file.")] = 0,
) -> None:
    """Write a workload shaped like coding agents on rollout trees.

    Example: harts synth --preset tiny --seed 0 --out rollouts.parquet
    """
    batch = synthesize(preset, seed)
    write_trajectories(batch, out)
    typer.echo(f"{out}: {len(batch):,} trajectories, {batch.raw_tokens:,} tokens")
