"""A training run: load, then step by step plan, gradients, update; checkpoints on the way."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from harts.errors import HartsError, InputError, PlanError
from harts.models import TreePolicy, prepare
from harts.objectives import prepare_step
from harts.planning.step import StepPlan, plan_step
from harts.training.checkpoint import Checkpoint, save_checkpoint
from harts.training.comparison import ComparedStep
from harts.training.config import TrainConfig
from harts.training.data import TrainingData, TreeSampler
from harts.training.metrics import MetricsLog, StepMetrics, measure_step
from harts.training.model import build_model, load_model, numerics, quiet_library, vocabulary_of
from harts.training.optimizer import build_optimizer, clip_gradients, set_learning_rate
from harts.training.step import run_step
from harts.trajectories import TrajectoryBatch


class TrainingError(HartsError):
    """A run that cannot go on, though its input is valid."""


class Observer(Protocol):
    """What a run tells while it goes."""

    def message(self, text: str) -> None:
        """Say something worth a line."""

    def working(self, text: str) -> None:
        """Something long outside the steps begins."""

    def planned(self, step: int, plan: StepPlan) -> None:
        """Step ``step`` (from 1) begins."""

    def microbatch_done(self) -> None:
        """One microbatch of the step has its gradients."""

    def step_done(self, metrics: StepMetrics) -> None:
        """The step's update is made and its metrics are written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trainer:
    """A run that is ready to go on from ``steps_done``."""

    config: TrainConfig
    data: TrainingData
    sampler: TreeSampler
    model: PreTrainedModel
    policy: TreePolicy
    """The model, prepared for trees."""
    optimizer: torch.optim.AdamW
    steps_done: int
    data_fingerprint: str

    @classmethod
    def start(cls, config: TrainConfig, checkpoint: Checkpoint | None = None) -> "Trainer":
        """Load data and model, fresh or from a checkpoint.

        Raises:
            InputError: invalid data or configuration, a token id beyond the vocabulary, or a
                checkpoint of another model or other data.
            PlanError: a trajectory is longer than the plan's capacity.
            UnsupportedError: no adapter for the model.
        """
        data = TrainingData.load(config.data, config.objective)
        fingerprint = data.fingerprint()
        if checkpoint is not None:
            check_same_run(checkpoint, config, fingerprint)
        torch.manual_seed(config.seed)
        dtype = config.model.dtype
        with quiet_library(), numerics(dtype):
            model = (
                build_model(config.model)
                if checkpoint is None
                else load_model(checkpoint.path, dtype)
            )
            data.batch.check_vocabulary(vocabulary_of(model))
            _check_lengths(data.batch, config.plan.capacity)
            policy = prepare(model)
            policy.set_recomputation(config.recompute)
            optimizer = build_optimizer(model, config.optimizer)
            if checkpoint is not None:
                checkpoint.restore(model, optimizer)
        return cls(
            config=config,
            data=data,
            sampler=TreeSampler(data=data, trees_per_step=config.trees_per_step, seed=config.seed),
            model=model,
            policy=policy,
            optimizer=optimizer,
            steps_done=0 if checkpoint is None else checkpoint.step,
            data_fingerprint=fingerprint,
        )

    def run(self, log: MetricsLog, checkpoints: Path, observer: Observer) -> None:
        """Train to the configured number of steps, writing metrics and checkpoints.

        Raises:
            TrainingError: a loss or gradient is not finite.
            CheckpointError: a file cannot be written; checkpoints written before are whole.
        """
        config = self.config
        with self.scope():
            for step in range(self.steps_done, config.steps):
                metrics = self._step(step, observer)
                log.append(metrics)
                observer.step_done(metrics)
                done = step + 1
                if done % config.checkpoint_every == 0 or done == config.steps:
                    self._save(done, checkpoints)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The numerics of the run: its precision, deterministic operations only."""
        with numerics(self.config.model.dtype), quiet_library(), _deterministic():
            yield

    def compared_step(self) -> ComparedStep:
        """The last step of the run, for a comparison with trajectory-wise training."""
        return ComparedStep(
            batch=self.data.batch.select(self.sampler.rows(self.config.steps - 1)),
            objective=self.config.objective,
            router=self.config.router.losses,
            plan=self._plan,
        )

    def _step(self, step: int, observer: Observer) -> StepMetrics:
        began = time.perf_counter()
        config = self.config
        batch = self.data.batch.select(self.sampler.rows(step))
        plan = self._plan(batch)
        observer.planned(step + 1, plan)
        targets = prepare_step(batch, config.objective)
        self.optimizer.zero_grad()
        outcome = run_step(
            self.policy,
            batch,
            plan,
            targets,
            config.objective,
            config.router.losses,
            on_microbatch=lambda _: observer.microbatch_done(),
        )
        norm = clip_gradients(self.model, config.optimizer.max_grad_norm)
        _check_finite(step + 1, outcome.loss, norm)
        rate = config.optimizer.learning_rate * config.schedule.factor(step, config.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        if config.router.expert_bias_rate > 0:
            self.policy.update_expert_bias(outcome.expert_counts, config.router.expert_bias_rate)
        return measure_step(
            plan,
            targets,
            outcome,
            step=step + 1,
            epoch=(step + 1) / self.sampler.steps_per_epoch,
            learning_rate=rate,
            grad_norm=norm,
            trajectories=len(batch),
            seconds=time.perf_counter() - began,
        )

    def _plan(self, batch: TrajectoryBatch, share: bool = True) -> StepPlan:
        plan = self.config.plan
        return plan_step(
            batch,
            replicas=plan.replicas,
            capacity=plan.capacity,
            chunk_size=self.policy.family.chunk_size,
            planner=plan.planner,
            share=share,
        )

    def _save(self, done: int, checkpoints: Path) -> None:
        save_checkpoint(
            checkpoints,
            step=done,
            model=self.model,
            optimizer=self.optimizer,
            config=self.config.as_mapping(),
            data_fingerprint=self.data_fingerprint,
            keep=self.config.keep_checkpoints,
        )


def check_same_run(checkpoint: Checkpoint, config: TrainConfig, data_fingerprint: str) -> None:
    """Refuse to go on with another model, other data or another order of the data.

    Settings that only shape the steps to come, such as steps or the learning rate, may change.

    Raises:
        InputError: names the first setting that differs, with both values.
    """
    # Through JSON, as the checkpoint's own went.
    now = json.loads(json.dumps(config.as_mapping()))
    fixed = ("model", "seed", "trees_per_step")
    before = _flat({k: checkpoint.config.get(k) for k in fixed})
    after = _flat({k: now[k] for k in fixed})
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            raise InputError(
                f"{checkpoint.path} was written with {key} = {before.get(key)!r}, this "
                f"configuration has {after.get(key)!r}. {_WAYS_OUT}"
            )
    if checkpoint.data_fingerprint != data_fingerprint:
        raise InputError(
            f"{checkpoint.path} was written while training on other trajectories "
            f"(data: {checkpoint.config.get('data')}). {_WAYS_OUT}"
        )
    if checkpoint.step > config.steps:
        raise InputError(
            f"{checkpoint.path} has {checkpoint.step} steps done, steps = {config.steps} asks for "
            f"fewer. Raise steps, or: {_WAYS_OUT}"
        )


_WAYS_OUT = (
    "Undo the change to go on from it, or start afresh with resume=never or another "
    "output=DIRECTORY."
)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check_lengths(batch: TrajectoryBatch, capacity: int) -> None:
    """Refuse before the first step what a later step could not plan."""
    row = int(batch.lengths.argmax())
    if batch.lengths[row] > capacity:
        raise PlanError(
            f"{batch.describe_row(row)} has {batch.lengths[row]} tokens, plan.capacity is "
            f"{capacity}: a trajectory is never split. Raise plan.capacity to at least "
            f"{batch.lengths[row]}, or drop the trajectory."
        )


def _check_finite(step: int, loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(
            f"step {step}: expected a finite loss and gradient, got loss {loss} and gradient norm "
            f"{norm}. The weights were not updated; lower optimizer.learning_rate or set "
            "optimizer.max_grad_norm, then run again to go on from the last checkpoint."
        )


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Refuse operations whose result depends on timing."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor only helps to find reads of memory that nothing wrote.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
