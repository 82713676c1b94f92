"""A step in bfloat16: as near to float64 as the Hugging Face engine, and float32 where it has it.

Weights are drawn as the library draws them. The wider ones of the exact tests make routers of both
engines choose other experts in bfloat16 than in float64.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "needs megatron-core, which pip install 'harts[megatron]' brings", allow_module_level=True
    )

from harts.fidelity import gradients
from harts.megatron import MegatronEngine, build_model, load_hugging_face, transformer_config
from harts.megatron.build import weight_pieces
from harts.megatron.layers import Float32Parameters
from harts.models import prepare
from harts.training.step import run_step
from tests.megatron import small
from tests.megatron.cpu import megatron_on_cpu
from tests.megatron.grid import Case, grid, processes, settings

FAMILIES = ["bailing_hybrid", "qwen3_next"]
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A step in float64, the same in bfloat16 with Hugging Face, and the weights in bfloat16."""

    work: small.Work
    logprobs: torch.Tensor
    gradients: Gradients
    weights: dict[str, torch.Tensor]
    """As the library loads them: in bfloat16, but for what its class keeps in float32."""
    theirs: tuple[torch.Tensor, Gradients]

    @property
    def step(self) -> tuple[Any, ...]:
        work = self.work
        return work.batch(), work.plan(), work.targets(), small.OBJECTIVE, work.router


@pytest.fixture(scope="module", params=FAMILIES)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    work, folder = small.Work(family=request.param), tmp_path_factory.mktemp("model")
    with mock.patch.object(small, "drawn", lambda model: model):
        exact = small.true_steps(work).steps[0]
        model = small.small_model(request.param)
    model.float().save_pretrained(folder)
    halved = type(model).from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    weights = small.whole_state(halved)
    policy = prepare(halved.train())
    outcome = run_step(
        policy, work.batch(), work.plan(), work.targets(), small.OBJECTIVE, work.router
    )
    return Truth(
        work=work,
        logprobs=exact.outcome.logprobs,
        gradients=exact.gradients,
        weights=weights,
        theirs=(outcome.logprobs, gradients(halved)),
    )


@contextlib.contextmanager
def megatron(truth: Truth, folder: Path) -> Iterator[tuple[Any, Any]]:
    """A chunk wrapped as Megatron wraps it for bfloat16, and its Hugging Face configuration."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    case, source = Case(dtype=torch.bfloat16), small.small_config(truth.work.family)
    with (
        mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}),
        processes(0, 1, f"{folder}/store"),
        megatron_on_cpu(float64=False),
        grid(case),
    ):
        config = transformer_config(source, **settings(case), bf16=True)
        (chunk,) = build_model(source, config)
        halved = Float16Module(config, chunk)
        load_hugging_face([halved], source, truth.weights)
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        yield DistributedDataParallel(config, wrapping, halved).train(), source


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """In the norm, since rounding is spread over all numbers."""
    return float((value.double() - truth).norm() / truth.norm())


def whole_gradients(chunk: Any, source: Any, like: Gradients) -> Gradients:
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for piece in weight_pieces([chunk], source):
        if not piece.buffer:
            part = piece.whole(found[piece.name])
            part.copy_(piece.local(piece.tensor.main_grad))
    return found


def test_a_step_is_as_near_to_float64_as_the_hugging_face_engine_s(
    truth: Truth, tmp_path: Path
) -> None:
    with megatron(truth, tmp_path) as (chunk, source):
        outcome = MegatronEngine([chunk]).run_step(*truth.step)
        found = whole_gradients(chunk, source, truth.gradients)
    logprobs, theirs = truth.theirs
    assert error(outcome.logprobs, truth.logprobs) < 1.2 * error(logprobs, truth.logprobs) < 1e-3
    for name, exact in truth.gradients.items():
        mine, other = error(found[name], exact), error(theirs[name], exact)
        assert mine < 1.5 * other + 0.01, name
        assert other < 0.2, name


def test_what_the_library_keeps_in_float32_stays_so_and_the_optimizer_moves_all(
    truth: Truth, tmp_path: Path
) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with megatron(truth, tmp_path) as (chunk, source):
        assert mixed(chunk, source, truth) == []
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-1,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        optimizer = get_megatron_optimizer(adam, [chunk])
        MegatronEngine([chunk]).run_step(*truth.step)
        optimizer.step()
        assert mixed(chunk, source, truth) == []
        for piece in weight_pieces([chunk], source):
            after, before = piece.local(piece.tensor), piece.whole(truth.weights[piece.name])
            assert after.isfinite().all()
            assert not torch.equal(after, before), piece.name


def mixed(chunk: Any, source: Any, truth: Truth) -> list[str]:
    """What has another dtype than in the library's model."""
    pieces = weight_pieces([chunk], source)
    return [p.name for p in pieces if p.tensor.dtype != truth.weights[p.name].dtype]


def test_mutation_halving_everything_is_caught(truth: Truth, tmp_path: Path) -> None:
    if truth.work.family != "bailing_hybrid":
        assert {w.dtype for w in truth.weights.values()} == {torch.bfloat16}
        return
    halve = torch.nn.Module._apply
    with (
        mock.patch.object(Float32Parameters, "_apply", halve),
        megatron(truth, tmp_path) as (chunk, source),
    ):
        found = mixed(chunk, source, truth)
    parts = ("A_log", "dt_bias", "conv1d.weight", "gate.weight", "e_score_correction_bias")
    assert all(any(part in name for name in found) for part in parts)
