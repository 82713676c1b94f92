"""``harts inspect``: the trees, the plan and the calls, as tables and pictures."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harts.errors import InputError, UnsupportedError
from harts.forest import PrefixForest
from harts.inspection.facts import choose_microbatch
from harts.inspection.tables import TextTable, all_tables, for_terminal
from harts.planning.best import Planner
from harts.planning.step import StepPlan, plan_step
from harts.trajectories import TrajectoryBatch, read_trajectories

_REPLICAS, _CAPACITY, _CHUNK_SIZE = 1, 65_536, 64


def inspect(
    files: Annotated[list[Path], typer.Argument(help="Parquet or JSON lines, a row a trajectory.")],
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan that `harts plan --json` wrote for these files; else plan now."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help=f"Data-parallel replicas, D; default {_REPLICAS}.")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**63 - 1, help=f"Compact tokens of a microbatch, T; default {_CAPACITY:,}."
        ),
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**63 - 1,
            help=f"Chunk length of linear attention, B; default {_CHUNK_SIZE}.",
        ),
    ] = None,
    planner: Annotated[
        Planner | None, typer.Option(help="How memberships are found; default best.")
    ] = None,
    fillers: Annotated[
        bool, typer.Option("--fillers", help="Let idle replicas repeat a trajectory, weight zero.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the pictures into this folder, as PNG and SVG.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page with all tables and pictures.")
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(min=0, help="Microbatch to show in full; default: most calls.")
    ] = None,
) -> None:
    """Show what to see before believing a plan: trees, cuts, loads and calls.

    Example: harts inspect rollouts.parquet --plan plan.json --html plan.html
    """
    progress = Console(stderr=True)
    with progress.status("reading trajectories"):
        batch = read_trajectories(files)
    with progress.status("planning" if plan is None else "checking the plan"):
        if plan is None:
            step = plan_step(
                batch,
                replicas=_REPLICAS if replicas is None else replicas,
                capacity=_CAPACITY if capacity is None else capacity,
                chunk_size=_CHUNK_SIZE if chunk_size is None else chunk_size,
                planner=planner or "best",
                fillers=fillers,
            )
        else:
            _refuse_plan_options(replicas, capacity, chunk_size, planner, fillers or None)
            step = _load(plan, batch)
    _show(batch, step, choose_microbatch(step, microbatch), out, html)


def _show(
    batch: TrajectoryBatch, step: StepPlan, number: int, out: Path | None, html: Path | None
) -> None:
    # A plan whose one trie saves nothing is of a step that shares nothing.
    forest = PrefixForest.build(batch, share=step.merged_tokens != step.raw_tokens)
    console = Console()
    tables = all_tables(batch, forest, step, number)
    for table in tables:
        console.print(for_terminal(table))
    if out is None and html is None:
        return
    with Console(stderr=True).status("drawing"):
        written = _write(batch, forest, step, number, tables, out, html)
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _refuse_plan_options(*given: object) -> None:
    names = ("--replicas", "--capacity", "--chunk-size", "--planner", "--fillers")
    if wrong := [name for name, value in zip(names, given, strict=True) if value is not None]:
        raise InputError(
            f"--plan already says how the step is planned; got {', '.join(wrong)} as well. Leave "
            "these out, or leave out --plan to make a new plan."
        )


def _load(path: Path, batch: TrajectoryBatch) -> StepPlan:
    from harts.planning.stored import load_plan

    return load_plan(path, batch)


def _write(
    batch: TrajectoryBatch,
    forest: PrefixForest,
    step: StepPlan,
    number: int,
    tables: list[TextTable],
    out: Path | None,
    html: Path | None,
) -> list[Path]:
    """Draw, and write what was asked for; matplotlib is needed only here."""
    try:
        from harts.inspection.html import page, write_page
        from harts.inspection.pictures import draw_all, make_folder, write_pictures
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise UnsupportedError(
            "pictures need matplotlib, which is not installed. Install it "
            "(pip install matplotlib), or leave out --out and --html to see the tables only."
        ) from error
    for folder in filter(None, (out, html and html.parent)):
        make_folder(folder)
    pictures = list(draw_all(batch, forest, step, number))
    written = [] if out is None else write_pictures(pictures, out)
    if html is not None:
        title = (
            f"Plan of {len(batch):,} trajectories in {step.slots} x {step.replicas} microbatches"
        )
        write_page(page(title, tables, pictures), html)
        written.append(html)
    return written
