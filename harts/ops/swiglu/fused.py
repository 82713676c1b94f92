"""The weighted gated activation in one compiled pass each way, under autograd.

Shapes: M rows · I width of the gate and of the up projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def weighted_swiglu_fused(projected: Tensor, weights: Tensor) -> Tensor:
    """`weighted_swiglu` after its checks, on a GPU."""
    out: Tensor = _WeightedSwiGLU.apply(  # type: ignore[no-untyped-call]
        projected.contiguous(), weights.contiguous()
    )
    return out


class _WeightedSwiGLU(torch.autograd.Function):
    """projected [M, 2 I], weights [M, 1] -> [M, I]; keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, weights: Tensor) -> Tensor:
        from harts.ops.swiglu import triton_kernels

        ctx.save_for_backward(projected, weights)
        return triton_kernels.forward(projected, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from harts.ops.swiglu import triton_kernels

        return triton_kernels.backward(grad.contiguous(), *ctx.saved_tensors)
