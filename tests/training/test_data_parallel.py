"""Two processes on gloo: a step's gradients are those of one process, under every wrapper."""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harts.errors import InputError
from harts.fidelity import compare_gradients, compare_outcomes, float64_everywhere, gradients
from harts.models import TreePolicy, prepare
from harts.models.families import family_named
from harts.objectives import GRPO, prepare_step
from harts.planning.step import StepPlan, plan_step
from harts.training.data_parallel import run_replica
from harts.training.step import BalancingForm, RouterLosses, StepOutcome, run_step
from harts.trajectories import TrajectoryBatch
from tests.forests import hard_tree

REPLICAS = 2
VOCABULARY = 50
FORMS: list[BalancingForm] = ["microbatch", "global"]
STEPS = [(fillers, form) for fillers in (False, True) for form in FORMS]


def replicated(policy: TreePolicy) -> nn.Module:
    return nn.parallel.DistributedDataParallel(policy)


def sharded(policy: TreePolicy) -> nn.Module:
    mesh = init_device_mesh("cpu", (REPLICAS,))
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(policy, mesh=mesh)


def accelerated(policy: TreePolicy) -> nn.Module:
    return Accelerator(cpu=True).prepare(policy)


WRAPPERS: dict[str, Callable[[TreePolicy], nn.Module]] = {
    "DistributedDataParallel": replicated,
    "FSDP2": sharded,
    "accelerate": accelerated,
}


def make_step(fillers: bool) -> tuple[TrajectoryBatch, StepPlan, TreePolicy]:
    batch = hard_tree(VOCABULARY)
    if fillers:
        batch = batch.select(np.array([0]))  # the other process has a filler and nothing else
    plan = plan_step(batch, replicas=REPLICAS, capacity=400, fillers=True)
    torch.manual_seed(0)
    with float64_everywhere():
        policy = prepare(family_named("bailing_hybrid").small_model(VOCABULARY).double().train())
    policy.set_recomputation("selective", scope=float64_everywhere)
    return batch, plan, policy


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(
    outcome: StepOutcome,
    found: dict[str, torch.Tensor],
    truth: StepOutcome,
    true_gradients: dict[str, torch.Tensor],
    own_positions: int,
) -> list[str]:
    own = outcome.logprobs.isfinite()
    assert int(own.sum()) == own_positions
    truth.logprobs[~own] = 0
    outcome.logprobs[~own] = 0
    rows = [
        *compare_outcomes(outcome, truth, label="replica", bound=1e-12),
        compare_gradients(found, true_gradients, label="replica", bound=1e-12),
    ]
    return [f"{row.name}: {row.error:.1e}" for row in rows if not row.passed]


def run_process(rank: int, store: str, results: str) -> None:
    # What a launcher would set, for accelerate; the processes meet at the file.
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": REPLICAS}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=REPLICAS)
    found: dict[str, list[str]] = {}
    for fillers, form in STEPS:
        router = RouterLosses(
            z_coefficient=1e-2, load_balancing_coefficient=1e-1, load_balancing=form
        )
        batch, plan, policy = make_step(fillers)
        targets = prepare_step(batch, GRPO())
        own = [m.members for m in plan.counted if m.replica == rank]
        positions = sum(int((batch.lengths[members] - 1).sum()) for members in own)
        alone = copy.deepcopy(policy)
        with float64_everywhere():
            truth = run_step(alone, batch, plan, targets, GRPO(), router)
            for name, wrap in WRAPPERS.items():
                wrapped = wrap(copy.deepcopy(policy))
                outcome = run_replica(wrapped, batch, plan, targets, GRPO(), router)
                named = {
                    n.removeprefix("module."): whole(p.grad) for n, p in wrapped.named_parameters()
                }
                expected = {f"model.{n}": g for n, g in gradients(alone.model).items()}
                found[f"{name}, fillers {fillers}, {form}"] = differences(
                    outcome, named, copy.deepcopy(truth), expected, positions
                )
    torch.save(found, Path(results) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("gloo")
    mp.spawn(run_process, (str(folder / "store"), str(folder)), nprocs=REPLICAS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(REPLICAS)]


@pytest.mark.parametrize(("fillers", "form"), STEPS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_processes_equal_one(
    found: list[dict[str, list[str]]], wrapper: str, fillers: bool, form: str
) -> None:
    assert [of_rank[f"{wrapper}, fillers {fillers}, {form}"] for of_rank in found] == [[], []]


def test_the_steps_are_what_they_should_be() -> None:
    _, plain, _ = make_step(fillers=False)
    assert plain.slots >= 2
    assert len(plain.counted) == len(plain.microbatches)
    _, filled, _ = make_step(fillers=True)
    assert len(filled.counted) < len(filled.microbatches)


@pytest.fixture
def one_process(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_plan_for_other_processes_and_a_bare_policy_are_refused() -> None:
    batch, plan, policy = make_step(fillers=False)
    targets = prepare_step(batch, GRPO())
    with pytest.raises(InputError, match=r"for 2 replicas, and 1 processes.*replicas=1"):
        run_replica(policy, batch, plan, targets, GRPO(), RouterLosses())
    alone = plan_step(batch, replicas=1, capacity=400)
    with pytest.raises(InputError, match=r"nothing averages the gradients of TreePolicy"):
        run_replica(policy, batch, alone, targets, GRPO(), RouterLosses())
