"""Cases on grids of one to four processes, and how one process runs a case."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harts.fidelity import compare_outcomes, relative_error
from harts.training.step import StepOutcome
from tests.megatron.cpu import megatron_on_cpu
from tests.megatron.mutations import MUTATIONS
from tests.megatron.small import (
    BIAS_RATE,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    OBJECTIVE,
    Truth,
    Truths,
    Work,
    small_config,
    true_steps,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the step."""

    tp: int = 1
    pp: int = 1
    virtual: int | None = None
    cp: int = 1
    ep: int = 1
    dp: int = 1
    expert_tp: int | None = None
    recompute: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    """Of gradient reduction with backward, and of shared experts with dispatch."""
    dtype: torch.dtype = torch.float64
    work: Work = dataclasses.field(default_factory=Work)
    mutation: str | None = None

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


ONE = Work()
TWO = Work(replicas=2)
FILLED = Work(replicas=2, trajectories=1)
NEXT = Work(family="qwen3_next")
NEXT_TWO = Work(family="qwen3_next", replicas=2)
MOE = Work(family="qwen3_moe")
DENSE = Work(family="qwen3")
NEWER_MOE = Work(family="qwen3_5_moe_text")
NEWER_DENSE = Work(family="qwen3_5_text")
SEQUENCE = Work(balancing="sequence")
NEXT_SEQUENCE = Work(family="qwen3_next", replicas=2, balancing="sequence")
GLOBAL = Work(replicas=2, balancing="global")
WORKS = [
    *(ONE, TWO, FILLED, NEXT, NEXT_TWO, MOE, DENSE, NEWER_MOE, NEWER_DENSE),
    *(SEQUENCE, NEXT_SEQUENCE, GLOBAL),
]
CASES: dict[str, Case] = {
    "TP2 PP2": Case(tp=2, pp=2),
    "TP2 EP2": Case(tp=2, dp=2, ep=2, work=TWO, recompute=True),
    "TP2 EP2, experts whole": Case(tp=2, dp=2, ep=4, expert_tp=1, work=TWO),
    "CP2 TP2": Case(tp=2, cp=2, recompute=True),
    "PP2 DP2 EP2": Case(pp=2, dp=2, ep=2, work=TWO, distributed_optimizer=True),
    "TP2 EP2 in float32": Case(tp=2, dp=2, ep=2, work=TWO, recompute=True, dtype=torch.float32),
    "single": Case(),
    "single, recomputed": Case(recompute=True),
    "TP2": Case(tp=2),
    "TP2, recomputed": Case(tp=2, recompute=True),
    "PP2": Case(pp=2),
    "PP2, recomputed": Case(pp=2, recompute=True),
    "PP2 interleaved": Case(pp=2, virtual=2, recompute=True),
    "EP2": Case(dp=2, ep=2, work=TWO),
    "DP2": Case(dp=2, work=TWO),
    "DP2, distributed optimiser": Case(dp=2, work=TWO, distributed_optimizer=True, overlap=True),
    "DP2 EP2": Case(dp=2, ep=2, work=TWO, distributed_optimizer=True, recompute=True),
    "DP2 EP2 with a filler": Case(dp=2, ep=2, work=FILLED),
    "CP2": Case(cp=2),
    "CP2, recomputed": Case(cp=2, recompute=True),
    "CP2 TP2, balance of sequences": Case(tp=2, cp=2, work=SEQUENCE, recompute=True),
    "PP2 DP2, balance of the step": Case(pp=2, virtual=2, dp=2, work=GLOBAL, recompute=True),
    "TP2 EP2, balance of the step": Case(tp=2, dp=2, ep=2, work=GLOBAL),
    "Qwen3-Next: DP2, balance of sequences": Case(dp=2, ep=2, work=NEXT_SEQUENCE),
    "Qwen3-Next: CP2 TP2": Case(tp=2, cp=2, work=NEXT, recompute=True),
    "Qwen3-Next: TP4, keys shared": Case(tp=4, work=NEXT),
    "Qwen3-Next: TP2 PP2": Case(tp=2, pp=2, work=NEXT),
    "Qwen3-Next: TP2 EP2": Case(tp=2, dp=2, ep=2, overlap=True, work=NEXT_TWO),
    "Qwen3-Next: single": Case(work=NEXT),
    "Qwen3-Next: TP2": Case(tp=2, work=NEXT),
    "Qwen3-Next: TP2, experts whole": Case(tp=2, expert_tp=1, work=NEXT, recompute=True),
    "Qwen3-Next: PP2": Case(pp=2, work=NEXT, recompute=True),
    "Qwen3-Next: EP2": Case(dp=2, ep=2, work=NEXT_TWO),
    "Qwen3-Next: DP2": Case(dp=2, work=NEXT_TWO, distributed_optimizer=True, recompute=True),
    "Qwen3-Next: DP2 EP2": Case(dp=2, ep=2, work=NEXT_TWO, distributed_optimizer=True),
    "Qwen3-Next: CP2": Case(cp=2, work=NEXT),
    "Qwen3 MoE: TP2": Case(tp=2, work=MOE),
    "Qwen3: TP2": Case(tp=2, work=DENSE),
    "Qwen3.5 MoE: CP2": Case(cp=2, work=NEWER_MOE),
    "Qwen3.5: TP2": Case(tp=2, work=NEWER_DENSE),
}
MUTATED: dict[str, Case] = {
    "q ignored": Case(mutation="q ignored"),
    "padding counted": Case(tp=2, mutation="padding counted"),
    "convolution context of a neighbour": Case(cp=2, mutation="convolution context of a neighbour"),
    "Gated DeltaNet: convolution context of a neighbour": Case(
        cp=2, work=NEXT, mutation="Gated DeltaNet: convolution context of a neighbour"
    ),
    "keys and values of another group": Case(
        cp=2, work=NEXT, mutation="keys and values of another group"
    ),
    "trajectories balanced on each rank alone": Case(
        tp=2, work=SEQUENCE, mutation="trajectories balanced on each rank alone"
    ),
    "another microbatch's plan on a stage": Case(
        pp=2, mutation="another microbatch's plan on a stage"
    ),
}
PROCESSES = 4
OPTIMIZER_TYPES = ("params", "main_grads", "main_params", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What one rank found in one step, relative to the largest number of each tensor."""

    outcome: dict[str, float]
    gradients: dict[str, float]
    """By Hugging Face name, over this rank's parts."""
    norm: float
    bias: float
    weights: float
    """After the step."""
    positions: int
    """Log-probs that this rank came to know."""
    layer_calls: int
    """Forwards of this rank's layers, recomputation included."""
    layers: int


def run_process(rank: int, folder: str) -> None:
    """Run every case that has this rank, one after the other."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with processes(rank, PROCESSES, f"{folder}/store"):
        for work in WORKS[rank::PROCESSES]:
            torch.save(true_steps(work), truth_file(folder, work))
        dist.barrier()
    for number, (name, case) in enumerate({**CASES, **MUTATED}.items()):
        if rank >= case.processes:
            continue
        truth = torch.load(truth_file(folder, case.work), weights_only=False)
        with (
            processes(rank, case.processes, f"{folder}/store{number}"),
            megatron_on_cpu(float64=case.dtype == torch.float64),
        ):
            found = run_case(case, truth)
        torch.save(found, errors_file(folder, name, rank))


@contextlib.contextmanager
def processes(rank: int, count: int, store: str) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def truth_file(folder: str, work: Work) -> Path:
    return Path(folder) / f"truth-{'-'.join(map(str, dataclasses.astuple(work)))}.pt"


def errors_file(folder: str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}.{rank}.pt"


@contextlib.contextmanager
def grid(case: Case) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.virtual,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.expert_tp,
    )
    model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def settings(case: Case) -> dict[str, Any]:
    """What a test sets on top of the model's configuration."""
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.virtual,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.tp if case.expert_tp is None else case.expert_tp,
        "moe_router_dtype": "fp64" if case.dtype == torch.float64 else "fp32",
        "moe_router_bias_update_rate": BIAS_RATE,
        "moe_shared_expert_overlap": case.overlap,
        "use_cpu_initialization": True,
        "params_dtype": case.dtype,
        "pipeline_dtype": case.dtype,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "overlap_p2p_comm": case.virtual is not None,
        "batch_p2p_comm": case.virtual is None,
        **(recompute if case.recompute else {}),
    }


