"""``harts bench step``: a whole model's training step, compact against trajectory-wise.

Both run the same code with the same kernels, packing to T and recomputation; trajectory-wise,
each trajectory is a tree of its own. The gain beside the row compression says what was lost on
the way; beside the work-ideal gain, what was lost beyond attention's own, smaller saving.

Shapes: C compact rows · S semantic positions · T capacity.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch

from harts.bench.cpu_step import SMALL_MODEL
from harts.bench.kernel_parts import PARTS, part_times
from harts.bench.measure import Result
from harts.errors import InputError
from harts.models import Recomputation, TreePolicy, prepare
from harts.objectives import GRPO, StepTargets, prepare_step
from harts.planning.step import StepPlan, plan_step
from harts.training.model import ModelConfig, build_model, vocabulary_of
from harts.training.step import RouterLosses, run_step
from harts.trajectories import TrajectoryBatch

Progress = Callable[[str], None]

TABLE_1_MODEL = {
    "vocab_size": 157_184,
    "hidden_size": 1_536,
    "intermediate_size": 4_608,
    "num_hidden_layers": 24,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "num_experts": 128,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 512,
    "num_nextn_predict_layers": 0,
}
"""The paper's Table 1, as fields of `BailingHybridConfig`; what it leaves open is the library's."""

ROUTER = RouterLosses(z_coefficient=1e-3, load_balancing_coefficient=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What is measured."""

    model: ModelConfig
    device: str
    capacity: int = 65_536
    """T of both sides."""
    microbatches: int = 1
    """Compact microbatches of the measured step; the trajectories are those that they hold."""
    repeats: int = 3
    recompute: Recomputation = "selective"
    """Of both sides; see `TreePolicy.set_recomputation`."""

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recomputation):
            raise InputError(
                f"--recompute must be one of {get_args(Recomputation)}, got {self.recompute!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One way to run the step: its plan and its figures."""

    plan: StepPlan
    seconds: float
    """Median of forward, backward and gradients, layouts included."""
    planning_s: float
    peak_bytes: int
    parts_s: dict[str, float]
    """Seconds of GPU kernels by part of the model; empty without a GPU."""

    @property
    def rows(self) -> int:
        """Compact rows of the step."""
        return self.plan.objective.total_work


def model_named(name: str, vocabulary: int, device: str) -> ModelConfig:
    """``table-1``, bfloat16, or ``small``, the model of ``harts bench cpu-step``.

    Only the small one takes the ``vocabulary``.

    Raises:
        InputError: another name, or a device that is not there.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("bench step found no GPU; run it on one, or give --device cpu")
    if name == "table-1":
        return ModelConfig(model_type="bailing_hybrid", config=TABLE_1_MODEL, dtype="bfloat16")
    if name == "small":
        config = SMALL_MODEL | {"vocab_size": vocabulary}
        return ModelConfig(model_type="bailing_hybrid", config=config)
    raise InputError(f"--model must be table-1 or small, got {name!r}")


def fullest(batch: TrajectoryBatch, capacity: int, count: int) -> TrajectoryBatch:
    """The trajectories of the ``count`` fullest microbatches of the planned step."""
    plan = plan_step(batch, replicas=1, capacity=capacity)
    chosen = sorted(plan.microbatches, key=lambda m: -m.compact_tokens)[:count]
    return batch.select(np.sort(np.concatenate([m.members for m in chosen])))


def measure_steps(
    workloads: Mapping[str, TrajectoryBatch], bench: StepBench, progress: Progress
) -> tuple[list[Result], dict[str, Any]]:
    """On every workload, time both sides in turns, then profile one step of each.

    Returns:
        Figures with bounds, and everything that was measured by name of the workload.
    """
    progress("building the model")
    policy = _policy(bench)
    results: list[Result] = []
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in policy.parameters())}
    for name, batch in workloads.items():
        sample = fullest(batch, bench.capacity, bench.microbatches)
        sample = within_vocabulary(sample, vocabulary_of(policy.model))
        targets = prepare_step(sample, GRPO())

        def told(what: str, name: str = name) -> None:
            progress(f"{name}: {what}")

        sides = _measure_sides(policy, sample, targets, bench, told)
        found, figures[name] = _report(sample, sides)
        results += [dataclasses.replace(r, name=f"{name}: {r.name}") for r in found]
    return results, figures


def _policy(bench: StepBench) -> TreePolicy:
    with torch.device(bench.device):
        model = build_model(bench.model)
    policy = prepare(model)
    if bench.device != "cpu":
        policy.compile_layers()
    policy.set_recomputation(bench.recompute)
    return policy


def within_vocabulary(batch: TrajectoryBatch, vocabulary: int) -> TrajectoryBatch:
    """Token ids folded into the vocabulary; which trajectories share which tokens must stay."""
    if int(batch.tokens.max()) < vocabulary:
        return batch
    _, renumbered = np.unique(batch.tokens, return_inverse=True)
    return dataclasses.replace(batch, tokens=renumbered.astype(np.int32))


def _measure_sides(
    policy: TreePolicy,
    batch: TrajectoryBatch,
    targets: StepTargets,
    bench: StepBench,
    progress: Progress,
) -> dict[str, Side]:
    plans, planning = {}, {}
    for name, share in (("compact", True), ("trajectory-wise", False)):
        began = time.perf_counter()
        plans[name] = plan_step(batch, replicas=1, capacity=bench.capacity, share=share)
        planning[name] = time.perf_counter() - began
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    peaks = {}

    def run(name: str) -> None:
        policy.zero_grad()
        run_step(policy, batch, plans[name], targets, GRPO(), ROUTER)
        _synchronise(bench.device)

    for repeat in range(bench.repeats + 1):
        for name in plans:
            progress(f"{name}, {repeat} of {bench.repeats}")
            _reset_peak(bench.device)
            began = time.perf_counter()
            run(name)
            seconds[name].append(time.perf_counter() - began)
            peaks[name] = _peak(bench.device)
    sides = {}
    for name, plan in plans.items():
        progress(f"{name}, profiling")
        sides[name] = Side(
            plan=plan,
            seconds=statistics.median(seconds[name][1:]),
            planning_s=planning[name],
            peak_bytes=peaks[name],
            parts_s={} if bench.device == "cpu" else part_times(partial(run, name)),
        )
    return sides


def _report(batch: TrajectoryBatch, sides: dict[str, Side]) -> tuple[list[Result], dict[str, Any]]:
    compact, alone = sides["compact"], sides["trajectory-wise"]
    compression = alone.rows / compact.rows
    speedup = alone.seconds / compact.seconds
    core = alone.seconds / (compact.seconds + compact.planning_s)
    figures: dict[str, Any] = {
        "trajectories": len(batch),
        "raw_tokens": batch.raw_tokens,
        "row_compression": compression,
        "speedup": speedup,
        "core_speedup": core,
        **{name: _figures(side) for name, side in sides.items()},
    }
    judged = bool(compact.parts_s)  # the bounds are for GPUs
    took = f"{alone.seconds:.2f} s / {compact.seconds:.2f} s"
    took += "" if judged else "; not judged on a CPU"
    results = [
        _floor(
            "F/B/Grad speed-up over row compression",
            speedup / compression,
            0.90 if judged else 0.0,
            f"{compression:.3f} x fewer rows, {speedup:.3f} x faster ({took})",
        ),
        _floor(
            "Core speed-up over F/B/Grad speed-up",
            core / speedup,
            0.995 if judged else 0.0,
            f"planning took {compact.planning_s:.3f} s",
        ),
    ]
    if judged:
        figures["work_ideal_speedup"] = ideal = work_ideal_speedup(sides)
        results += [
            _floor(
                "F/B/Grad speed-up over work-ideal", speedup / ideal, 0.95, f"ideal {ideal:.3f} x"
            ),
            Result(
                name="peak memory over trajectory-wise",
                value=compact.peak_bytes / alone.peak_bytes,
                unit="x",
                bound=1.05,
                detail=f"{compact.peak_bytes / 2**30:.1f} GiB",
            ),
            _floor(
                "compact rows a second",
                compact.rows / compact.seconds,
                30_000,
                f"trajectory-wise {alone.rows / alone.seconds:,.0f}",
                unit="rows/s",
            ),
        ]
    return results, figures


def _floor(name: str, value: float, bound: float, detail: str, unit: str = "x") -> Result:
    return Result(name=name, value=value, unit=unit, bound=bound, at_least=True, detail=detail)


def _figures(side: Side) -> dict[str, Any]:
    return {
        "rows": side.rows,
        "microbatches": len(side.plan.microbatches),
        "replay_rows": sum(m.calls.replay_tokens for m in side.plan.microbatches),
        "seconds": side.seconds,
        "rows_per_second": side.rows / side.seconds,
        "planning_s": side.planning_s,
        # Neither is known without a GPU.
        "peak_gib": side.peak_bytes / 2**30 if side.parts_s else None,
        "parts_s": side.parts_s or None,
    }


def query_key_pairs(plan: StepPlan) -> int:
    """Pairs that causal attention scores: each compact row with all tokens up to itself."""
    pairs = 0
    for microbatch in plan.microbatches:
        forest = microbatch.forest
        start, end = forest.segment_start, forest.segment_end
        pairs += int((end * (end + 1) // 2 - start * (start + 1) // 2).sum())
    return pairs


def work_ideal_speedup(sides: dict[str, Side]) -> float:
    """Speed-up if every part took its trajectory-wise time over its own work ratio.

    Attention's work is query-key pairs, the delta rule's is packed rows with replay, that of all
    else is rows. Time in which no kernel runs counts with the rows.
    """
    compact, alone = sides["compact"], sides["trajectory-wise"]
    replay = sum(m.calls.replay_tokens for m in compact.plan.microbatches)
    ratios = dict.fromkeys(PARTS, alone.rows / compact.rows)
    ratios["attention"] = query_key_pairs(alone.plan) / query_key_pairs(compact.plan)
    ratios["delta rule"] = alone.rows / (compact.rows + replay)
    kernels = sum(alone.parts_s.values())
    ideal = sum(seconds / ratios[part] for part, seconds in alone.parts_s.items())
    ideal += max(alone.seconds - kernels, 0.0) / (alone.rows / compact.rows)
    return max(alone.seconds, kernels) / ideal


def _synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _reset_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()
