"""``harts bench cpu-step``: what sharing gains on a CPU, and the operators that it rests on.

Shapes: P packed rows · R rows · H heads · K key and value dim · D model width · A vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import chunk_kimi_delta_attention

from harts.bench.measure import Result, peak_extra_bytes, side_by_side
from harts.checking import CheckOptions, check_batch, model_builder
from harts.errors import HartsError
from harts.excerpts import bounded_excerpt, renumber_tokens
from harts.models import prepare
from harts.objectives import GRPO
from harts.ops.delta_rule import chunk_delta_rule
from harts.ops.heads import l2_normalise
from harts.ops.logprobs import mapped_logprobs
from harts.planning.step import plan_step
from harts.training.comparison import ComparedStep, time_step
from harts.training.model import ModelConfig, build_model
from harts.training.step import RouterLosses
from harts.trajectories import TrajectoryBatch

Progress = Callable[[str], None]

MODEL_TYPE = "bailing_hybrid"
SMALL_MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 64,
    "num_nextn_predict_layers": 0,
}


def cpu_step(batch: TrajectoryBatch, tokens: int, repeats: int, progress: Progress) -> list[Result]:
    """Gate, then measure everything; see the functions below for what each figure is.

    Raises:
        HartsError: compact execution is not exact here, so no speed would mean anything.
    """
    progress("gate: exactness in float64")
    options = CheckOptions(tokens=2_000, steps=0)
    for row in check_batch(batch, model_builder(MODEL_TYPE, 0), options, progress):
        if not row.passed:
            raise HartsError(
                f"correctness gate: {row.name} differs by {row.error:.1e}, bound {row.bound:.0e}; "
                "nothing was measured. Run `harts check` for the whole table."
            )
    return [
        *measure_step(batch, tokens, repeats, progress),
        *measure_delta_rule(repeats, progress),
        *measure_logprobs(progress),
    ]


def measure_step(
    batch: TrajectoryBatch, tokens: int, repeats: int, progress: Progress
) -> Iterator[Result]:
    """Forward and backward of a step, shared against trajectory-wise through the same code.

    float32, recomputation on, same capacity: trajectory-wise is the same engine with each
    trajectory a tree of its own, so its microbatches are packed as densely.
    """
    sample, vocabulary = renumber_tokens(bounded_excerpt(batch, tokens))
    config = ModelConfig(
        model_type=MODEL_TYPE, config={**SMALL_MODEL, "vocab_size": vocabulary}, seed=0
    )
    policy = prepare(build_model(config))
    policy.set_recomputation("selective")
    capacity = max(16_384, int(sample.lengths.max()))
    step = ComparedStep(
        batch=sample,
        objective=GRPO(),
        router=RouterLosses(z_coefficient=1e-3, load_balancing_coefficient=1e-3),
        plan=lambda data, share: plan_step(data, replicas=1, capacity=capacity, share=share),
    )
    times = time_step(policy, step, repeats, progress)
    compression = sample.raw_tokens / times.shared_plan.objective.total_work
    speedup = times.trajectory_wise_s / times.shared_s
    replay = sum(m.calls.replay_tokens for m in times.shared_plan.microbatches)
    yield Result(
        name="step speed-up over trajectory-wise / row compression",
        value=speedup / compression,
        unit="x",
        bound=0.8,
        at_least=True,
        detail=(
            f"{len(sample)} trajectories, {sample.raw_tokens:,} tokens, compression "
            f"{compression:.3f} x, speed-up {speedup:.3f} x ({times.trajectory_wise_s:.2f} s / "
            f"{times.shared_s:.2f} s), replay {replay / times.shared_plan.objective.total_work:.1%}"
        ),
    )


def _delta_rule_inputs() -> dict[str, Tensor]:
    """T = 4096, H = 4, K = V = 64: the shape at which the library's fallback is compared."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, dim = 4096, 4, 64

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {name: draw(rows, heads, dim) for name in ("query", "key", "value")}
    inputs["log_decay"] = -5.0 * torch.sigmoid(draw(rows, heads, dim) - 2.0)
    inputs["beta"] = torch.sigmoid(draw(rows, heads))
    return {name: x.requires_grad_() for name, x in inputs.items()}


