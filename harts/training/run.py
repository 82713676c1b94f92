"""A whole run in its directory: where it goes on from, what it leaves, what it reports."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harts.errors import InputError
from harts.training.checkpoint import (
    Checkpoint,
    checkpoints,
    discard_unfinished,
    way_back,
    write_whole,
    writing,
)
from harts.training.comparison import Fidelity, StepTimes, measure_fidelity, time_step
from harts.training.config import TrainConfig
from harts.training.data import TrainingData
from harts.training.device import describe_device
from harts.training.loop import Observer, Trainer, changed_settings
from harts.training.metrics import MetricsLog, StepMetrics
from harts.training.model import quiet_library
from harts.training.plot import save_plot

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a finished run did."""

    directory: Path
    checkpoint: Path
    metrics: tuple[StepMetrics, ...]
    """Every step, those before a resume included."""
    steps_per_epoch: int
    training_s: float
    """Wall clock of this process's training, loading and comparison aside."""
    times: StepTimes | None
    """None where the comparison is switched off."""
    fidelity: Fidelity | None


def train(config: TrainConfig, observer: Observer) -> RunReport:
    """Train, or go on training, and leave everything in ``config.directory``.

    Leaves config.yaml, metrics.jsonl, tensorboard/, loss.png and checkpoints/step-NNNNNN. Nothing
    is written before configuration, data, model and checkpoint are known to be good.

    Raises:
        HartsError: bad input, a checkpoint of another run, a file that cannot be written, a loss
            that is not finite.
    """
    directory = config.directory
    checkpoint = find_checkpoint(config)
    trainer = Trainer.start(config, checkpoint)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    where = describe_device(trainer.model.device)
    described = f"{trainer.policy.family.model_type} with {parameters:,} parameters on {where}"
    introduce(config, trainer.data, described, checkpoint, observer)
    with held(directory, afresh=config.resume == "never"):
        metrics, spent = record(config, trainer, observer)
        times, fidelity = _compare(trainer, observer)
    return RunReport(
        directory=directory,
        checkpoint=newest_checkpoint(directory, checkpoint),
        metrics=metrics,
        steps_per_epoch=trainer.sampler.steps_per_epoch,
        training_s=spent,
        times=times,
        fidelity=fidelity,
    )


class Steps(Protocol):
    """What either engine trains with."""

    @property
    def steps_done(self) -> int:
        """Before it runs."""

    def run(self, log: MetricsLog, directory: Path, observer: Observer, /) -> None:
        """Train to the configured number of steps, with checkpoints in ``directory``."""


def record(
    config: TrainConfig, trainer: Steps, observer: Observer
) -> tuple[tuple[StepMetrics, ...], float]:
    """Train in the run directory, which is held: settings, metrics and picture are written.

    Returns:
        The metrics of all steps, earlier ones included, and the seconds that training took.
    """
    directory = config.directory
    discard_unfinished(directory / CHECKPOINTS)
    if trainer.steps_done < config.steps:  # a finished run keeps the settings it ran with
        write_whole(directory / "config.yaml", config.as_yaml())
    log = MetricsLog(directory, trainer.steps_done)
    began = time.perf_counter()
    try:
        trainer.run(log, directory / CHECKPOINTS, observer)
    finally:
        log.close()
    spent = time.perf_counter() - began
    save_plot(log.records, directory / "loss.png")
    return tuple(log.records), spent


def newest_checkpoint(directory: Path, resumed: Checkpoint | None) -> Path:
    """Of the run, or the one that it went on from, where no step was left to train."""
    newest = checkpoints(directory / CHECKPOINTS)[-1:]
    if not newest and resumed is not None:
        newest = [resumed.path]
    return newest[0]


def find_checkpoint(config: TrainConfig) -> Checkpoint | None:
    """The checkpoint that a run goes on from, or None for a fresh start.

    Raises:
        InputError: the checkpoint that ``resume`` names is not one, or is older than what the run
            directory holds.
    """
    if config.resume == "never":
        return None
    own = checkpoints(config.directory / CHECKPOINTS)
    if config.resume == "auto":
        return _open_newest(own[-1]) if own else None
    named = Checkpoint.open(Path(config.resume))
    if own and Checkpoint.open(own[-1]).step > named.step:
        raise InputError(
            f"{own[-1]} is newer than the checkpoint to go on from, {named.path}; a run directory "
            "holds one run. Choose another output=DIRECTORY."
        )
    return named


def how_to_go_on(config: TrainConfig) -> str:
    """The newest checkpoint of a run that was stopped, and what goes on from it."""
    own = checkpoints(config.directory / CHECKPOINTS)
    if not own:
        return "no checkpoint was written yet, the same command starts again"
    way = "the same command" if config.resume == "auto" else "the same command with resume=auto"
    return f"the newest checkpoint is {own[-1]}, {way} goes on from it"


def _open_newest(path: Path) -> Checkpoint:
    try:
        return Checkpoint.open(path)
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}. {way_back(path)}") from error


def introduce(
    config: TrainConfig,
    data: TrainingData,
    model: str,
    checkpoint: Checkpoint | None,
    observer: Observer,
) -> None:
    """Say what a run trains on, which ``model``, and where it goes on from."""
    observer.message(
        f"{len(data.batch):,} trajectories in {len(data.trees)} rollout trees, "
        f"{data.batch.raw_tokens:,} tokens; {model}"
    )
    for note in data.notes():
        observer.message(note)
    if checkpoint is not None:
        left = config.steps - checkpoint.step
        observer.message(
            f"going on from {checkpoint.path}, {left} steps left"
            + ("" if left else "; resume=never trains afresh")
        )
        for change in changed_settings(checkpoint, config):
            observer.message(f"changed since that checkpoint, for the steps left: {change}")


def _compare(trainer: Trainer, observer: Observer) -> tuple[StepTimes | None, Fidelity | None]:
    wanted = trainer.config.comparison
    if not wanted.enabled:
        return None, None
    step = trainer.compared_step()
    with trainer.scope():
        times = time_step(trainer.policy, step, wanted.repeats, observer.working)
    with quiet_library():
        fidelity = measure_fidelity(trainer.model, step, wanted.tokens, observer.working)
    return times, fidelity


@contextlib.contextmanager
def held(directory: Path, *, afresh: bool) -> Iterator[None]:
    """Hold a run directory against a second run; the system lets go when the process ends.

    With ``afresh``, an earlier run there is moved aside first.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock(directory))
        if afresh and any(path.name != _LOCK for path in directory.iterdir()):
            with writing(directory):
                directory.rename(_free_name(directory))
            stack.enter_context(_lock(directory))
        yield


_LOCK = ".lock"


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another run is writing to {directory}; wait for it, or choose another "
                "output=DIRECTORY"
            ) from error
        yield


def _free_name(directory: Path) -> Path:
    number = 1
    while (free := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return free