def build(case: Case, weights: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Wrapped chunks with the small model's weights, and their optimiser."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from harts.megatron import build_model, load_hugging_face, transformer_config

    source = small_config(case.work.family)
    config = transformer_config(source, **settings(case))
    chunks = build_model(source, config)
    load_hugging_face(chunks, source, weights)
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_grad_reduce=case.overlap,
        bucket_size=4096 if case.overlap else None,
    )
    wrapped = [DistributedDataParallel(config, wrapping, chunk).train() for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            adam_eps=EPSILON,
            adam_beta1=0.9,
            adam_beta2=0.999,
            weight_decay=0.0,
            clip_grad=CLIP,
            **{f"{name}_dtype": case.dtype for name in OPTIMIZER_TYPES},
            use_distributed_optimizer=case.distributed_optimizer,
        ),
        wrapped,
    )
    return wrapped, optimizer


def run_case(case: Case, truths: Truths) -> list[Errors]:
    """Two optimiser steps, each compared with the truth."""
    from harts.megatron import MegatronEngine, weight_pieces

    source = small_config(case.work.family)
    batch, plan, targets = case.work.batch(), case.work.plan(), case.work.targets()
    found = []
    with grid(case), MUTATIONS[case.mutation]() if case.mutation else contextlib.nullcontext():
        chunks, optimizer = build(case, truths.initial)
        engine = MegatronEngine(chunks)
        calls = count_layer_calls(chunks)
        for truth in truths.steps[: 1 if case.mutation else None]:
            optimizer.zero_grad()
            before = len(calls)
            outcome = engine.run_step(batch, plan, targets, OBJECTIVE, case.work.router)
            gather_gradients(chunks)
            pieces = list(weight_pieces(chunks, source))
            gradient = piece_errors(pieces, truth.gradients, gradients=True)
            _, norm, _ = optimizer.step()
            found.append(
                Errors(
                    outcome=outcome_errors(outcome, truth.outcome),
                    gradients=gradient,
                    norm=abs(float(norm) - truth.norm) / truth.norm,
                    bias=max(bias_errors(pieces, truth), default=0.0),
                    weights=max(piece_errors(pieces, truth.state, gradients=False).values()),
                    positions=int(outcome.logprobs.isfinite().sum()),
                    layer_calls=len(calls) - before,
                    layers=len({id(layer) for layer in calls}),
                )
            )
    return found


