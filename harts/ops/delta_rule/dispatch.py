"""Which form of the delta rule runs: one function decides, once logged, always overridable."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from harts.errors import UnsupportedError

Backend = Literal["reference", "rounds", "split"]
BACKENDS: tuple[Backend, ...] = ("reference", "rounds", "split")
FLA_VERSION = "0.6.0"

_GPU_DTYPES = (torch.bfloat16, torch.float16)
_GPU_DIMS = (64, 128, 256)
_GPU_CHUNK_SIZES = {"KDA": (32, 64), "Gated DeltaNet": (64,)}

_logger = logging.getLogger("harts.ops.delta_rule")
_override: ContextVar[Backend | None] = ContextVar("delta_rule_backend", default=None)


@contextmanager
def delta_rule_backend(backend: Backend) -> Iterator[None]:
    """Use this backend for every call inside, unless the call itself names one.

    Recomputation in backward runs outside: enter it there too, or name the backend in the call.
    """
    token = _override.set(_known(backend))
    try:
        yield
    finally:
        _override.reset(token)


def choose_backend(
    query: Tensor,
    value: Tensor,
    log_decay: Tensor,
    *,
    chunk_size: int,
    backend: Backend | None = None,
) -> Backend:
    """Choose the form for these row tensors, query [P, H, K], value [P, G, V].

    - `reference`: PyTorch, any device, dtype and shape;
    - `rounds`: one packed call a round (the paper's way): chunk kernels on a GPU, PyTorch on a CPU;
    - `split`: GPU, chunk kernels once for all rounds, only the state pass by rounds.

    The choice is `backend` if given, else that of `delta_rule_backend`, else `split` on a GPU that
    can run it and `reference` elsewhere.

    Raises:
        UnsupportedError: a GPU form is asked for by name and cannot run, or another version of
            fla is installed where one would be chosen.
    """
    asked = _known(backend) if backend is not None else _override.get()
    if asked == "reference" or (asked == "rounds" and not query.is_cuda):
        return asked
    reason = _why_not(query, value, log_decay, chunk_size)
    if reason is None:
        check_fla()
    if asked is not None:
        if reason:
            raise UnsupportedError(
                f"delta rule: backend {asked!r} was asked for, but {reason}. Change that, or use "
                "backend 'reference'."
            )
        return asked
    chosen: Backend = "reference" if reason else "split"
    _log_once(chosen, reason or "a GPU, fla and shapes that its kernels take")
    return chosen


def check_fla() -> None:
    """Refuse any fla but the pinned one: its kernels are called past its public interface.

    Raises:
        UnsupportedError: no fla, or another version.
    """
    found = _fla_version()
    if found != FLA_VERSION:
        raise UnsupportedError(
            f"delta rule: the GPU form calls kernels of flash-linear-attention {FLA_VERSION} and "
            f"found {found or 'none'}. Install fla-core=={FLA_VERSION}, or use backend 'reference'."
        )


def _why_not(query: Tensor, value: Tensor, log_decay: Tensor, chunk_size: int) -> str | None:
    """Why the GPU forms cannot run, as a clause; None when they can."""
    rule = "KDA" if log_decay.dim() == 3 else "Gated DeltaNet"
    if not query.is_cuda:
        return f"the tensors are on {query.device}, not on a GPU"
    if query.dtype not in _GPU_DTYPES or value.dtype != query.dtype:
        return (
            f"query is {query.dtype} and value {value.dtype}; the GPU form takes bfloat16 or "
            "float16 for both"
        )
    if query.shape[2] not in _GPU_DIMS or value.shape[2] not in _GPU_DIMS:
        return (
            f"K is {query.shape[2]} and V is {value.shape[2]}; the GPU form takes each of "
            f"{_GPU_DIMS}"
        )
    if chunk_size not in _GPU_CHUNK_SIZES[rule]:
        return f"the chunk size of {rule} is {chunk_size}, not in {_GPU_CHUNK_SIZES[rule]}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if _fla_version() is None:
        return f"fla-core is not installed (version {FLA_VERSION})"
    return None


def _fla_version() -> str | None:
    return _version("fla-core")


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _known(backend: str) -> Backend:
    for name in BACKENDS:
        if name == backend:
            return name
    raise UnsupportedError(f"delta rule: backend must be one of {BACKENDS}; got {backend!r}.")


@lru_cache(maxsize=64)
def _log_once(backend: Backend, reason: str) -> None:
    _logger.info("delta rule backend: %s (%s)", backend, reason)
