"""``harts plan``: microbatches, replicas, slots and linear-attention calls of a file."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harts.files import check_writable
from harts.planning.step import Planner, StepPlan, plan_step
from harts.planning.stored import save_plan
from harts.trajectories import read_trajectories


def plan(
    files: Annotated[list[Path], typer.Argument(help="Parquet or JSON lines, a row a trajectory.")],
    replicas: Annotated[int, typer.Option(min=1, help="Data-parallel replicas, D.")],
    capacity: Annotated[
        int, typer.Option(min=1, max=2**63 - 1, help="Compact tokens a microbatch may hold, T.")
    ],
    chunk_size: Annotated[
        int, typer.Option(min=1, max=2**63 - 1, help="Chunk length of linear attention, B.")
    ] = 64,
    planner: Annotated[Planner, typer.Option(help="How memberships are found.")] = "best",
    fillers: Annotated[
        bool,
        typer.Option(
            "--fillers", help="Fill idle replicas with microbatches of weight zero if need be."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the whole plan here.")] = None,
) -> None:
    """Plan one optimisation step.

    Example: harts plan rollouts.parquet --replicas 4 --capacity 65536 --json plan.json
    """
    if json is not None:
        check_writable(json, "the plan")
    began = time.perf_counter()
    batch = read_trajectories(files)
    loaded = time.perf_counter()
    step = plan_step(
        batch,
        replicas=replicas,
        capacity=capacity,
        chunk_size=chunk_size,
        planner=planner,
        fillers=fillers,
    )
    step = dataclasses.replace(step, timings_s={**step.timings_s, "load": loaded - began})
    if json is not None:
        save_plan(step, json, batch)
    _show(step, len(batch))


def _show(step: StepPlan, trajectories: int) -> None:
    work, slots, replica = step.objective
    rounds = [len(m.calls.rounds) for m in step.microbatches]
    replay = sum(m.calls.replay_tokens for m in step.microbatches)
    fillers = len(step.microbatches) - len(step.counted)
    gap = sum(m.compact_tokens for m in step.counted) / step.lower_bound - 1
    table = Table(title="Plan of one optimisation step", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in (
        ("trajectories", f"{trajectories:,}"),
        ("tokens, each trajectory alone", f"{step.raw_tokens:,}"),
        ("tokens, shared within microbatches", f"{work:,}"),
        ("compression", f"{step.raw_tokens / work:.3f} x"),
        ("lower bound on the plan's tokens (gap)", f"{step.lower_bound:,} ({gap:.2%})"),
        ("microbatches = slots x replicas", f"{step.slots} x {step.replicas}"),
        *([("of them fillers of weight zero", f"{fillers}")] if fillers else []),
        ("sum of slot maxima", f"{slots:,}"),
        ("heaviest replica", f"{replica:,}"),
        ("linear-attention calls a layer, most in a microbatch", f"{max(rounds)}"),
        ("replayed tokens", f"{replay:,} ({replay / work:.2%})"),
        *((f"time: {stage}", f"{t * 1e3:,.1f} ms") for stage, t in step.timings_s.items()),
    ):
        table.add_row(name, value)
    Console().print(table)
