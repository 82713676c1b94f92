"""``harts train`` with ``engine: megatron``: the run of the Hugging Face engine, over processes.

Every process reads the data and plans each step alike; the first one alone writes metrics, report
and what a checkpoint says of itself. A checkpoint is a directory that ``from_pretrained`` loads,
with Megatron's distributed checkpoint beside the weights, from which any parallel sizes go on.

Shapes: P semantic log-prob positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor
from transformers import AutoConfig

from harts.errors import InputError, UnsupportedError
from harts.megatron.checkpoint import load_distributed, save_distributed
from harts.megatron.engine import MegatronEngine
from harts.megatron.hugging_face import DirectoryWeights, save_hugging_face
from harts.megatron.launch import process_groups, wrapped_model
from harts.models.families import family_named
from harts.objectives import prepare_step
from harts.planning.step import plan_step
from harts.training.checkpoint import (
    Checkpoint,
    new_checkpoint,
    unfinished,
)
from harts.training.config import TrainConfig
from harts.training.data import TrainingData, TreeSampler
from harts.training.loop import Observer, TrainingError, check_same_run
from harts.training.metrics import MetricsLog, StepMetrics, measure_step
from harts.training.model import build_model, library_config, quiet_library
from harts.training.readiness import check_lengths, check_objective, check_steps
from harts.training.run import (
    CHECKPOINTS,
    RunReport,
    find_checkpoint,
    held,
    introduce,
    newest_checkpoint,
    record,
)
from harts.training.step import StepOutcome

DISTRIBUTED = "megatron"
"""The folder of a checkpoint that holds Megatron's."""


def train(config: TrainConfig, observer: Observer) -> RunReport | None:
    """Train, or go on training; every process calls this alike, and the first one observes.

    Leaves what `harts.training.run.train` leaves. There is no comparison with trajectory-wise
    training at the end.

    Returns:
        What the run did; None on all processes but the first.

    Raises:
        HartsError: bad input, sizes that do not fit, a checkpoint of another run, a file that
            cannot be written, a loss that is not finite.
    """
    with process_groups(config.megatron, config.seed), quiet_library():
        config = _with_replicas(config)
        checkpoint = _agreed_checkpoint(config)
        trainer = MegatronTrainer.start(config, checkpoint)
        if dist.get_rank() == 0:
            return _lead(trainer, checkpoint, observer)
        trainer.run(None, config.directory / CHECKPOINTS, observer)
        return None


