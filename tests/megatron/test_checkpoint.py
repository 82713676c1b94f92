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
BOUND = {"bailing_hybrid": 1e-11, "qwen3_next": 1e-10, "qwen3_5_moe_text": 1e-10, "qwen3": 1e-11}
"""Those with Gated DeltaNet are as much more sensitive to the weights."""
BEFORE, AFTER = 2, 2
"""Steps before and after the restart."""
_HELD: dict[str, Any] = {"distributed_optimizer": True}


def _two(family: str) -> Work:
    return Work(family=family, replicas=2)


FIRST = {
    family: Case(tp=2, dp=2, ep=1 if family == "qwen3" else 2, work=_two(family), **_HELD)
    for family in BOUND
}
"""Of each family: the run that is stopped."""
THEN = {
    ("bailing_hybrid", "TP1 PP2 DP2 EP2"): Case(
        pp=2, dp=2, ep=2, work=_two("bailing_hybrid"), recompute=True, **_HELD
    ),
    ("bailing_hybrid", "TP2 PP2"): Case(tp=2, pp=2, **_HELD),
    ("bailing_hybrid", "one process"): Case(**_HELD),
    ("bailing_hybrid", "PP2 interleaved"): Case(pp=2, virtual=2, **_HELD),
    ("bailing_hybrid", "the same"): FIRST["bailing_hybrid"],
    ("qwen3_next", "TP1 PP2 DP2 EP2"): Case(pp=2, dp=2, ep=2, work=_two("qwen3_next"), **_HELD),
    ("qwen3_next", "one process"): Case(work=Work(family="qwen3_next"), **_HELD),
    ("qwen3_5_moe_text", "PP2"): Case(pp=2, work=Work(family="qwen3_5_moe_text"), **_HELD),
    ("qwen3", "TP1 PP2"): Case(pp=2, work=Work(family="qwen3"), **_HELD),
    ("qwen3", "CP2"): Case(cp=2, work=Work(family="qwen3"), **_HELD),
}
"""What goes on from it."""
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
    """Uninterrupted runs, which leave a checkpoint on their way."""
    start()
    from harts.megatron.checkpoint import save_distributed

    for family, case in FIRST.items():
        store = f"{folder}/store-{family}"
        with processes(rank, case.processes, store), megatron_on_cpu(), grid(case):
            chunks, optimizer = build(case, small_model(family).state_dict())
            losses = run_steps(case, chunks, optimizer, BEFORE)
            checkpoint = Path(folder) / family
            if rank == 0:
                checkpoint.mkdir()
            dist.barrier()
            save_distributed(checkpoint, chunks, optimizer, small_config(family), step=BEFORE)
            losses += run_steps(case, chunks, optimizer, AFTER)
        torch.save(losses, f"{folder}/{family}.whole.{rank}.pt")


def run_others(rank: int, folder: str) -> None:
    """The steps after the checkpoint, on other grids, from weights that are all wrong."""
    start()
    from harts.megatron.checkpoint import load_distributed

    for number, ((family, name), case) in enumerate(THEN.items()):
        if rank >= case.processes:
            continue
        wrong = {n: torch.full_like(t, 0.5) for n, t in small_model(family).state_dict().items()}
        store = f"{folder}/store{number}"
        with processes(rank, case.processes, store), megatron_on_cpu(), grid(case):
            chunks, optimizer = build(case, wrong)
            checkpoint = Path(folder) / family
            step = load_distributed(checkpoint, chunks, optimizer, small_config(family))
            losses = run_steps(case, chunks, optimizer, AFTER)
        torch.save((step, losses), f"{folder}/{family}.{name}.{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoints")
    mp.spawn(run_first, (str(made),), nprocs=PROCESSES)
    mp.spawn(run_others, (str(made),), nprocs=PROCESSES)
    return made


@pytest.mark.parametrize(("family", "name"), THEN)
def test_a_run_goes_on_under_other_sizes_to_the_same_losses(
    folder: Path, family: str, name: str
) -> None:
    whole = torch.load(folder / f"{family}.whole.0.pt")
    expected = whole[BEFORE:]
    assert abs(expected[0][0] - whole[0][0]) > 1e-4, "training moves the loss"
    for rank in range(THEN[family, name].processes):
        step, losses = torch.load(folder / f"{family}.{name}.{rank}.pt")
        assert step == BEFORE
        for found, truth in zip(losses, expected, strict=True):
            assert found == pytest.approx(truth, rel=BOUND[family])
