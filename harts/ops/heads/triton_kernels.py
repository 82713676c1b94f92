"""Triton kernels of the split into normalised heads: one pass over the rows each way.

Shapes: R physical rows · H query/key heads · G value heads · K key dim · V value dim.

A program holds a tile of whole heads, (row, head) pairs by K or V, of queries, keys or values. Each
head is read, normalised in float32 and written once. Programs of the same pairs of the three kinds
follow each other, so that a row is read at one time. Heads share no sum: a row's results depend
neither on other rows nor on their number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.ops.heads.reference import L2_NORM_EPSILON, HeadSizes


class _Launch(NamedTuple):
    """Numbers in a program's tile and its warps."""

    tile: int
    warps: int


_FORWARD = _Launch(4096, 4)
_BACKWARD = _Launch(2048, 4)


def forward(mixed: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Query [R, H, K], key [R, H, K] and value [R, G, V] of mixed [R, 2 H K + G V], contiguous."""
    rows = mixed.shape[0]
    query = mixed.new_empty(rows, sizes.heads, sizes.key_dim)
    key = torch.empty_like(query)
    value = mixed.new_empty(rows, sizes.groups, sizes.value_dim)
    if mixed.numel():
        grid, options = _options(_FORWARD, rows, sizes)
        _normalised_heads_kernel[grid](mixed, query, key, value, rows, **options)
    return query, key, value


def backward(query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sizes: HeadSizes) -> Tensor:
    """Gradient of mixed [R, 2 H K + G V] from those of query, key and value; all contiguous."""
    grad = torch.empty_like(mixed)
    if mixed.numel():
        grid, options = _options(_BACKWARD, mixed.shape[0], sizes)
        _normalised_heads_backward_kernel[grid](
            query, key, value, mixed, grad, mixed.shape[0], **options
        )
    return grad


def _options(
    launch: _Launch, rows: int, sizes: HeadSizes
) -> tuple[tuple[int], dict[str, int | float]]:
    """The grid, three programs for every tile of pairs, and what is constant in the kernels."""
    key_block, value_block = (
        triton.next_power_of_2(dim) for dim in (sizes.key_dim, sizes.value_dim)
    )
    pairs = max(1, launch.tile // max(key_block, value_block))
    tiles = triton.cdiv(rows * max(sizes.heads, sizes.groups), pairs)
    return (3 * tiles,), {
        "heads": sizes.heads,
        "key_dim": sizes.key_dim,
        "groups": sizes.groups,
        "value_dim": sizes.value_dim,
        "epsilon": L2_NORM_EPSILON,
        "pairs": pairs,
        "key_block": key_block,
        "value_block": value_block,
        "num_warps": launch.warps,
        "num_stages": 1,
        # Fused products round one way or the other by their place in a tile.
        "enable_fp_fusion": False,
    }


@triton.jit
def _places(
    tile, rows, columns: tl.constexpr, first, count: tl.constexpr, dim: tl.constexpr,
    pairs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """[pairs, block] places in mixed and in the tensor of heads, and which of them exist."""
    pair = tile * pairs + tl.arange(0, pairs)
    row = pair // count
    d = tl.arange(0, block)[None, :]
    in_mixed = (row.to(tl.int64) * columns + (first + pair % count * dim))[:, None] + d
    in_heads = (pair.to(tl.int64) * dim)[:, None] + d
    return in_mixed, in_heads, (row < rows)[:, None] & (d < dim)


@triton.jit
def _copy_values(
    mixed, value, tile, rows, columns: tl.constexpr, groups: tl.constexpr, dim: tl.constexpr,
    pairs: tl.constexpr, block: tl.constexpr, into_mixed: tl.constexpr,
):  # fmt: skip
    """A tile of values out of mixed, or of their gradients into it."""
    first: tl.constexpr = columns - groups * dim
    in_mixed, in_value, here = _places(tile, rows, columns, first, groups, dim, pairs, block)
    if into_mixed:
        tl.store(mixed + in_mixed, tl.load(value + in_value, mask=here), mask=here)
    else:
        tl.store(value + in_value, tl.load(mixed + in_mixed, mask=here), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _normalised_heads_kernel(
    mixed, query, key, value, rows,
    heads: tl.constexpr, key_dim: tl.constexpr, groups: tl.constexpr, value_dim: tl.constexpr,
    epsilon: tl.constexpr, pairs: tl.constexpr, key_block: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    keys: tl.constexpr = heads * key_dim
    columns: tl.constexpr = 2 * keys + groups * value_dim
    kind = tl.program_id(0) % 3
    tile = tl.program_id(0) // 3
    if kind == 2:
        _copy_values(
            mixed, value, tile, rows, columns, groups, value_dim, pairs, value_block, False
        )
    else:
        source, to, here = _places(
            tile, rows, columns, kind * keys, heads, key_dim, pairs, key_block
        )
        x = tl.load(mixed + source, mask=here, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) + epsilon)
        y = (x * scale[:, None]).to(query.dtype.element_ty)
        if kind == 0:
            tl.store(query + to, y, mask=here)
        else:
            tl.store(key + to, y, mask=here)


@triton.jit(do_not_specialize=["rows"])
def _normalised_heads_backward_kernel(
    grad_query, grad_key, grad_value, mixed, grad_mixed, rows,
    heads: tl.constexpr, key_dim: tl.constexpr, groups: tl.constexpr, value_dim: tl.constexpr,
    epsilon: tl.constexpr, pairs: tl.constexpr, key_block: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    keys: tl.constexpr = heads * key_dim
    columns: tl.constexpr = 2 * keys + groups * value_dim
    kind = tl.program_id(0) % 3
    tile = tl.program_id(0) // 3
    if kind == 2:
        _copy_values(
            grad_mixed, grad_value, tile, rows, columns, groups, value_dim, pairs, value_block, True
        )
    else:
        to, source, here = _places(
            tile, rows, columns, kind * keys, heads, key_dim, pairs, key_block
        )
        x = tl.load(mixed + to, mask=here, other=0.0).to(tl.float32)
        if kind == 0:
            loaded = tl.load(grad_query + source, mask=here, other=0.0)
        else:
            loaded = tl.load(grad_key + source, mask=here, other=0.0)
        g = loaded.to(tl.float32)
        # y = x / n has the gradient (g - y (g y)) / n, where the sum under n holds epsilon, too.
        square = tl.sum(x * x, 1) + epsilon
        along = tl.sum(g * x, 1) / square
        scale = 1.0 / tl.sqrt_rn(square)
        grad = (g - x * along[:, None]) * scale[:, None]
        tl.store(grad_mixed + to, grad.to(grad_mixed.dtype.element_ty), mask=here)
