"""``harts train``: a training run from a configuration file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harts.errors import HartsError

if TYPE_CHECKING:
    from harts.planning.step import StepPlan
    from harts.training.config import TrainConfig
    from harts.training.loop import Observer
    from harts.training.metrics import StepMetrics
    from harts.training.run import RunReport


def train(
    config: Annotated[Path, typer.Argument(help="A YAML file; see examples/tiny.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, nested with dots."),
    ] = None,
) -> None:
    """Train a model on rollout trees, or go on with a run that was stopped.

    The run directory gets checkpoints, metrics (JSON lines and TensorBoard) and a plot. The same
    command again goes on from the newest checkpoint, to the same numbers. Exit status 1 means that
    the comparison with trajectory-wise training passed its bound.

    With engine: megatron, torchrun starts it, one process a GPU:
    torchrun --nproc-per-node 8 --no-python harts train CONFIG.yaml

    Example: harts train examples/tiny.yaml data=rollouts.jsonl optimizer.learning_rate=1e-3
    """
    from harts.training.report import final_table, write_summary
    from harts.training.run import how_to_go_on

    with _heard_once():
        settings, run = _prepared(config, overrides or [])
        # On Megatron one process of many speaks.
        leads = settings.engine == "huggingface" or int(os.environ["RANK"]) == 0
        try:
            with _Display(settings.steps) if leads else _Silence() as display:
                report = run(settings, display)
        except KeyboardInterrupt:
            if leads:
                typer.echo(f"stopped; {how_to_go_on(settings)}", err=True)
            raise typer.Exit(130) from None
    if report is None:
        return
    write_summary(report)
    console = Console()
    console.print(final_table(report))
    for name, path in (
        ("checkpoint", report.checkpoint),
        ("metrics", report.directory / "metrics.jsonl"),
        ("plot", report.directory / "loss.png"),
    ):
        console.print(f"[bold]{name:<11}[/]{path}", highlight=False, soft_wrap=True)
    if report.fidelity is not None and not report.fidelity.passed:
        raise typer.Exit(1)


def _prepared(
    path: Path, overrides: list[str]
) -> tuple[TrainConfig, Callable[[TrainConfig, Observer], RunReport | None]]:
    """The configuration, and what trains under it."""
    from harts.training.config import load_config
    from harts.training.parallel import check_launch

    settings = load_config(path, overrides)
    if settings.engine == "megatron":
        check_launch(settings.megatron, os.environ)
        from harts.megatron.training import train as on_megatron

        return settings, on_megatron
    from harts.training.run import train as in_one_process

    return settings, in_one_process


@contextlib.contextmanager
def _heard_once() -> Iterator[None]:
    """Of processes on one machine that find the same fault, let the first one say so."""
    try:
        yield
    except HartsError:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise typer.Exit(2) from None


class _Silence:
    """Shows nothing of a run."""

    def __enter__(self) -> _Silence:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def message(self, text: str) -> None:
        """Say nothing."""

    def working(self, text: str) -> None:
        """Say nothing."""

    def planned(self, step: int, plan: StepPlan) -> None:
        """Say nothing."""

    def microbatch_done(self) -> None:
        """Say nothing."""

    def step_done(self, metrics: StepMetrics) -> None:
        """Say nothing."""


class _Display:
    """Shows a run: one bar over its steps, and what the newest one measured."""

    def __init__(self, steps: int) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._steps = steps
        self._task: TaskID | None = None
        self._after: TaskID | None = None
        self._microbatches = (0, 0)

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._after is not None:
            self._progress.remove_task(self._after)
        self._progress.stop()

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def working(self, text: str) -> None:
        """Show what goes on after the steps."""
        if self._after is None:
            self._after = self._progress.add_task("comparing", total=None, note="")
        self._progress.update(self._after, note=text)

    def planned(self, step: int, plan: StepPlan) -> None:
        """Show which step runs."""
        if self._task is None:
            self._task = self._progress.add_task(
                "training", total=self._steps, completed=step - 1, note=""
            )
        self._microbatches = (0, len(plan.microbatches))

    def microbatch_done(self) -> None:
        """Move the bar by a part of a step."""
        assert self._task is not None
        self._progress.advance(self._task, 1 / self._microbatches[1])

    def step_done(self, metrics: StepMetrics) -> None:
        """Show what the step measured."""
        assert self._task is not None
        margin = "" if metrics.margin is None else f"  margin {metrics.margin:+.3f}"
        saved = f"{metrics.raw_tokens:,} to {metrics.compact_tokens:,} tokens"
        self._progress.update(
            self._task, completed=metrics.step, note=f"loss {metrics.loss:+.4f}{margin}  {saved}"
        )