def _chunkwise(inputs: dict[str, Tensor]) -> Tensor:
    return chunk_delta_rule(
        l2_normalise(inputs["query"]),
        l2_normalise(inputs["key"]),
        inputs["value"],
        inputs["log_decay"],
        inputs["beta"],
        cu_seqlens=torch.tensor([0, len(inputs["beta"])]),
    ).output


def _library(inputs: dict[str, Tensor]) -> Tensor:
    one = {name: x.unsqueeze(0) for name, x in inputs.items()}
    output, _ = chunk_kimi_delta_attention(
        one["query"],
        one["key"],
        one["value"],
        g=one["log_decay"],
        beta=one["beta"],
        use_qk_l2norm_in_kernel=True,
    )
    kept: Tensor = output[0]
    return kept


def _forward_backward(
    run: Callable[[dict[str, Tensor]], Tensor], inputs: dict[str, Tensor]
) -> None:
    torch.autograd.grad(run(inputs).sum(), list(inputs.values()))


def prepare_chunkwise() -> Callable[[], None]:
    """Forward and backward of HARTS's chunkwise KDA, for measuring memory."""
    return partial(_forward_backward, _chunkwise, _delta_rule_inputs())


def prepare_library() -> Callable[[], None]:
    """Forward and backward of the library's PyTorch fallback, for measuring memory."""
    return partial(_forward_backward, _library, _delta_rule_inputs())


def measure_delta_rule(repeats: int, progress: Progress) -> Iterator[Result]:
    """Chunkwise KDA, forward and backward, against the library's own PyTorch fallback."""
    inputs = _delta_rule_inputs()
    difference = float((_chunkwise(inputs) - _library(inputs)).abs().max().detach())
    if not difference < 1e-4:
        raise HartsError(
            f"correctness gate: chunkwise KDA differs from the library's by {difference:.1e}, "
            "expected rounding; nothing was measured"
        )
    seconds = side_by_side(
        {
            "chunkwise KDA": partial(_forward_backward, _chunkwise, inputs),
            "library's fallback": partial(_forward_backward, _library, inputs),
        },
        repeats,
        progress,
    )
    ours, theirs = seconds.values()
    yield Result(
        name="chunkwise KDA, times faster than the library's fallback",
        value=theirs / ours,
        unit="x",
        bound=3.0,
        at_least=True,
        detail=f"T=4096, H=4, K=V=64, forward and backward: {theirs:.2f} s / {ours:.2f} s",
    )
    progress("memory of both")
    memory = [peak_extra_bytes(p) / 1e6 for p in (prepare_chunkwise, prepare_library)]
    yield Result(
        name="chunkwise KDA, peak extra memory over the library's",
        value=memory[0] / memory[1],
        unit="x",
        bound=1.0,
        detail=f"{memory[0]:.0f} MB / {memory[1]:.0f} MB",
    )


def prepare_logprobs() -> Callable[[], None]:
    """Forward and backward of log-probs at C = 8,192, A = 157,184, D = 64, for measuring memory."""
    rows, vocabulary, width = 8_192, 157_184, 64
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    at, targets = torch.arange(rows), torch.randint(0, vocabulary, (rows,))

    def run() -> None:
        logprobs = mapped_logprobs(hidden, weight, at, targets)
        torch.autograd.grad(logprobs.sum(), [hidden, weight])

    return run


def measure_logprobs(progress: Progress) -> Iterator[Result]:
    """Peak memory of mapped log-probs; whole logits would take 5,152 MB."""
    progress("memory of mapped log-probs")
    yield Result(
        name="mapped log-probs, peak extra memory",
        value=peak_extra_bytes(prepare_logprobs) / 1e6,
        unit="MB",
        bound=600,
        detail="C=8,192, vocabulary 157,184, D=64, forward and backward",
    )
