"""Triton kernels for rows of packed attention calls: sums of gradients, merges of outputs.

Shapes: n packed rows · R physical rows · H heads · K head dim · V value dim · U rows of one call.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from harts.ops.attention.pieces import Fold, RowSum

_BLOCK = 1024
_BLOCK_HEADS = 8
_GATHERED = 4096


def gather_rows(rows: Tensor, at: Tensor, width: int) -> Tensor:
    """`packed.gather_rows`."""
    heads, kept = rows.shape[1:]
    found = rows.new_empty(len(at), heads, width)
    features = heads * width
    block = min(_GATHERED, triton.next_power_of_2(features))
    _gather_rows_kernel[(len(at), triton.cdiv(features, block))](
        rows, at, found, features, width, kept, *rows.stride()[:2],
        flat=width == kept == rows.stride(1), block=block,
    )  # fmt: skip
    return found


def add_rows(total: Tensor, packed: Tensor, rows: RowSum) -> None:
    """`packed.add_rows`; total is contiguous."""
    heads, kept = total.shape[1:]
    features = heads * kept
    if len(rows.rows):
        _add_rows_kernel[(len(rows.rows), triton.cdiv(features, _BLOCK))](
            total, packed, rows.rows, rows.offsets, rows.entries,
            features, kept, packed.stride(0), packed.stride(1),
            flat=packed.stride(1) == kept, block=_BLOCK,
        )  # fmt: skip


def fold_rows(final: Tensor, carried: Tensor, packed: Tensor, rows: RowSum, fold: Fold) -> None:
    """`packed.fold_rows`; final and carried are contiguous."""
    heads, kept = final.shape[1:]
    features = heads * kept
    if len(rows.rows):
        _fold_rows_kernel[(len(rows.rows), triton.cdiv(features, _BLOCK))](
            final, carried, packed, rows.rows, rows.offsets, rows.entries,
            fold.slots, fold.first, fold.last,
            features, kept, packed.stride(0), packed.stride(1),
            flat=packed.stride(1) == kept, block=_BLOCK,
        )  # fmt: skip


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: RowSum) -> None:
    """`packed.merge_rows`; out and lse have contiguous rows."""
    heads, width = out.shape[1:]
    if len(rows.rows):
        _merge_rows_kernel[(len(rows.rows), triton.cdiv(heads, _BLOCK_HEADS))](
            out, lse, part, part_lse, rows.rows, rows.offsets, rows.entries,
            heads, width, lse.stride(0), part.stride(0), part.stride(1), part_lse.stride(0),
            block_heads=_BLOCK_HEADS, block=triton.next_power_of_2(width),
        )  # fmt: skip


@triton.jit
def _gather_rows_kernel(
    rows, at, found, features, width, kept, row_stride, head_stride,
    flat: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * block + tl.arange(0, block)
    source = rows + tl.load(at + number) * row_stride
    if flat:  # Without divisions, loads are known to be wide.
        value = tl.load(source + f, mask=f < features)
    else:
        d = f % width
        source += f // width * head_stride + d
        value = tl.load(source, mask=(f < features) & (d < kept), other=0.0)
    tl.store(found + number * features + f, value, mask=f < features)


@triton.jit
def _add_rows_kernel(
    total, packed, rows, offsets, entries, features, kept, row_stride, head_stride,
    flat: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    f = tl.program_id(1) * block + tl.arange(0, block)
    inside = f < features
    at = f if flat else f // kept * head_stride + f % kept
    to = total + tl.load(rows + number) * features + f
    value = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    for i in range(tl.load(offsets + number), tl.load(offsets + number + 1)):
        entry = tl.load(entries + i)
        value += tl.load(packed + entry * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _fold_rows_kernel(
    final, carried, packed, rows, offsets, entries, slots, first, last,
    features, kept, row_stride, head_stride, flat: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    f = tl.program_id(1) * block + tl.arange(0, block)
    inside = f < features
    at = f if flat else f // kept * head_stride + f % kept
    slot = carried + tl.load(slots + number) * features + f
    fresh = tl.load(first + number) != 0
    done = tl.load(last + number) != 0
    value = tl.load(slot, mask=inside & ~fresh, other=0.0).to(tl.float32)
    for i in range(tl.load(offsets + number), tl.load(offsets + number + 1)):
        entry = tl.load(entries + i)
        value += tl.load(packed + entry * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(slot, value, mask=inside & ~done)
    to = final + tl.load(rows + number) * features + f
    tl.store(to, value.to(final.dtype.element_ty), mask=inside & done)


@triton.jit
def _merge_rows_kernel(
    out, lse, part, part_lse, rows, offsets, entries, heads, width,
    lse_stride, part_stride, head_stride, part_lse_stride,
    block_heads: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    row = tl.load(rows + number)
    h = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    d = tl.arange(0, block)
    here = h < heads
    inside = here[:, None] & (d < width)[None, :]
    at = h[:, None] * width + d[None, :]
    to = out + row * heads * width + at
    value = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    whole = tl.load(lse + h * lse_stride + row, mask=here, other=0.0)
    for i in range(tl.load(offsets + number), tl.load(offsets + number + 1)):
        entry = tl.load(entries + i)
        more = tl.load(part_lse + h * part_lse_stride + entry, mask=here, other=0.0)
        top = tl.maximum(whole, more)
        total = top + tl.log(tl.exp(whole - top) + tl.exp(more - top))
        source = part + entry * part_stride + h[:, None] * head_stride + d[None, :]
        added = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.exp(whole - total)[:, None] + added * tl.exp(more - total)[:, None]
        whole = total
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + h * lse_stride + row, whole, mask=here)
