"""Which form of tree attention runs: one function decides, once logged, always overridable."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from harts.errors import UnsupportedError

Backend = Literal["reference", "cascade", "varlen"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MAX_DIM = 256
_FLASH_CAPABILITY = (8, 0)

_logger = logging.getLogger("harts.ops.attention")


def choose_backend(query: Tensor, value: Tensor, *, backend: Backend | None = None) -> Backend:
    """Choose the form for query [R, H, K] and value [R, Hkv, V].

    - `reference`: PyTorch, any device and dtype; copies ancestors, holds float32 masks;
    - `cascade`: CPU, PyTorch's fused kernel once a run of ancestors;
    - `varlen`: GPU, bfloat16 and float16, PyTorch's FlashAttention on packed calls of bounded
      memory. Views or shared runs are chosen inside, by the shape of the tree.

    Raises:
        UnsupportedError: the backend asked for is unknown or cannot run these tensors.
    """
    if backend is not None and backend not in BACKENDS:
        raise UnsupportedError(
            f"tree_attention: backend must be one of {BACKENDS}; got {backend!r}."
        )
    reasons: dict[Backend, str | None] = {
        "varlen": _why_not_varlen(query, value),
        "cascade": None if query.device.type == "cpu" else "it runs on the CPU only",
        "reference": None,
    }
    if backend is not None:
        if reasons[backend] is not None:
            raise UnsupportedError(
                f"tree_attention: backend {backend!r} was asked for, but {reasons[backend]}. "
                "Change that, or leave the choice open."
            )
        return backend
    chosen = next(name for name, reason in reasons.items() if reason is None)
    skipped = "; ".join(f"not {name}: {r}" for name, r in reasons.items() if r is not None)
    _log_once(chosen, skipped or "the first choice")
    return chosen


def _why_not_varlen(query: Tensor, value: Tensor) -> str | None:
    """Why it cannot run, as a clause; None when it can."""
    if not query.is_cuda:
        return f"the tensors are on {query.device}, not on a GPU"
    if query.dtype not in _FLASH_DTYPES:
        return f"FlashAttention takes bfloat16 and float16, and these are {query.dtype}"
    if max(query.shape[2], value.shape[2]) > _FLASH_MAX_DIM:
        return f"head dims go up to {_FLASH_MAX_DIM}; got {query.shape[2]} and {value.shape[2]}"
    if torch.cuda.get_device_capability(query.device) < _FLASH_CAPABILITY:
        return "FlashAttention needs compute capability 8.0"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


@lru_cache(maxsize=64)
def _log_once(backend: Backend, reason: str) -> None:
    _logger.info("tree attention backend: %s (%s)", backend, reason)
