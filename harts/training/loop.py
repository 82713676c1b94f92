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
from harts.planning.background import BackgroundPlanner, PlanHandle
from harts.planning.step import StepPlan, plan_step
from harts.training.checkpoint import Checkpoint, save_checkpoint, way_back
from harts.training.comparison import ComparedStep
from harts.training.config import TrainConfig
from harts.training.data import TrainingData, TreeSampler
from harts.training.device import describe_device, training_device
from harts.training.metrics import MetricsLog, StepMetrics, measure_step
from harts.training.model import build_model, load_model, numerics, quiet_library, vocabulary_of
from harts.training.optimizer import build_optimizer, clip_gradients, set_learning_rate
from harts.training.readiness import check_lengths, check_objective, check_steps
from harts.training.step import run_step
from harts.trajectories import TrajectoryBatch

WORTH_A_PROCESS_S = 0.05
"""Seconds of planning from which the next step is planned in another process: starting one takes
about half a second of one core, once."""


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
            InputError: invalid data or configuration, no such device, a token id beyond the
                vocabulary, or a checkpoint of another model or other data.
            PlanError: a trajectory is longer than the plan's capacity, or a step cannot fill the
                replicas.
            UnsupportedError: no adapter for the model.
        """
        device = training_device(config.device)
        _check_compilation(config, device)
        data = TrainingData.load(config.data, config.objective)
        check_objective(data.batch, config.objective)
        check_lengths(data.batch, config.plan.capacity)
        fingerprint = data.fingerprint()
        if checkpoint is not None:
            check_same_run(checkpoint, config, fingerprint)
        with quiet_library(), numerics(config.model.dtype):
            model = _model(config, checkpoint).to(device)
            data.batch.check_vocabulary(vocabulary_of(model))
            # After the model, which seeds the generators of GPUs with a seed of its own.
            torch.manual_seed(config.seed)
            policy = prepare(model)
            if config.compile:
                policy.compile_layers()
            policy.set_recomputation(config.recompute)
            optimizer = build_optimizer(model, config.optimizer)
            if checkpoint is not None:
                with _readable(checkpoint):
                    checkpoint.restore(model, optimizer)
        trainer = cls(
            config=config,
            data=data,
            sampler=TreeSampler(data=data, trees_per_step=config.trees_per_step, seed=config.seed),
            model=model,
            policy=policy,
            optimizer=optimizer,
            steps_done=0 if checkpoint is None else checkpoint.step,
            data_fingerprint=fingerprint,
        )
        steps = range(trainer.steps_done, config.steps)
        check_steps(trainer.sampler, steps, trainer.planning_options())
        return trainer

    def run(self, log: MetricsLog, checkpoints: Path, observer: Observer) -> None:
        """Train to the configured number of steps, writing metrics and checkpoints.

        Raises:
            TrainingError: a loss, gradient or updated weight is not finite.
            CheckpointError: a file cannot be written; checkpoints written before are whole.
        """
        config = self.config
        with self.scope(), BackgroundPlanner() as planner:
            ahead = _PlannedAhead(self, planner) if config.plan.background else None
            for step in range(self.steps_done, config.steps):
                metrics = self._step(step, observer, ahead)
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
            batch=self.batch_of(self.config.steps - 1),
            objective=self.config.objective,
            router=self.config.router.losses,
            plan=self._compared_plan,
        )

    def batch_of(self, step: int) -> TrajectoryBatch:
        """The trajectories of ``step`` (from 0)."""
        return self.data.batch.select(self.sampler.rows(step))

    def planning_options(self, share: bool = True) -> dict[str, Any]:
        """How this run plans: keyword arguments of `plan_step`."""
        plan = self.config.plan
        return {
            "replicas": plan.replicas,
            "capacity": plan.capacity,
            "chunk_size": self.policy.family.chunk_size,
            "planner": plan.planner,
            "fillers": plan.fillers,
            "share": share,
        }

    def _step(
        self, step: int, observer: Observer, ahead: "_PlannedAhead | None" = None
    ) -> StepMetrics:
        began = time.perf_counter()
        config = self.config
        batch = self.batch_of(step)
        plan = self._plan(batch) if ahead is None else ahead.take(step, batch)
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
        _check_weights(step + 1, self.model, rate)
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
        return plan_step(batch, **self.planning_options(share))

    def _compared_plan(self, batch: TrajectoryBatch, share: bool) -> StepPlan:
        """A plan for the comparison, which may hold fewer trajectories or share nothing."""
        try:
            return self._plan(batch, share)
        except PlanError:
            return plan_step(batch, **(self.planning_options(share) | {"replicas": 1}))

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


class _PlannedAhead:
    """The plan of every step in turn; while a step trains, the next one's is made elsewhere.

    Steps that are planned in no time are planned here. A plan depends on its batch and the options
    alone, so where it is made changes no number.
    """

    def __init__(self, trainer: Trainer, planner: BackgroundPlanner) -> None:
        self._trainer = trainer
        self._planner = planner
        self._next: PlanHandle | None = None

    def take(self, step: int, batch: TrajectoryBatch) -> StepPlan:
        """The plan of ``step``, which follows the step of the last call."""
        trainer, ready, self._next = self._trainer, self._next, None
        options = trainer.planning_options()
        plan = plan_step(batch, **options) if ready is None else ready.result()
        worth = sum(plan.timings_s.values()) >= WORTH_A_PROCESS_S
        if worth and step + 1 < trainer.config.steps:
            self._next = self._planner.submit(trainer.batch_of(step + 1), **options)
        return plan


def check_same_run(checkpoint: Checkpoint, config: TrainConfig, data_fingerprint: str) -> None:
    """Refuse to go on with another model, other data or another order of the data.

    Settings that only shape the steps to come, such as steps or the learning rate, may change.

    Raises:
        InputError: names the first setting that differs, with both values.
    """
    # Through JSON, as the checkpoint's own went.
    now = json.loads(json.dumps(config.as_mapping()))
    fixed = ("engine", "model", "seed", "trees_per_step")
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
            f"fewer. Raise steps to go on from it, or {_AFRESH}"
        )


_AFRESH = "start afresh with resume=never or another output=DIRECTORY."
_WAYS_OUT = f"Undo the change to go on from it, or {_AFRESH}"


def changed_settings(checkpoint: Checkpoint, config: TrainConfig) -> list[str]:
    """Settings that differ from the checkpoint's, as ``name: before -> now``; output aside."""
    before = _flat(checkpoint.config)
    after = _flat(json.loads(json.dumps(config.as_mapping())))
    ignored = {"output", "resume", "data"}
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted({*before, *after} - ignored)
        if before.get(key) != after.get(key)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _model(config: TrainConfig, checkpoint: Checkpoint | None) -> PreTrainedModel:
    """The library's model on the CPU: there the same seed draws the same weights for any device."""
    if checkpoint is None:
        return build_model(config.model)
    with _readable(checkpoint):
        return load_model(checkpoint.path, config.model.dtype)


def _check_compilation(config: TrainConfig, device: torch.device) -> None:
    if config.compile and device.type != "cuda":
        raise InputError(
            "compile: true expects a GPU, where it makes steps faster, and this run is on "
            f"{describe_device(device)}; set compile=false, or run where PyTorch sees a GPU"
        )


@contextlib.contextmanager
def _readable(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Add to the error of an unreadable checkpoint how the run can go on without it."""
    try:
        yield
    except InputError as error:
        if checkpoint is None:
            raise
        raise InputError(f"{str(error).rstrip('.')}. {way_back(checkpoint.path)}") from error


def _check_finite(step: int, loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(
            f"step {step}: expected a finite loss and gradient, got loss {loss} and gradient norm "
            f"{norm}. The weights were not updated; lower optimizer.learning_rate or set "
            "optimizer.max_grad_norm, then run again to go on from the last checkpoint."
        )


def _check_weights(step: int, model: torch.nn.Module, rate: float) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise TrainingError(
                f"step {step}: the update with learning rate {rate:g} made {name} infinite or NaN. "
                "No checkpoint was written of it; lower optimizer.learning_rate or "
                "optimizer.weight_decay, then run again to go on from the last checkpoint."
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