def count_layer_calls(chunks: Any) -> list[Any]:
    """Grows by the layer at each of its forwards."""
    from harts.megatron.model import TreeTransformerLayer

    calls: list[Any] = []
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TreeTransformerLayer):
                module.register_forward_pre_hook(lambda layer, _inputs: calls.append(layer))
    return calls


def outcome_errors(outcome: StepOutcome, truth: StepOutcome) -> dict[str, float]:
    """Losses and counts of the whole step, log-probs of this replica."""
    known = outcome.logprobs.isfinite()
    rows = compare_outcomes(
        dataclasses.replace(outcome, logprobs=outcome.logprobs[known]),
        dataclasses.replace(truth, logprobs=truth.logprobs[known]),
        label="",
        bound=1,
    )
    return {row.name.removeprefix(": "): row.error for row in rows}


def gather_gradients(chunks: Any) -> None:
    """Fill in what a distributed optimiser leaves to other ranks."""
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def piece_errors(
    pieces: Any, truth: dict[str, torch.Tensor], *, gradients: bool
) -> dict[str, float]:
    """Worst error of this rank's parts by name, against the whole tensor's largest number."""
    found: dict[str, float] = {}
    for piece in pieces:
        if piece.buffer:
            continue
        tensor = piece.tensor.main_grad if gradients else piece.tensor.data
        whole = truth[piece.name]
        difference = (piece.local(tensor) - piece.whole(whole)).abs()
        error = float(difference.max() / whole.abs().max()) if difference.numel() else 0.0
        found[piece.name] = max(found.get(piece.name, 0.0), error)
    return found


def bias_errors(pieces: Any, truth: Truth) -> list[float]:
    return [
        relative_error(piece.local(piece.tensor), piece.whole(truth.state[piece.name]))
        for piece in pieces
        if piece.buffer
    ]
