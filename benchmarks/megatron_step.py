"""A training step on Megatron-core, compact against trajectory-wise, under one configuration.

    torchrun --nproc-per-node 2 benchmarks/megatron_step.py dp2-ep2 --layers 4
    torchrun --nproc-per-node 8 benchmarks/megatron_step.py dp2-tp2-pp2-ep4 --json figures.json

A configuration names its parallel sizes: dp, tp (with sequence parallelism), pp, cp and ep, those
that are not named being 1. For 2 GPUs: dp2-ep2, tp2-ep2, pp2, cp2; for 4: tp2-pp2-ep2,
dp2-tp2-ep4, tp2-cp2-ep4, dp2-pp2-ep2; for 8, as in the paper's Table 4: dp4-tp2-ep8, dp2-pp4-ep2,
dp2-tp2-pp2-ep4. The model has the shape of the paper's Table 1, cut to --layers, in bfloat16.

Needs one GPU a process. Exits 1 when the conversion, speed-up over row compression, is below 0.88.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from harts.bench.cpu_step import SMALL_MODEL
from harts.bench.measure import commit, environment
from harts.bench.megatron_grid import Grid
from harts.bench.megatron_step import ALONE, COMPACT, REPACKED, MegatronBench, measure
from harts.bench.step import TABLE_1_MODEL
from harts.cli.bench_report import check_json, write_figures
from harts.errors import HartsError, InputError
from harts.megatron.launch import process_groups
from harts.synth import synthesize
from harts.training.model import ModelConfig
from harts.trajectories import TrajectoryBatch, read_trajectories

CONVERSION = 0.88
"""Least speed-up over row compression."""


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configuration", help="parallel sizes, such as dp2-tp2-ep4")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model, 24 at most")
    parser.add_argument("--capacity", type=int, help="compact tokens of a microbatch; 65536")
    parser.add_argument(
        "--microbatches",
        type=int,
        help="compact microbatches of a replica; 2, or 4 for each pipeline stage",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each kind")
    parser.add_argument("--no-recompute", action="store_true", help="keep activations")
    parser.add_argument("--no-fidelity", action="store_true", help="times only")
    parser.add_argument("--data", type=Path, nargs="*", help="trajectory files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, for tests")
    return parser.parse_args(arguments)


def shape(chosen: argparse.Namespace, batch: TrajectoryBatch) -> ModelConfig:
    if chosen.tiny:
        config = SMALL_MODEL | {
            "vocab_size": int(batch.tokens.max()) + 1,
            "num_experts_per_token": 4,
            "topk_group": 2,
        }
        return ModelConfig(model_type="bailing_hybrid", config=config)
    layers, most = chosen.layers, TABLE_1_MODEL["num_hidden_layers"]
    if not 1 <= layers <= most:
        raise InputError(f"--layers must be from 1 to {most}, got {layers}")
    config = TABLE_1_MODEL | {
        "num_hidden_layers": layers,
        "layer_types": TABLE_1_MODEL["layer_types"][:layers],
    }
    return ModelConfig(model_type="bailing_hybrid", config=config, dtype="bfloat16")


def bench_of(chosen: argparse.Namespace, batch: TrajectoryBatch, grid: Grid) -> MegatronBench:
    model = shape(chosen, batch)
    usual = 2 if grid.pp == 1 else 4 * grid.pp
    return MegatronBench(
        model=model,
        vocabulary=model.config["vocab_size"],
        grid=grid,
        device="cpu" if chosen.tiny else "cuda",
        capacity=chosen.capacity or (1_024 if chosen.tiny else 65_536),
        microbatches=chosen.microbatches or usual,
        repeats=chosen.repeats,
        recompute=not chosen.no_recompute,
        fidelity=not chosen.no_fidelity,
    )


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Everything but the process group; the same figures on every rank."""
    check_json(chosen.json)
    processes = dist.get_world_size() if chosen.tiny else int(os.environ["WORLD_SIZE"])
    grid = Grid.named(chosen.configuration, processes)
    batch = (
        read_trajectories(chosen.data)
        if chosen.data
        else synthesize("tiny" if chosen.tiny else "table2-1", 0)
    )
    began = time.perf_counter()

    def progress(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    with process_groups(grid.sizes):
        figures = measure(batch, bench_of(chosen, batch, grid), progress)
        if dist.get_rank() == 0:
            report(chosen, figures)
    return figures


def report(chosen: argparse.Namespace, figures: dict[str, Any]) -> None:
    show(chosen.configuration, figures)
    if chosen.json is not None:
        figures = {
            "command": f"benchmarks/megatron_step.py {' '.join(sys.argv[1:])}",
            "environment": described(chosen.tiny),
            "configuration": chosen.configuration,
            "layers": None if chosen.tiny else chosen.layers,
            "figures": figures,
        }
        write_figures(chosen.json, figures)


def described(tiny: bool) -> dict[str, Any]:
    if tiny:
        return environment()
    from importlib.metadata import version

    from harts.bench.ops import gpu_environment

    return {"commit": commit(), "megatron-core": version("megatron-core"), **gpu_environment()}


def show(configuration: str, figures: dict[str, Any]) -> None:
    table = Table(title=f"{configuration}, recompute {'on' if figures['recompute'] else 'off'}")
    for column in ("", COMPACT, ALONE, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    compact, alone = figures[COMPACT], figures[ALONE]

    def row(name: str, key: str, form: str, ratio: float) -> None:
        table.add_row(name, f"{compact[key]:{form}}", f"{alone[key]:{form}}", f"{ratio:.3f}")

    row("rows", "rows", ",", figures["row_compression"])
    row("slots", "slots", ",", figures["critical_row_compression"])
    row("F/B/Grad, s", "seconds", ".3f", figures["speedup"])
    row("planning, s", "planning_s", ".3f", figures["core_speedup"])
    peaks = [" ".join(f"{gib:.1f}" for gib in side["peak_gib"]) for side in (compact, alone)]
    table.add_row("peak of each rank, GiB", *peaks, "")
    table.add_row("conversion: speed-up / row compression", "", "", f"{figures['conversion']:.3f}")
    console = Console(width=110)
    console.print(table)
    console.print("ratios: rows; rows of the slowest path; F/B/Grad speed-up; Core speed-up")
    if figures["fidelity"]:
        table = Table(title="against trajectory-wise, same weights")
        for column in ("", "MeanCos", "loss difference", "gradient cosine", "difference"):
            table.add_column(column, justify="right" if column else "left")
        for name in (COMPACT, REPACKED):
            found = figures["fidelity"][name]
            table.add_row(
                name,
                f"{found['mean_cosine']:.8f}",
                f"{found['loss_difference']:.2e}",
                f"{found['gradient_cosine']:.8f}",
                f"{found['gradient_difference']:.2e}",
            )
        console.print(table)


def main() -> int:
    chosen = options()
    if "WORLD_SIZE" not in os.environ:
        print(
            "expected to be started by torchrun, one process a GPU; for example torchrun "
            "--nproc-per-node 2 benchmarks/megatron_step.py dp2-ep2",
            file=sys.stderr,
        )
        return 2
    if chosen.tiny:
        dist.init_process_group("gloo")
    try:
        return int(run(chosen)["conversion"] < CONVERSION and not chosen.tiny)
    except HartsError as error:
        if os.environ["RANK"] == "0":
            print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
