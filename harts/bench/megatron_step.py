"""A step on Megatron-core, compact against trajectory-wise, under one parallel configuration.

Both run the same engine with the same weights, kernels and packing to T; trajectory-wise, each
trajectory is a tree of its own. Times are of the slowest rank, from the plan to reduced gradients,
without the optimiser (the paper's F/B/Grad); Core adds the time of planning.

Shapes: C compact rows · S semantic positions · T capacity.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harts.bench.megatron_fidelity import Snapshot, compare, snapshot
from harts.bench.megatron_grid import Grid, build_engine, parameters_of
from harts.bench.step import ROUTER, fullest, within_vocabulary
from harts.megatron import MegatronEngine
from harts.objectives import GRPO, StepTargets, prepare_step
from harts.planning.step import StepPlan, plan_step
from harts.training.model import ModelConfig
from harts.training.step import RouterLosses
from harts.trajectories import TrajectoryBatch

Progress = Callable[[str], None]
_COMPARED = GRPO(clip_low=1.0, clip_high=1e6)
"""Never clips: whether a ratio does would hang on rounding."""
COMPACT, ALONE, REPACKED = "compact", "trajectory-wise", "trajectory-wise, repacked"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronBench:
    """What is measured."""

    model: ModelConfig
    vocabulary: int
    grid: Grid
    device: str
    capacity: int = 65_536
    """T of both sides."""
    microbatches: int = 2
    """Compact microbatches of each replica; the trajectories are those that they hold."""
    repeats: int = 3
    recompute: bool = True
    fidelity: bool = True
    """Compare logits and gradients too, which takes one step more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Side:
    """One way to run the step."""

    plan: StepPlan
    planning_s: float
    seconds: list[float] = field(default_factory=list)
    """Of the slowest rank, one a timed step."""
    peak_gib: list[float] = field(default_factory=list)
    """Most of each rank over the timed steps."""
    losses: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Compact rows of the step, over all replicas."""
        return self.plan.objective.total_work

    def critical_rows(self, stages: int) -> float:
        """Rows that the slowest path runs: each slot's fullest replica, and the pipeline's fill."""
        slots = self.plan.slots
        return self.plan.objective.slot_maxima * (slots + stages - 1) / slots


class _Work:
    """The measured step on this rank."""

    def __init__(
        self, engine: MegatronEngine, batch: TrajectoryBatch, bench: MegatronBench
    ) -> None:
        self.engine = engine
        self.batch = batch
        self.device = bench.device
        self.targets: StepTargets = prepare_step(batch, GRPO())
        uniform = np.full(batch.raw_tokens, -math.log(bench.vocabulary), np.float32)
        self._compared = dataclasses.replace(batch, logprobs=uniform)
        self._compared_targets = prepare_step(self._compared, _COMPARED)

    def run(self, plan: StepPlan) -> float:
        """One step; its policy loss."""
        outcome = self.engine.run_step(self.batch, plan, self.targets, GRPO(), ROUTER)
        return outcome.policy_loss

    def run_compared(self, plan: StepPlan) -> float:
        """One step whose loss and gradients may be compared between plans.

        The loss of a step on its own policy is the same whatever the log-probs, so the behaviour
        is a uniform one; and router losses are means over a microbatch, so there are none.
        """
        outcome = self.engine.run_step(
            self._compared, plan, self._compared_targets, _COMPARED, RouterLosses()
        )
        return outcome.policy_loss

    def timed(self, side: Side) -> None:
        """One step whose time and memory go into ``side``."""
        _reset_peak(self.device)
        self._wait()
        began = time.perf_counter()
        loss = self.run(side.plan)
        self._wait()
        side.seconds.append(time.perf_counter() - began)
        side.losses.append(loss)
        peak = _over_ranks(_peak_gib(self.device))
        side.peak_gib = [max(p) for p in zip(peak, side.peak_gib or peak, strict=True)]

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
        dist.barrier()


def measure(batch: TrajectoryBatch, bench: MegatronBench, progress: Progress) -> dict[str, Any]:
    """Warm up and compare, then time both sides in turns; every rank calls this alike.

    Args:
        batch: the workload, the same on every rank.
        bench: the process groups of its grid must exist.
        progress: told what runs.
    """
    grid = bench.grid
    sample = fullest(batch, bench.capacity, bench.microbatches * grid.dp)
    sample = within_vocabulary(sample, bench.vocabulary)
    sides = {COMPACT: _planned(sample, bench, True), ALONE: _planned(sample, bench, False)}
    progress(f"building the model for {grid}")
    engine = build_engine(bench.model, grid, bench.device, recompute=bench.recompute)
    _collect(bench.device)
    work = _Work(engine, sample, bench)
    accuracy = _warm_up(work, sides, bench, progress)
    for repeat in range(bench.repeats):
        for name, side in sides.items():
            work.timed(side)
            progress(f"{name}, {repeat + 1} of {bench.repeats}: {side.seconds[-1]:.2f} s")
    return _report(work, sides, bench) | {"fidelity": accuracy}


def _planned(batch: TrajectoryBatch, bench: MegatronBench, share: bool) -> Side:
    began = time.perf_counter()
    plan = _plan(batch, bench, share, bench.capacity)
    return Side(plan=plan, planning_s=max(_over_ranks(time.perf_counter() - began)))


def _plan(batch: TrajectoryBatch, bench: MegatronBench, share: bool, capacity: int) -> StepPlan:
    return plan_step(batch, replicas=bench.grid.dp, capacity=capacity, share=share, fillers=True)


def _warm_up(
    work: _Work, sides: dict[str, Side], bench: MegatronBench, progress: Progress
) -> dict[str, dict[str, float]]:
    """Run each side once, untimed, and tell what differs from the trajectory-wise one.

    The same plan repeats nearly bit for bit, so baseline variation is that of another packing.
    """
    if not bench.fidelity:
        for name, side in sides.items():
            began = time.perf_counter()
            work.run(side.plan)
            progress(f"{name}, warm-up: {time.perf_counter() - began:.2f} s")
        return {}
    other = max(bench.capacity // 2, int(work.batch.lengths.max()))
    plans = {ALONE: sides[ALONE].plan, COMPACT: sides[COMPACT].plan}
    plans[REPACKED] = _plan(work.batch, bench, False, other)
    taken: dict[str, Snapshot] = {}
    found: dict[str, dict[str, float]] = {}
    for name, plan in plans.items():
        began = time.perf_counter()
        taken[name] = snapshot(work.engine, work.batch, plan, work.run_compared)
        progress(f"{name}, warm-up: {time.perf_counter() - began:.2f} s")
        if name != ALONE:
            found[name] = compare(work.engine, taken[ALONE], taken.pop(name))
    del taken
    _collect(work.device)
    return found


def _report(work: _Work, sides: dict[str, Side], bench: MegatronBench) -> dict[str, Any]:
    compact, alone = sides[COMPACT], sides[ALONE]
    took = {name: statistics.median(side.seconds) for name, side in sides.items()}
    compression = alone.rows / compact.rows
    speedup = took[ALONE] / took[COMPACT]
    stages = bench.grid.pp
    return {
        "processes": bench.grid.processes,
        "recompute": bench.recompute,
        "capacity": bench.capacity,
        "trajectories": len(work.batch),
        "raw_tokens": work.batch.raw_tokens,
        "parameters_a_rank": _over_ranks(parameters_of(work.engine.chunks)),
        "row_compression": compression,
        "critical_row_compression": alone.critical_rows(stages) / compact.critical_rows(stages),
        "speedup": speedup,
        "core_speedup": took[ALONE] / (took[COMPACT] + compact.planning_s),
        "conversion": speedup / compression,
        **{name: _figures(side, took[name]) for name, side in sides.items()},
    }


def _figures(side: Side, seconds: float) -> dict[str, Any]:
    return {
        "rows": side.rows,
        "microbatches": len(side.plan.microbatches),
        "slots": side.plan.slots,
        "fillers": len(side.plan.microbatches) - len(side.plan.counted),
        "replay_rows": sum(m.calls.replay_tokens for m in side.plan.microbatches),
        "seconds": seconds,
        "all_seconds": side.seconds,
        "rows_per_second": side.rows / seconds,
        "planning_s": side.planning_s,
        "peak_gib": side.peak_gib,
        "policy_losses": side.losses,
    }


def _over_ranks(value: float) -> list[float]:
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _collect(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _reset_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def _peak_gib(device: str) -> float:
    return 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