def _lead(trainer: MegatronTrainer, checkpoint: Checkpoint | None, observer: Observer) -> RunReport:
    config, directory = trainer.config, trainer.config.directory
    sizes = f"{dist.get_world_size()} processes, {config.plan.replicas} replicas"
    described = f"{trainer.source.model_type} on Megatron, {sizes}"
    introduce(config, trainer.data, described, checkpoint, observer)
    with held(directory, afresh=config.resume == "never"):
        metrics, spent = record(config, trainer, observer)
    return RunReport(
        directory=directory,
        checkpoint=newest_checkpoint(directory, checkpoint),
        metrics=metrics,
        steps_per_epoch=trainer.sampler.steps_per_epoch,
        training_s=spent,
        times=None,
        fidelity=None,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class MegatronTrainer:
    """What one process has of a run that is ready to go on from ``steps_done``."""

    config: TrainConfig
    data: TrainingData
    sampler: TreeSampler
    source: Any
    """The Hugging Face configuration."""
    chunks: list[Any]
    optimizer: Any
    engine: MegatronEngine
    steps_done: int
    data_fingerprint: str

    @classmethod
    def start(cls, config: TrainConfig, checkpoint: Checkpoint | None = None) -> MegatronTrainer:
        """Load data and model, fresh or from a checkpoint.

        Raises:
            InputError: invalid data or configuration, a token id beyond the vocabulary, or a
                checkpoint of another model or other data.
            PlanError: a trajectory is longer than the plan's capacity, or a step cannot fill the
                replicas.
            UnsupportedError: a model or setting that does not run on Megatron.
        """
        data = TrainingData.load(config.data, config.objective)
        check_objective(data.batch, config.objective)
        check_lengths(data.batch, config.plan.capacity)
        fingerprint = data.fingerprint()
        if checkpoint is not None:
            check_same_run(checkpoint, config, fingerprint)
        if config.model.dtype == "float64":
            raise UnsupportedError(
                "engine: megatron trains in bfloat16 or float32, got model.dtype = float64"
            )
        source, chunks = _model(config, checkpoint)
        data.batch.check_vocabulary(source.vocab_size)
        optimizer = _optimizer(config, chunks)
        if checkpoint is not None:
            load_distributed(checkpoint.path / DISTRIBUTED, chunks, optimizer, source)
        trainer = cls(
            config=config,
            data=data,
            sampler=TreeSampler(data=data, trees_per_step=config.trees_per_step, seed=config.seed),
            source=source,
            chunks=chunks,
            optimizer=optimizer,
            engine=MegatronEngine(chunks),
            steps_done=0 if checkpoint is None else checkpoint.step,
            data_fingerprint=fingerprint,
        )
        steps = range(trainer.steps_done, config.steps)
        check_steps(trainer.sampler, steps, trainer.planning_options())
        return trainer

    def run(self, log: MetricsLog | None, directory: Path, observer: Observer) -> None:
        """Train to the configured number of steps; checkpoints go to ``directory``.

        Raises:
            TrainingError: a loss or gradient is not finite.
            CheckpointError: a file cannot be written; checkpoints written before are whole.
        """
        config = self.config
        for step in range(self.steps_done, config.steps):
            metrics = self._step(step, observer)
            if log is not None:
                log.append(metrics)
            observer.step_done(metrics)
            done = step + 1
            if done % config.checkpoint_every == 0 or done == config.steps:
                self._save(done, directory)

    def planning_options(self) -> dict[str, Any]:
        """How this run plans: keyword arguments of `plan_step`."""
        plan = self.config.plan
        return {
            "replicas": plan.replicas,
            "capacity": plan.capacity,
            "chunk_size": family_named(self.source.model_type).chunk_size,
            "planner": plan.planner,
            "fillers": plan.fillers,
        }

    def _step(self, step: int, observer: Observer) -> StepMetrics:
        began = time.perf_counter()
        config = self.config
        batch = self.data.batch.select(self.sampler.rows(step))
        plan = plan_step(batch, **self.planning_options())
        observer.planned(step + 1, plan)
        targets = prepare_step(batch, config.objective)
        self.optimizer.zero_grad()
        outcome = self.engine.run_step(batch, plan, targets, config.objective, config.router.losses)
        for _ in plan.microbatches:
            observer.microbatch_done()
        rate = config.optimizer.learning_rate * config.schedule.factor(step, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        _, norm, _ = self.optimizer.step()
        if not (math.isfinite(outcome.loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {step + 1}: expected a finite loss and gradient, got loss {outcome.loss} "
                f"and gradient norm {norm}. No checkpoint was written of it; lower "
                "optimizer.learning_rate or set optimizer.max_grad_norm, then run again to go on "
                "from the last checkpoint."
            )
        return measure_step(
            plan,
            targets,
            dataclasses.replace(outcome, logprobs=_of_all_replicas(outcome)),
            step=step + 1,
            epoch=(step + 1) / self.sampler.steps_per_epoch,
            learning_rate=rate,
            grad_norm=float(norm),
            trajectories=len(batch),
            seconds=time.perf_counter() - began,
        )

    def _save(self, done: int, directory: Path) -> None:
        """One process makes the folder and gives it its name; all of them fill it."""
        state = {"config": self.config.as_mapping(), "data_fingerprint": self.data_fingerprint}
        with contextlib.ExitStack() as stack:
            temporary = unfinished(directory, done)
            if dist.get_rank() == 0:
                keep = self.config.keep_checkpoints
                stack.enter_context(new_checkpoint(directory, step=done, state=state, keep=keep))
                (temporary / DISTRIBUTED).mkdir()
            dist.barrier()
            save_hugging_face(self.chunks, self.source, temporary)
            save_distributed(
                temporary / DISTRIBUTED, self.chunks, self.optimizer, self.source, step=done
            )
            dist.barrier()
        dist.barrier()


def _with_replicas(config: TrainConfig) -> TrainConfig:
    processes = dist.get_world_size()
    replicas = config.megatron.replicas(processes)
    if config.plan.replicas not in (1, replicas):
        raise InputError(
            f"plan.replicas = {config.plan.replicas}, but {processes} processes make "
            f"{replicas} replicas of {config.megatron.model_processes} each; leave plan.replicas "
            "out, or start other processes"
        )
    plan = dataclasses.replace(config.plan, replicas=replicas)
    return dataclasses.replace(config, plan=plan)


def _agreed_checkpoint(config: TrainConfig) -> Checkpoint | None:
    """What the first process found, before it changes anything in the run directory."""
    found: list[Any] = [find_checkpoint(config) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    checkpoint: Checkpoint | None = found[0]
    return checkpoint


def _model(config: TrainConfig, checkpoint: Checkpoint | None) -> tuple[Any, list[Any]]:
    """The library's configuration, and the chunks; a checkpoint's weights are not loaded yet."""
    weights = None
    if checkpoint is not None:
        source: Any = AutoConfig.from_pretrained(checkpoint.path)
    elif config.model.path is not None:
        source = library_config(config.model)
        weights = DirectoryWeights(Path(config.model.path), source)
    else:
        library = build_model(config.model)
        source, weights = library.config, library.state_dict()
    chunks = wrapped_model(
        source,
        config.megatron,
        getattr(torch, config.model.dtype),
        recompute=config.recompute == "full",
        weights=weights,
        moe_router_bias_update_rate=config.router.expert_bias_rate,
    )
    return source, chunks


def _optimizer(config: TrainConfig, chunks: list[Any]) -> Any:
    """Megatron's distributed AdamW with the settings of the run."""
    wanted = config.optimizer
    dtype = getattr(torch, config.model.dtype)
    norm = wanted.max_grad_norm
    # Biases of the gates have a head dimension here, which the library's flat ones lack.
    flat = ParamPredicate(name="one dimension", fn=lambda parameter: parameter.ndim == 1)
    undecayed = ParamKey(name=("*.bias", "*decay_bias"), predicate=flat)
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=wanted.learning_rate,
            adam_beta1=wanted.betas[0],
            adam_beta2=wanted.betas[1],
            adam_eps=wanted.eps,
            weight_decay=wanted.weight_decay,
            # An infinite bound never clips, and the norm is measured all the same.
            clip_grad=math.inf if norm is None else norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        chunks,
        config_overrides={undecayed: {"wd_mult": 0.0}},
    )


def _of_all_replicas(outcome: StepOutcome) -> Tensor:
    """[P] log-probs of the whole step: each replica knows its own."""
    device = torch.cuda.current_device()
    known = torch.where(outcome.logprobs.isnan(), 0.0, outcome.logprobs).to(device)
    dist.all_reduce(known, group=parallel_state.get_data_parallel_group())
    return known.cpu()
