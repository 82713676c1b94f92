"""Records of host tensors, copied to a device at once and without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")

_ALIGNMENT = 128
"""Bytes: kernels take for granted that a tensor starts at a multiple of 16."""


def on_device(record: Record, device: torch.device | str | None) -> Record:
    """The same record with every tensor in it on another device.

    A copy of one tensor waits for all kernels queued before it. So all tensors travel in one
    buffer, of which the copies are views, and on a GPU nobody waits for it: the buffer is in pinned
    memory, and later kernels are queued behind the copy.

    Args:
        record: dataclasses, tuples and lists of contiguous host tensors and other values. The
            tensors are not to be written to.
        device: where to; None is the host, and a record for the host is returned as it is.
    """
    if device is None or torch.device(device).type == "cpu":
        return record
    device = torch.device(device)
    found: list[Tensor] = []
    _rebuild(record, found.append)
    sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in found]
    *starts, total = accumulate(sizes, initial=0)
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, found, strict=True):
        _view(buffer, start, tensor).copy_(tensor)
    there = buffer.to(device, non_blocking=True)
    views = iter([_view(there, start, t) for start, t in zip(starts, found, strict=True)])
    moved: Record = _rebuild(record, lambda _: next(views))
    return moved


def read_back(record: Record) -> Record:
    """The same record with every tensor in it in host memory; waits for queued kernels."""
    host: Record = _rebuild(record, Tensor.cpu)
    return host


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """A part of a buffer of bytes, in the dtype and shape of another tensor."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _rebuild(value: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """The same value with every tensor in it changed, always in the same order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_rebuild(v, change) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.init]
        return type(value)(**{name: _rebuild(getattr(value, name), change) for name in names})
    return value
