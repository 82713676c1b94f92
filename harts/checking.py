"""What ``harts check`` measures: compact execution against each trajectory alone, in float64.

Shapes: S semantic positions · N trajectories · A vocabulary.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harts.errors import InputError
from harts.excerpts import bounded_excerpt, crop_shared_heads, renumber_tokens
from harts.fidelity import (
    Comparison,
    compare_gradients,
    compare_outcomes,
    float64_everywhere,
    gradients,
    logprobs_alone,
    relative_error,
    run_alone,
)
from harts.forest import PrefixForest
from harts.models import Recomputation, TreePolicy, prepare, update_expert_bias
from harts.models.families import ModelFamily, family_named, family_of
from harts.objectives import (
    GRPO,
    PPO,
    PolicyObjective,
    StepTargets,
    group_advantages,
    prepare_step,
)
from harts.planning.step import StepPlan, plan_step
from harts.training.model import load_model
from harts.training.step import RouterLosses, StepOutcome, run_step
from harts.trajectories import TrajectoryBatch

Progress = Callable[[str], None]

# Large enough that a wrong router statistic shows in every gradient.
KINDS_CHECKED: tuple[Recomputation, ...] = ("none", "selective")
ROUTER_LOSSES = RouterLosses(z_coefficient=1e-2, load_balancing_coefficient=1e-1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """How much is compared, and how closely it must agree."""

    tokens: int = 12_000
    """Tokens of the file that one step compares; whole rollout trees are taken first."""
    steps: int = 20
    """Optimiser steps of the second comparison; 0 leaves it out."""
    step_tokens: int = 1_500
    """Tokens of each of those steps."""
    seed: int = 0
    bound: float = 1e-9
    steps_bound: float = 1e-7

    def __post_init__(self) -> None:
        for name in ("tokens", "step_tokens"):
            if getattr(self, name) < 2:
                raise InputError(f"{name} must be at least 2, got {getattr(self, name)}")
        if self.steps < 0:
            raise InputError(f"steps must not be negative, got {self.steps}")


def check_batch(
    batch: TrajectoryBatch,
    build_model: Callable[[int], nn.Module],
    options: CheckOptions,
    progress: Progress,
) -> Iterator[Comparison]:
    """Compare one step, with and without recomputation, then a run of optimiser steps.

    Args:
        batch: trajectories of one file.
        build_model: makes a library model for a vocabulary size; called once a comparison.
        options: sizes and bounds.
        progress: told what is about to run.
    """
    sample, vocabulary = renumber_tokens(bounded_excerpt(batch, options.tokens))
    with float64_everywhere():
        model = build_model(vocabulary).double().train()
        pair = _Pair(model, options)
        old, ref = pair.neighbouring_policies(sample, progress)
        rng = np.random.default_rng(options.seed)
        objectives: list[tuple[str, PolicyObjective, TrajectoryBatch]] = [
            ("GRPO", GRPO(), dataclasses.replace(_with_rewards(sample, rng), logprobs=old)),
            (
                "PPO",
                PPO(kl_coefficient=0.1, reduction="sequence-mean"),
                dataclasses.replace(
                    sample,
                    logprobs=old,
                    ref_logprobs=ref,
                    advantages=rng.normal(size=sample.raw_tokens).astype(np.float32),
                ),
            ),
        ]
        for label, objective, data in objectives:
            yield from pair.compare_step(label, objective, data, progress)
    if options.steps:
        yield from check_optimiser_steps(batch, build_model, options, progress)


def model_builder(model: str, seed: int) -> Callable[[int], nn.Module]:
    """How to make the library's model for a check: a small random one, or one from a directory.

    A small model's weights are drawn wider than the library's initialisation, and half of its
    heads forget slowly, so that a wrong boundary state or a missing branch cannot hide.

    Raises:
        InputError: a directory that holds no whole model.
        UnsupportedError: neither a supported model type nor a directory of a supported model.
    """
    if Path(model).is_dir():
        loaded = load_model(Path(model), "float32")
        loaded.set_attn_implementation("eager")
        return lambda _vocabulary: copy.deepcopy(loaded)
    if os.sep in model:
        raise InputError(
            f"no such model directory: {model}; give a local directory or a supported model type"
        )
    build = family_named(model).small_model

    def seeded(vocabulary: int) -> nn.Module:
        torch.manual_seed(seed)
        return build(vocabulary)

    return seeded


def check_optimiser_steps(
    batch: TrajectoryBatch,
    build_model: Callable[[int], nn.Module],
    options: CheckOptions,
    progress: Progress,
) -> Iterator[Comparison]:
    """Train the same weights in both ways for some AdamW steps; compare losses and weights."""
    cropped = crop_shared_heads(batch, keep=80, length=400)
    sample, vocabulary = renumber_tokens(bounded_excerpt(cropped, options.step_tokens))
    sample = _with_rewards(sample, np.random.default_rng(options.seed))
    with float64_everywhere():
        pair = _Pair(build_model(vocabulary).double().train(), options)
        plan, targets = pair.plan(sample), prepare_step(sample, GRPO())
        sides = [
            _Side(pair.alone, lambda: pair.run_alone(sample, plan, targets, GRPO())),
            _Side(
                pair.policy.model,
                lambda: pair.run_compact(sample, plan, targets, GRPO(), recompute="selective"),
            ),
        ]
        worst = 0.0
        for step in range(options.steps):
            progress(f"optimiser step {step + 1} of {options.steps}")
            truth, compact = (side.step(pair.family) for side in sides)
            worst = max(worst, relative_error(_scalar(compact), _scalar(truth)))
        rows = {"loss curve": worst, **_weight_errors(pair.policy.model, pair.alone)}
    for name, error in rows.items():
        label = f"{options.steps} steps: {name}"
        yield Comparison(name=label, error=error, bound=options.steps_bound)


def _weight_errors(compact: nn.Module, truth: nn.Module) -> dict[str, float]:
    """Worst parameter and worst expert bias (a buffer) after training."""
    kinds = {"every weight": "named_parameters", "every buffer": "named_buffers"}
    return {
        label: max(
            relative_error(value.detach(), true.detach())
            for (_, value), (_, true) in zip(
                getattr(compact, kind)(), getattr(truth, kind)(), strict=True
            )
        )
        for label, kind in kinds.items()
    }


class _Side:
    """One of the two trainings: how it gets its gradients, and its own optimiser."""

    def __init__(self, model: nn.Module, run: Callable[[], StepOutcome]) -> None:
        self._model = model
        self._run = run
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, family: ModelFamily) -> float:
        self._optimizer.zero_grad()
        outcome = self._run()
        self._optimizer.step()
        update_expert_bias(self._model, family, outcome.expert_counts, rate=1e-2)
        return outcome.loss


class _Pair:
    """The same weights twice: the library's model, and one prepared for trees."""

    def __init__(self, model: nn.Module, options: CheckOptions) -> None:
        self.options = options
        self.alone = model
        self.family: ModelFamily = family_of(model)
        self.policy: TreePolicy = prepare(copy.deepcopy(model))

    def plan(self, sample: TrajectoryBatch) -> StepPlan:
        """Several microbatches wherever the sample allows, so that denominators matter."""
        merged = PrefixForest.build(sample).compact_tokens
        capacity = max(int(sample.lengths.max()), merged * 2 // 3)
        return plan_step(sample, replicas=1, capacity=capacity, chunk_size=self.family.chunk_size)

    def neighbouring_policies(
        self, sample: TrajectoryBatch, progress: Progress
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Behaviour and reference log-probs near the current ones, so that ratios differ from 1."""
        progress("current log-probs, each trajectory alone")
        rng = np.random.default_rng(self.options.seed)
        current = np.zeros(sample.raw_tokens)
        predicted = np.delete(np.arange(sample.raw_tokens), sample.offsets[:-1])
        current[predicted] = logprobs_alone(self.alone, self.family, sample).numpy()
        noise = rng.normal(scale=0.3, size=(2, sample.raw_tokens))
        old, ref = (current + noise).astype(np.float32)
        return old, ref

    def run_alone(
        self,
        sample: TrajectoryBatch,
        plan: StepPlan,
        targets: StepTargets,
        objective: PolicyObjective,
    ) -> StepOutcome:
        """The step with each trajectory alone."""
        return run_alone(self.alone, self.family, sample, plan, targets, objective, ROUTER_LOSSES)

    def run_compact(
        self,
        sample: TrajectoryBatch,
        plan: StepPlan,
        targets: StepTargets,
        objective: PolicyObjective,
        *,
        recompute: Recomputation,
    ) -> StepOutcome:
        """The compact step, under a kind of recomputation."""
        self.policy.set_recomputation(recompute, scope=float64_everywhere)
        return run_step(self.policy, sample, plan, targets, objective, ROUTER_LOSSES)

    def compare_step(
        self,
        label: str,
        objective: PolicyObjective,
        sample: TrajectoryBatch,
        progress: Progress,
    ) -> Iterator[Comparison]:
        """Every quantity of one step, without recomputation and with."""
        plan, targets = self.plan(sample), prepare_step(sample, objective)
        progress(f"{label}: each of {len(sample)} trajectories alone")
        self.alone.zero_grad()
        truth = self.run_alone(sample, plan, targets, objective)
        true_gradients = gradients(self.alone)
        for recompute in KINDS_CHECKED:
            name = f"{label}, recompute {recompute}"
            progress(f"{name}: compact")
            self.policy.zero_grad()
            compact = self.run_compact(sample, plan, targets, objective, recompute=recompute)
            bound = self.options.bound
            yield from compare_outcomes(compact, truth, label=name, bound=bound)
            yield compare_gradients(
                gradients(self.policy.model), true_gradients, label=name, bound=bound
            )


def _with_rewards(sample: TrajectoryBatch, rng: np.random.Generator) -> TrajectoryBatch:
    """The sample's rewards; drawn where no tree tells its trajectories apart."""
    if np.any(np.nan_to_num(group_advantages(sample)) != 0):
        return sample
    return dataclasses.replace(sample, rewards=rng.normal(size=len(sample)))


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
