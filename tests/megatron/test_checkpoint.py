"""Distributed checkpoints: a run goes on under other parallel sizes as if it had never stopped.

In float64: steps after a restart differ from those of an uninterrupted run by rounding alone.
"""

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

from harts.training.step import RouterLosses
from tests.megatron.cpu import megatron_on_cpu
from tests.megatron.grid import Case, build, grid, processes
from tests.megatron.small import OBJECTIVE, Work, small_config, small_model

PROCESSES = 4
BOUND = 1e-11
BEFORE, AFTER = 2, 2
"""Steps before and after the restart."""
FIRST = Case(tp=2, dp=2, ep=2, distributed_optimizer=True, work=Work(replicas=2))
THEN = {
    "TP1 PP2 DP2 EP2": Case(
        pp=2, dp=2, ep=2, distributed_optimizer=True, work=Work(replicas=2), recompute=True
    ),
    "TP2 PP2": Case(tp=2, pp=2, distributed_optimizer=True),
    "one process": Case(distributed_optimizer=True),
    "PP2 interleaved": Case(pp=2, virtual=2, distributed_optimizer=True),
    "the same": FIRST,
}
NO_LOSSES = RouterLosses()
"""Router losses are means over a microbatch, so they depend on the plan, and that on replicas."""
Losses = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def start() -> None:
    """What a process does first."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    # Files name the types of their numbers by a table that is filled once: before float32 is
    # read as float64.
    torch.storage._dtype_to_storage_type_map()
    torch.storage._storage_type_to_dtype_map()


def run_steps(case: Case, chunks: Any, optimizer: Any, count: int) -> Losses:
    from harts.megatron import MegatronEngine

    engine = MegatronEngine(chunks)
    batch, targets = case.work.batch(), case.work.targets()
    found = []
    for _ in range(count):
        outcome = engine.run_step(batch, case.work.plan(), targets, OBJECTIVE, NO_LOSSES)
        _, norm, _ = optimizer.step()
        found.append((outcome.loss, float(norm)))
    return found


def run_first(rank: int, folder: str) -> None:
    """An uninterrupted run, which leaves a checkpoint on its way."""
    start()
    from harts.megatron.checkpoint import save_distributed

    with processes(rank, FIRST.processes, f"{folder}/store"), megatron_on_cpu(), grid(FIRST):
        chunks, optimizer = build(FIRST, small_model().state_dict())
        losses = run_steps(FIRST, chunks, optimizer, BEFORE)
        checkpoint = Path(folder) / "checkpoint"
        if rank == 0:
            checkpoint.mkdir()
        dist.barrier()
        save_distributed(checkpoint, chunks, optimizer, small_config(), step=BEFORE)
        losses += run_steps(FIRST, chunks, optimizer, AFTER)
    torch.save(losses, f"{folder}/whole.{rank}.pt")


def run_others(rank: int, folder: str) -> None:
    """The steps after the checkpoint, on other grids, from weights that are all wrong."""
    start()
    from harts.megatron.checkpoint import load_distributed

    wrong = {n: torch.full_like(t, 0.5) for n, t in small_model().state_dict().items()}
    for number, (name, case) in enumerate(THEN.items()):
        if rank >= case.processes:
            continue
        store = f"{folder}/store{number}"
        with processes(rank, case.processes, store), megatron_on_cpu(), grid(case):
            chunks, optimizer = build(case, wrong)
            checkpoint = Path(folder) / "checkpoint"
            step = load_distributed(checkpoint, chunks, optimizer, small_config())
            losses = run_steps(case, chunks, optimizer, AFTER)
        torch.save((step, losses), f"{folder}/{name}.{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoints")
    mp.spawn(run_first, (str(made),), nprocs=FIRST.processes)
    mp.spawn(run_others, (str(made),), nprocs=PROCESSES)
    return made


@pytest.mark.parametrize("name", THEN)
def test_a_run_goes_on_under_other_sizes_to_the_same_losses(folder: Path, name: str) -> None:
    whole = torch.load(folder / "whole.0.pt")
    expected = whole[BEFORE:]
    assert abs(expected[0][0] - whole[0][0]) > 1e-4, "training moves the loss"
    for rank in range(THEN[name].processes):
        step, losses = torch.load(folder / f"{name}.{rank}.pt")
        assert step == BEFORE
        for found, truth in zip(losses, expected, strict=True):
            assert found == pytest.approx(truth, rel=BOUND)
