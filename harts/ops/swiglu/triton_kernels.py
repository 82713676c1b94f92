"""Triton kernels of the weighted gated activation: one pass over the rows each way.

Shapes: M rows · I width of the gate and of the up projection.

Backward makes both halves of a row's gradient from one read of its gate, up projection and
gradient, and sums the weight's gradient in the program that has the whole row. Rows share no sum:
a row's results depend neither on other rows nor on their number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class _Launch(NamedTuple):
    """Most columns of a program's tile, numbers in the tile, and its warps."""

    columns: int
    tile: int
    warps: int


_FORWARD = _Launch(512, 2048, 4)
_BACKWARD = _Launch(512, 2048, 4)


def forward(projected: Tensor, weights: Tensor) -> Tensor:
    """Weight * silu(gate) * up: contiguous [M, 2 I] and [M, 1] to [M, I]."""
    rows, width = projected.shape[0], projected.shape[1] // 2
    out = projected.new_empty(rows, width)
    if out.numel():
        options = _options(_FORWARD, width)
        grid = (triton.cdiv(rows, options["block_rows"]), triton.cdiv(width, options["block"]))
        _swiglu_kernel[grid](projected, weights, out, rows, **options)
    return out


def backward(grad: Tensor, projected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of projected [M, 2 I] and weights [M, 1], each in its dtype, from [M, I]."""
    rows, width = grad.shape
    grad_projected = torch.empty_like(projected)
    if not grad.numel():
        return grad_projected, torch.zeros_like(weights)
    grad_weights = torch.empty_like(weights)
    options = _options(_BACKWARD, width)
    _swiglu_backward_kernel[(triton.cdiv(rows, options["block_rows"]),)](
        grad, projected, weights, grad_projected, grad_weights, rows, **options
    )
    return grad_projected, grad_weights


def _options(launch: _Launch, width: int) -> dict[str, int]:
    block = min(launch.columns, triton.next_power_of_2(width))
    return {
        "width": width,
        "block_rows": max(1, launch.tile // block),
        "block": block,
        "num_warps": launch.warps,
        "num_stages": 1,
        # Fused products round one way or the other by their place in a tile.
        "enable_fp_fusion": False,
    }


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    projected, weights, out, rows,
    width: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    at = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    here = (row < rows)[:, None] & (at < width)
    start = row.to(tl.int64)[:, None] * width
    source = projected + 2 * start + at
    gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    y = gate * _sigmoid(gate) * up * weight[:, None]
    tl.store(out + start + at, y.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward_kernel(
    grad, projected, weights, grad_projected, grad_weights, rows,
    width: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    start = row.to(tl.int64)[:, None] * width
    weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    total = tl.zeros((block_rows, block), dtype=tl.float32)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)[None, :]
        here = (row < rows)[:, None] & (at < width)
        source = projected + 2 * start + at
        gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
        up = tl.load(source + width, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + start + at, mask=here, other=0.0).to(tl.float32)
        share = _sigmoid(gate)
        silu = gate * share
        total += g * silu * up
        g = g * weight[:, None]
        to = grad_projected + 2 * start + at
        of_gate = g * up * share * (1.0 + gate * (1.0 - share))
        tl.store(to, of_gate.to(grad_projected.dtype.element_ty), mask=here)
        tl.store(to + width, (g * silu).to(grad_projected.dtype.element_ty), mask=here)
    of_weight = tl.sum(total, 1)
    tl.store(grad_weights + row, of_weight.to(grad_weights.dtype.element_ty), mask=row < rows)
