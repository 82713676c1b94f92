"""Tree convolution with its activation in one compiled pass each way, under autograd.

Shapes: R physical rows · C_in channels · W convolution width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.compilation import why_no_kernel
from harts.ops.convolution.tables import ConvolutionTables, convolution_tables
from harts.ops.index_cache import derived
from harts.ops.tree_index import TreeIndex

_WIDTHS = (2, 3, 4)


def why_not_fused(x: Tensor, weight: Tensor) -> str | None:
    """Why the compiled form cannot run, as a clause; None when it can."""
    if weight.shape[1] not in _WIDTHS:
        return f"the width is {weight.shape[1]}, not 2, 3 or 4"
    return why_no_kernel(x)


def convolve_tree_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: TreeIndex, activation: str | None
) -> Tensor:
    """`tree_causal_convolution` after its checks, where `why_not_fused` has no reason."""
    width = weight.shape[1]
    tables = derived(index, f"convolution tables {width}", partial(convolution_tables, width=width))
    out: Tensor = _FusedConvolution.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), weight.contiguous(), bias, tables, activation == "silu"
    )
    return out


class _FusedConvolution(torch.autograd.Function):
    """x [R, C_in], weight [C_in, W], bias [C_in] or None -> [R, C_in]; only these are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tables: ConvolutionTables,
        silu: bool,
    ) -> Tensor:
        from harts.ops.convolution import triton_kernels

        ctx.save_for_backward(x, weight, bias)
        ctx.tables, ctx.silu = tables, silu
        return triton_kernels.forward(x, weight, bias, tables, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from harts.ops.convolution import triton_kernels

        x, weight, bias = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = triton_kernels.backward(
            grad.contiguous(), x, weight, bias, ctx.tables, ctx.silu
        )
        return grad_x, grad_weight, grad_bias, None, None
