"""Where a run of one process computes, and what a GPU needs to repeat its numbers."""

import os
from typing import Literal

import torch

from harts.errors import InputError

DeviceChoice = Literal["auto", "cpu", "cuda"]

_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")


def training_device(choice: DeviceChoice) -> torch.device:
    """The device that a configuration asks for, ready for deterministic operations.

    Call it before anything else computes on the GPU. That is PyTorch's current one: the first that
    CUDA_VISIBLE_DEVICES shows, unless the program chose another.

    Raises:
        InputError: there is no GPU, or the environment asks cuBLAS for what does not repeat.
    """
    found = torch.cuda.is_available()
    if choice == "cuda" and not found:
        why = (
            f"this PyTorch, {torch.__version__}, is built without CUDA"
            if torch.version.cuda is None
            else "PyTorch sees none on this machine"
        )
        raise InputError(
            f"device: cuda needs a GPU, and {why}. Install a CUDA build of PyTorch, look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or set device=cpu"
        )
    if choice == "cpu" or not found:
        return torch.device("cpu")
    make_cublas_repeat()
    return torch.device("cuda")


def make_cublas_repeat() -> None:
    """Give cuBLAS workspaces of a fixed size, in the environment, unless it has them.

    Without, cuBLAS promises no repeatable results, and PyTorch refuses every matrix product under
    ``torch.use_deterministic_algorithms``. PyTorch reads the variable once, at the process's first
    matrix product on a GPU: a program that has one before it trains must set it itself.

    Raises:
        InputError: the variable is set to something else.
    """
    given = os.environ.setdefault(_WORKSPACES, _REPEATABLE[0])
    if given not in _REPEATABLE:
        raise InputError(
            f"training on a GPU expects {_WORKSPACES} to be {' or '.join(_REPEATABLE)} in the "
            f"environment, so that matrix products repeat; got {given!r}. Unset it"
        )


def describe_device(device: torch.device) -> str:
    """A device in words, for messages."""
    return "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
