"""Checkpoints that are whole or not there: written aside, synced, then renamed.

A checkpoint is a directory ``step-NNNNNN`` that ``AutoModelForCausalLM.from_pretrained`` loads,
with two more files: ``training_state.safetensors`` (AdamW moments, random state) and
``training_state.json`` (step, configuration, fingerprint of the data). The order of the data and
the learning rate follow from seed and step. Nothing in it is pickled.
"""

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from harts.errors import HartsError, InputError

STATE_VERSION = 1
_STATE = "training_state.json"
_TENSORS = "training_state.safetensors"
_RNG, _GPU_RNG = "rng", "cuda_rng"
"""The second is written on a GPU alone; a run that comes from the CPU has it from its seed."""
_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED, _DISCARDED = ".writing-", ".discarded-"


class CheckpointError(HartsError):
    """A file of a run could not be written; what was there before is untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    """Optimiser steps done."""
    config: Mapping[str, Any]
    """The configuration that it was written under, as ``TrainConfig.as_mapping`` gives it."""
    data_fingerprint: str

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read what a checkpoint says of itself.

        Raises:
            InputError: not a checkpoint, or one of another version.
        """
        try:
            state = json.loads((path / _STATE).read_text())
            version = state["version"]
            found = cls(
                path=path,
                step=int(state["step"]),
                config=state["config"],
                data_fingerprint=state["data_fingerprint"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"expected a checkpoint directory step-NNNNNN of harts train, got {path}: "
                f"no readable {_STATE} in it"
            ) from error
        if version != STATE_VERSION:
            raise InputError(
                f"{path} is a checkpoint of version {version}, expected {STATE_VERSION}; go on "
                "with the HARTS that wrote it, or start afresh with resume=never"
            )
        return found

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimiser its moments and torch its random state back.

        Moments go to the device of their parameters, whichever device wrote them. The weights are
        not touched: load the model from ``path``.

        Raises:
            InputError: the state is unreadable or belongs to other parameters.
        """
        try:
            tensors = load_file(self.path / _TENSORS)
            torch.set_rng_state(tensors.pop(_RNG))
            gpu_state = tensors.pop(_GPU_RNG, None)
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"cannot read {self.path / _TENSORS}: {error}") from error
        parameters = dict(model.named_parameters())
        if gpu_state is not None and (gpu := _gpu_of(model)) is not None:
            torch.cuda.set_rng_state(gpu_state, gpu)
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if name not in parameters or (tensor.ndim and tensor.shape != parameters[name].shape):
                raise InputError(f"{self.path / _TENSORS} holds {key}, which this model lacks")
            # AdamW counts its steps on the CPU, wherever its parameters are.
            device = tensor.device if kind == "step" else parameters[name].device
            optimizer.state[parameters[name]][kind] = tensor.to(device)


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    data_fingerprint: str,
    keep: int,
) -> Checkpoint:
    """Write the checkpoint of ``step`` into ``directory``, then drop all but the newest ``keep``.

    Raises:
        CheckpointError: it could not be written; nothing of it is left, older ones are.
    """
    state = {"config": config, "data_fingerprint": data_fingerprint}
    with new_checkpoint(directory, step=step, state=state, keep=keep) as temporary:
        model.save_pretrained(temporary)
        save_file(_training_tensors(model, optimizer), temporary / _TENSORS)
    return Checkpoint.open(_final(directory, step))


@contextlib.contextmanager
def new_checkpoint(
    directory: Path, *, step: int, state: Mapping[str, Any], keep: int
) -> Iterator[Path]:
    """A folder to fill, which becomes the checkpoint of ``step`` once it is whole and on disk.

    Args:
        directory: of all checkpoints; all but the newest ``keep`` are dropped afterwards.
        step: optimiser steps done.
        state: what the checkpoint says of itself beside step and version.
        keep: checkpoints that stay.

    Raises:
        CheckpointError: it could not be written; nothing of it is left, older ones are.
    """
    final, temporary = _final(directory, step), unfinished(directory, step)
    with writing(final):
        try:
            _discard(temporary)
            temporary.mkdir(parents=True)
            yield temporary
            said = {"version": STATE_VERSION, "step": step, **state}
            (temporary / _STATE).write_text(json.dumps(said, indent=2))
            # Some files are made for their owner alone, this one as the umask says.
            mode = stat.S_IMODE((temporary / _STATE).stat().st_mode)
            for path in temporary.rglob("*"):
                if path.is_file():
                    path.chmod(mode)
                _sync(path)
            _sync(temporary)
            _discard(final)
            temporary.rename(final)
            _sync(directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in checkpoints(directory)[:-keep]:
            _discard(old)


def unfinished(directory: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is being written."""
    return directory / f"{_UNFINISHED}{_final(directory, step).name}"


def _final(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


def checkpoints(directory: Path) -> list[Path]:
    """All whole checkpoints of a directory, oldest first."""
    numbered = [
        (int(match[1]), path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and (path / _STATE).is_file()
    ]
    return [path for _, path in sorted(numbered)]


def way_back(broken: Path) -> str:
    """How a run goes on when its checkpoint ``broken`` cannot be read, as a sentence."""
    number = int(match[1]) if (match := _NAME.fullmatch(broken.name)) else 0
    older = [p for p in checkpoints(broken.parent) if int(p.name.partition("-")[2]) < number]
    if not older:
        return "No older checkpoint is kept beside it; start afresh with resume=never."
    return (
        f"The checkpoint before it is {older[-1]}: remove {broken} and run the same command again "
        f"to go on from there, or give resume={older[-1]} and another output=DIRECTORY."
    )


def discard_unfinished(directory: Path) -> None:
    """Remove what a killed run left half-written or half-removed."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((_UNFINISHED, _DISCARDED)):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one sentence that names ``path``.

    Raises:
        CheckpointError: from any OSError or SafetensorError inside.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"cannot write {path}: {reason}. Checkpoints written before are whole; make room or "
            "choose another output=DIRECTORY, then run the same command again to go on from there."
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Replace a text file, all of it or nothing.

    Raises:
        CheckpointError: it could not be written; the old one is still there.
    """
    temporary = path.with_name(f".{path.name}.writing")
    with writing(path):
        try:
            temporary.write_text(text)
            _sync(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by parameter name, such as "exp_avg/lm_head.weight", and torch's generators."""
    tensors = {_RNG: torch.get_rng_state()}
    if (gpu := _gpu_of(model)) is not None:
        tensors[_GPU_RNG] = torch.cuda.get_rng_state(gpu)
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{kind}/{name}"] = value.contiguous()
    return tensors


def _gpu_of(model: nn.Module) -> torch.device | None:
    device = next(model.parameters()).device
    return device if device.type == "cuda" else None


def _discard(path: Path) -> None:
    """Remove a directory in two moves, so that no half of it ever bears its name."""
    if path.exists():
        aside = path.with_name(f"{_DISCARDED}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
