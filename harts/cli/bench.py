"""``harts bench NAME``: gate on correctness, then measure; exit 1 past a bound."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from harts.cli.bench_planning import planning
from harts.cli.bench_report import Data, Json, Repeats, check_json, check_names, finish

if TYPE_CHECKING:
    from harts.trajectories import TrajectoryBatch

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure ratios side by side in one run; exit 1 when a figure misses its bound.",
    epilog="Example: harts bench cpu-step --data rollouts.parquet --json figures.json",
)


@bench.command("cpu-step")
def cpu_step(
    data: Data = None,
    repeats: Repeats = 3,
    json: Json = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the measured step.")] = 60_000,
) -> None:
    """Measure a training step on the CPU, shared against trajectory-wise, and its operators.

    Example: harts bench cpu-step --data rollouts.parquet --json figures.json
    """
    from transformers.utils import logging

    from harts.bench import cpu_step as work
    from harts.bench.measure import environment
    from harts.synth import synthesize
    from harts.trajectories import read_trajectories

    # The library's fallbacks, which it warns about, are one of the things measured.
    logging.set_verbosity_error()
    check_json(json)
    batch = read_trajectories(data) if data else synthesize("tiny", 0)
    with Console().status("starting") as status:
        results = work.cpu_step(batch, tokens, repeats, status.update)
    figures = {
        "command": f"harts bench cpu-step --tokens {tokens} --repeats {repeats}",
        "data": [f.name for f in data or []] or ["synthetic tiny, seed 0"],
        "environment": environment(),
    }
    finish(f"cpu-step: medians of {repeats}, side by side", results, figures, json)


@bench.command()
def ops(
    data: Data = None,
    json: Json = None,
    parts: Annotated[str, typer.Option(help="Operators.")] = (
        "delta-rule,attention,convolution,log-probs"
    ),
) -> None:
    """Measure operators on a GPU against yardsticks; files are cut to 65,536 compact rows each.

    Example: harts bench ops --parts attention --json figures.json
    """
    from harts.bench.measure import commit
    from harts.bench.ops import gpu_environment, measure_parts

    check_json(json)
    with Console().status("starting") as status:
        reports = measure_parts(parts.split(","), status.update, data or ())
    files = [f"--data {f.name}" for f in data or ()]
    figures = {
        "command": " ".join([f"harts bench ops --parts {parts}", *files]),
        "environment": {"commit": commit(), **gpu_environment()},
        "figures": {name: report.figures for name, report in reports.items()},
    }
    results = [r for report in reports.values() for r in report.results]
    finish("ops: medians on this GPU", results, figures, json)


@bench.command()
def step(
    data: Data = None,
    repeats: Repeats = 3,
    json: Json = None,
    model: Annotated[
        str, typer.Option(help="table-1, the shape of the paper's Table 1, or small.")
    ] = "table-1",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    microbatches: Annotated[
        int, typer.Option(min=1, help="Compact microbatches of the measured step.")
    ] = 1,
    capacity: Annotated[int, typer.Option(min=1, help="Compact tokens of a microbatch.")] = 65_536,
    recompute: Annotated[
        str, typer.Option(help="What backward makes again: none, selective or full.")
    ] = "selective",
) -> None:
    """Measure a whole model's step, compact against trajectory-wise, by parts of the model.

    Each file is a workload of its own; without files it is table2-1, a synthetic one.

    Example: harts bench step --data rollouts.parquet --json figures.json
    """
    from harts.bench.measure import commit
    from harts.bench.ops import environment_of
    from harts.bench.step import StepBench, measure_steps, model_named
    from harts.errors import PlanError

    check_json(json)
    check_names(data or ())
    with Console().status("starting") as status:
        workloads = _workloads(data or ())
        largest = max(int(batch.tokens.max()) for batch in workloads.values())
        chosen = StepBench(
            model=model_named(model, largest + 1, device),
            device=device,
            capacity=capacity,
            microbatches=microbatches,
            repeats=repeats,
            recompute=recompute,  # type: ignore[arg-type]  # it refuses other names
        )
        try:
            results, measured = measure_steps(workloads, chosen, status.update)
        except PlanError as error:
            hint = "" if data else " The workload is table2-1; --data FILE gives another."
            raise PlanError(f"{error}{hint}") from error
    options = {
        "model": model,
        "device": device,
        "microbatches": microbatches,
        "capacity": capacity,
        "recompute": recompute,
    }
    words = [f"--data {f.name}" for f in data or ()]
    words += [f"--{name} {value}" for name, value in options.items()]
    figures = {
        "command": " ".join(["harts bench step", *words, f"--repeats {repeats}"]),
        "environment": {"commit": commit(), **environment_of(device)},
        "figures": measured,
    }
    finish(f"step: medians of {repeats}, side by side", results, figures, json)


def _workloads(files: Sequence[Path]) -> "dict[str, TrajectoryBatch]":
    """Every file, or a synthetic one where there are none."""
    from harts.synth import synthesize
    from harts.trajectories import read_trajectories

    found = {f.stem: read_trajectories([f]) for f in files}
    return found or {"table2-1": synthesize("table2-1", 0)}


bench.command()(planning)
