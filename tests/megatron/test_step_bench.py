"""The benchmark under torchrun, with a small model on gloo: it runs, and what it finds is sound."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip(
    "megatron.core", reason="needs megatron-core, which pip install 'harts[megatron]' brings"
)

from harts.errors import InputError
from tests.megatron.cpu import megatron_on_cpu

PROCESSES = 2
ONE = ("--microbatches", "1")
CASES = (("tp2-ep2", *ONE), ("pp2", "--microbatches", "2", "--no-recompute"), ("cp2", *ONE))


def run_process(rank: int, folder: str) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    from benchmarks.megatron_step import options, run

    for number, case in enumerate(CASES):
        store = f"file://{folder}/store{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
        with megatron_on_cpu(float64=False):
            json = ["--json", f"{folder}/{number}.json"]
            figures = run(options([*case, "--tiny", "--repeats", "1", *json]))
        torch.save(figures, f"{folder}/{number}.{rank}.pt")
        dist.destroy_process_group()


def test_figures_are_sound(tmp_path: Path) -> None:
    mp.spawn(run_process, (str(tmp_path),), nprocs=PROCESSES)
    for number in range(len(CASES)):
        assert (tmp_path / f"{number}.json").is_file()
        for rank in range(PROCESSES):
            check(torch.load(tmp_path / f"{number}.{rank}.pt"))


def check(figures: dict[str, Any]) -> None:
    compact, alone = figures["compact"], figures["trajectory-wise"]
    assert alone["rows"] == figures["raw_tokens"]
    assert figures["row_compression"] == alone["rows"] / compact["rows"] > 1.5
    assert figures["speedup"] == pytest.approx(alone["seconds"] / compact["seconds"])
    assert figures["core_speedup"] <= figures["speedup"]
    for found in figures["fidelity"].values():
        assert found["mean_cosine"] == pytest.approx(1, abs=1e-6)
        assert found["loss_difference"] < 1e-6
        assert found["gradient_cosine"] == pytest.approx(1, abs=1e-6)
        assert found["gradient_difference"] < 1e-4


@pytest.mark.parametrize(
    ("name", "processes", "message"),
    [
        ("dp2", 4, "--nproc-per-node 2"),
        ("dp2-dp2", 2, "at most once"),
        ("fast", 2, "such as dp2-tp2-ep4"),
        ("pp2-ep2", 2, "does not divide"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    name: str, processes: int, message: str
) -> None:
    from harts.bench.megatron_grid import Grid

    with pytest.raises(InputError, match=message):
        Grid.named(name, processes)
