"""Which form of tree attention runs: one function decides, once logged, always overridable."""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from harts.errors import UnsupportedError
from harts.ops.attention import flash4
from harts.ops.attention.flash4 import FLASH4
from harts.ops.attention.mask import MIN_DIM, estimate_mask
from harts.ops.attention.packed import TORCH
from harts.ops.attention.pieces import longest_path
from harts.ops.attention.varlen import WORKSPACE_BYTES, estimate_varlen, key_bytes
from harts.ops.index_cache import derived
from harts.ops.tree_index import TreeIndex

Backend = Literal["reference", "cascade", "varlen", "flash-attn-4", "mask"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MAX_DIM = 256
_FLASH_CAPABILITY = (8, 0)
_PATH_WORKSPACES = 2
"""Workspaces that one path may fill before the mask takes over."""

_logger = logging.getLogger("harts.ops.attention")


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    index: TreeIndex,
    backend: Backend | None = None,
) -> Backend:
    """Choose the form for query [R, H, K], key [R, Hkv, K] and value [R, Hkv, V].

    - `reference`: PyTorch, any device and dtype; copies ancestors, holds float32 masks;
    - `cascade`: CPU, PyTorch's fused kernel once a run of ancestors;
    - `varlen`: GPU, bfloat16 and float16, PyTorch's FlashAttention on packed calls of bounded
      memory. Views or shared runs are chosen inside, by the shape of the tree;
    - `flash-attn-4`: the same calls through flash-attn-4, on Hopper, for tested head dims;
    - `mask`: GPU, bfloat16 and float16, FlexAttention, nothing copied; compiles on first use.

    On a GPU the form of the least estimated time runs, flash-attn-4 in place of PyTorch's
    FlashAttention where it can. A path too long for the workspace goes to the mask, whose memory
    does not depend on paths.

    Raises:
        UnsupportedError: the backend asked for is unknown or cannot run these tensors.
    """
    if backend is not None and backend not in BACKENDS:
        raise UnsupportedError(
            f"tree_attention: backend must be one of {BACKENDS}; got {backend!r}."
        )
    why_not_varlen = _why_not_flash(query, value)
    reasons: dict[Backend, str | None] = {
        "flash-attn-4": why_not_varlen or _why_not_flash4(query, value),
        "varlen": why_not_varlen,
        "mask": why_not_varlen or _why_not_mask(query, value),
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
    said = "; ".join(f"not {name}: {r}" for name, r in reasons.items() if r is not None)
    if chosen in ("flash-attn-4", "varlen") and reasons["mask"] is None:
        mask_because = why_mask(query, key, value, index, chosen == "flash-attn-4")
        if mask_because is not None:
            chosen, said = "mask", mask_because
    _log_once(chosen, said or "the first choice")
    return chosen


def why_mask(
    query: Tensor, key: Tensor, value: Tensor, index: TreeIndex, has_flash4: bool
) -> str | None:
    """Why the mask runs and not views and shared runs, as a clause; None when they run."""
    kernel = FLASH4 if has_flash4 else TORCH
    path = derived(index, "attention longest path", longest_path)
    if path * key_bytes(query, key, value, kernel) > _PATH_WORKSPACES * WORKSPACE_BYTES:
        return f"a path needs more than {_PATH_WORKSPACES} times the workspace of {kernel.name}"
    heads, kv_heads = query.shape[1], key.shape[1]
    if estimate_mask(index, heads) < estimate_varlen(index, heads, kv_heads, kernel):
        return f"{kernel.name} would take longer on this tree"
    return None


def _why_not_flash(query: Tensor, value: Tensor) -> str | None:
    """Why no fused form on a GPU can run, as a clause; None when one can."""
    if not query.is_cuda:
        return f"the tensors are on {query.device}, not on a GPU"
    if query.dtype not in _FLASH_DTYPES:
        return f"FlashAttention takes bfloat16 and float16, and these are {query.dtype}"
    if max(query.shape[2], value.shape[2]) > _FLASH_MAX_DIM:
        return f"head dims go up to {_FLASH_MAX_DIM}; got {query.shape[2]} and {value.shape[2]}"
    if torch.cuda.get_device_capability(query.device) < _FLASH_CAPABILITY:
        return "FlashAttention needs compute capability 8.0"
    return None if _has_triton() else "triton is not installed"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _why_not_mask(query: Tensor, value: Tensor) -> str | None:
    least = min(query.shape[2], value.shape[2])
    return None if least >= MIN_DIM else f"head dims start at {MIN_DIM}; got {least}"


def _why_not_flash4(query: Tensor, value: Tensor) -> str | None:
    """What it wants beyond `_why_not_flash`, as a clause; None when it can run."""
    dims = query.shape[2], value.shape[2]
    if dims not in flash4.HEAD_DIMS:
        return f"it is tested for head dims {flash4.HEAD_DIMS}; got {dims}"
    major, minor = torch.cuda.get_device_capability(query.device)
    if major != flash4.CAPABILITY:
        return f"it is tested on compute capability {flash4.CAPABILITY}.x; got {major}.{minor}"
    return flash4.why_not_installed()


@lru_cache(maxsize=64)
def _log_once(backend: Backend, reason: str) -> None:
    _logger.info("tree attention backend: %s (%s)", backend, reason)
