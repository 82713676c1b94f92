"""bfloat16 rows times a float32 matrix on the matrix units of a GPU, about as exact as float32.

A float32 number is the sum of three bfloat16 ones, whose products float32 holds without rounding.
So a float32 product is the sum of bfloat16 products, which matrix units add in float32; those
below float32's last digit are left out (Henry, Tang and Heinecke 2019, arXiv:1904.06376).

Shapes: R rows · D width of a row · E outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_PARTS = 3
_PAIRS = [(i, j) for i in range(_PARTS) for j in range(_PARTS - i)]
"""Parts of two factors whose product counts."""


def wide_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Float32 products [R, E] of rows [R, D] with a weight [E, D], whatever their dtypes.

    On a GPU, bfloat16 rows meet a float32 weight in parts; all else is one float32 product.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and weight.dtype == torch.float32:
        return product_in_parts(rows, weight)
    return F.linear(rows.type(torch.float32), weight.type(torch.float32))


def product_in_parts(rows: Tensor, weight: Tensor) -> Tensor:
    """`wide_product` of bfloat16 rows and a float32 weight in parts, on any device."""
    out: Tensor = _ProductInParts.apply(rows, weight)  # type: ignore[no-untyped-call]
    return out


class _ProductInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        parts = torch.cat(_split(weight))
        return _product(rows, parts.t()).view(len(rows), _PARTS, -1).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        grad, factors = _split(grads[0]), _split(weight)
        by_row = torch.cat([grad[i] for i, _ in _PAIRS], 1)
        by_output = torch.cat([factors[j] for _, j in _PAIRS])
        # Matrix units cut off each sum below float32's last digit: over 65,536 rows the error was
        # nine times that of a float32 product.
        return by_row @ by_output, grads[0].t() @ rows.float()


def _split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bfloat16 tensors whose sum is the float32 one, the largest first."""
    high = x.bfloat16()
    rest = x - high
    middle = rest.bfloat16()
    return high, middle, (rest - middle).bfloat16()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Bfloat16 [n, k] times [k, m], added and returned in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
