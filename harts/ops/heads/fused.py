"""The split into normalised heads in one compiled pass each way, under autograd.

Shapes: R physical rows · H query/key heads · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.heads.reference import HeadSizes

MOST_HEAD_NUMBERS = 256
"""Largest K and V of the compiled form, which holds whole heads in registers."""


def normalised_heads_fused(mixed: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
    """`normalised_heads` after its checks, on a GPU."""
    query, key, value = _NormalisedHeads.apply(  # type: ignore[no-untyped-call]
        mixed.contiguous(), sizes
    )
    return query, key, value


class _NormalisedHeads(torch.autograd.Function):
    """mixed [R, 2 H K + G V] -> query, key [R, H, K], value [R, G, V]; keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
        from harts.ops.heads import triton_kernels

        ctx.save_for_backward(mixed)
        ctx.sizes = sizes
        return triton_kernels.forward(mixed, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from harts.ops.heads import triton_kernels

        (mixed,) = ctx.saved_tensors
        # Heads that nothing read have gradients of zeros: autograd fills them in.
        query, key, value = (grad.contiguous() for grad in grads)
        return triton_kernels.backward(query, key, value, mixed, ctx.sizes), None
