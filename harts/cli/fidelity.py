"""``harts fidelity``: what replay is worth by handoff depth, and how close a compact step is."""

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from harts.files import check_writable, replace_text

if TYPE_CHECKING:
    from harts.bench.replay import ReplayReport
    from harts.bench.step_fidelity import StepReport
    from harts.trajectories import TrajectoryBatch


def fidelity(
    data: Annotated[Path | None, typer.Option(help="A file; default: a synthetic one.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A supported model type (a small random model), a model directory, or table-1 "
            "(the shape of the paper's Table 1 with random weights; needs a large GPU)."
        ),
    ] = "bailing_hybrid",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that are compared.")] = 20_000,
    capacity: Annotated[int, typer.Option(min=1, help="Compact tokens of a microbatch.")] = 65_536,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = (
        "bfloat16"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    pinned: Annotated[
        bool,
        typer.Option(
            "--pinned", help="Give every copy of a prefix the experts that one copy chose."
        ),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the picture here (PNG).")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Compare a compact step, with replay and without, with a trajectory-wise one.

    Logits by handoff depth, then GRPO losses and gradients with recomputation and without.

    Baseline B is trajectory-wise training packed in another way: its difference from baseline A
    is the rounding that ordinary training has anyway.

    Example: harts fidelity --data rollouts.parquet --pinned --plot replay.png
    """
    from transformers.utils import logging

    from harts.bench import replay
    from harts.bench.step_fidelity import compare_steps
    from harts.excerpts import bounded_excerpt, renumber_tokens

    logging.set_verbosity_error()
    for path, what in ((plot, "the picture"), (json, "the figures")):
        if path is not None:
            check_writable(path, what)
    console = Console()
    with console.status("loading") as status:
        sample, vocabulary = renumber_tokens(bounded_excerpt(_batch(data), tokens))
        policy = replay.load_policy(model, vocabulary, dtype, device)
        settings: Any = {"capacity": capacity, "progress": status.update}
        experts = replay.reference_experts(policy, sample, **settings) if pinned else None
        report = replay.measure_replay(policy, sample, experts=experts, **settings)
        steps = compare_steps(policy, sample, experts=experts, **settings)
    _show(console, report, f"{len(sample)} trajectories, {sample.raw_tokens:,} tokens, {dtype}")
    _show_steps(console, steps)
    if plot is not None:
        replay.save_plot(report, plot)
    if json is not None:
        sizes = {"tokens": sample.raw_tokens, "dtype": dtype, "pinned": pinned}
        _write(json, sizes | asdict(report) | asdict(steps))


def _batch(data: Path | None) -> "TrajectoryBatch":
    from harts.synth import synthesize
    from harts.trajectories import read_trajectories

    return read_trajectories(data) if data else synthesize("tiny", 0)


def _write(path: Path, figures: dict[str, Any]) -> None:
    text = json_format.dumps(_environment() | figures, indent=1)
    replace_text(path, text + "\n", "the figures")


def _environment() -> dict[str, Any]:
    """The command line as it was typed, paths aside, the commit, and the machine."""
    import torch

    from harts.bench.measure import commit, environment
    from harts.bench.ops import gpu_environment

    words = [Path(word).name if "/" in word else word for word in sys.argv]
    machine = gpu_environment() if torch.cuda.is_available() else environment()
    return {"command": " ".join(words), "commit": commit(), "environment": machine}


def _show(console: Console, report: "ReplayReport", title: str) -> None:
    names = list(report.mean_cosine)
    console.print(f"Error against baseline A by handoff depth: {title}")
    for what, errors in (
        ("symmetric KL, nats", [row.symmetric_kl for row in report.depths]),
        ("|NLL difference|, nats", [row.nll_difference for row in report.depths]),
    ):
        table = Table(title=what)
        for column in ("depth", "positions", *names):
            table.add_column(column, justify="right", no_wrap=True)
        for row, of in zip(report.depths, errors, strict=True):
            found = (f"{of[name]:.2e}" for name in names)
            table.add_row(str(row.depth), f"{row.positions:,}", *found)
        console.print(table)
    for name in names:
        console.print(f"mean cosine of logits, {name}: {report.mean_cosine[name]:.10f}")
    if all(row.depth == 0 for row in report.depths):
        console.print("No position lies behind a fork, so replay was not tested: raise --tokens.")


def _show_steps(console: Console, report: "StepReport") -> None:
    table = Table(title="a GRPO step against baseline A's, which recomputes nothing")
    for column in ("step", "recompute", "loss", "loss off-policy", "gradient", "its cosine"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.steps:
        table.add_row(
            row.name,
            "yes" if row.recompute else "no",
            f"{row.loss:.1e}",
            f"{row.off_policy_loss:.1e}",
            "-" if row.gradient is None else f"{row.gradient:.2e}",
            "-" if row.gradient_cosine is None else f"{row.gradient_cosine:.8f}",
        )
    console.print(table)
    if any(row.gradient is None for row in report.steps):
        console.print(
            "No gradient was compared: the rewards within each tree are equal, so every advantage "
            "is 0. Raise --tokens, or take data whose rewards differ."
        )
    for name, error in report.logprob_error.items():
        console.print(f"mean log-prob error against float32, {name}: {error:.3e} nats")
