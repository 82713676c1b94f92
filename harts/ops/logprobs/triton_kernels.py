"""Triton kernels of the mapped log-probs: logits live in registers and are reduced there.

Shapes: T rows · P positions · D model width · A vocabulary · r rows and v tokens of one tile ·
n tiles of tokens · U entries.

Each program of the two large kernels multiplies one tile of rows by one tile of tokens and, before
the product leaves its registers, reduces it to row sums or turns it into the logits' gradient.
Operands are bfloat16, sums float32. Nothing is accumulated across programs: every run is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from harts.ops.logprobs.records import Entries, Projection, RowGradient, RowSums


class _Config(NamedTuple):
    rows: int
    tokens: int
    depth: int
    group: int
    warps: int
    stages: int


CONFIG = _Config(rows=128, tokens=256, depth=64, group=16, warps=8, stages=3)
"""The fastest of seven on an H200: 660 TFLOP/s, where cuBLAS writes the same logits at 670."""

_ENTRIES = 256
_POSITIONS = 8
_DOT_DEPTH = 512


def row_sums(hidden: Tensor, projection: Projection, weighted: bool) -> RowSums:
    """`tiles.row_sums` of hidden [T, D], contiguous, D a multiple of 16."""
    rows, tokens = len(hidden), len(projection.weight)
    shape = (triton.cdiv(tokens, CONFIG.tokens), rows)
    maximum, sum_exp, moment = (
        torch.empty(shape if i < 2 or weighted else (1, 1), device=hidden.device) for i in range(3)
    )
    _row_sums_kernel[(triton.cdiv(rows, CONFIG.rows) * shape[0],)](
        *_operands(hidden, projection),
        maximum,
        sum_exp,
        moment,
        weighted=weighted,
        **_meta(projection),
    )
    top = maximum.amax(0)
    at = maximum.sub_(top).exp_()
    total = (sum_exp * at).sum(0)
    return RowSums(top, total, (moment * at).sum(0) if weighted else None)


def fill_gradient_tile(
    tile: Tensor, hidden: Tensor, projection: Projection, gradient: RowGradient
) -> None:
    """`tiles.fill_gradient_tile` for tile [r, v] with contiguous rows."""
    rows, tokens = tile.shape
    entropy = gradient.log_partition if gradient.entropy is None else gradient.entropy
    by_entropy = gradient.by_row if gradient.by_entropy is None else gradient.by_entropy
    grid = (triton.cdiv(rows, CONFIG.rows) * triton.cdiv(tokens, CONFIG.tokens),)
    _gradient_kernel[grid](
        *_operands(hidden, projection),
        tile,
        tile.stride(0),
        gradient.log_partition,
        gradient.by_row,
        entropy,
        by_entropy,
        has_entropy=gradient.entropy is not None,
        **_meta(projection),
    )


def target_logits(
    hidden: Tensor, projection: Projection, target_rows: Tensor, targets: Tensor
) -> Tensor:
    """`tiles.target_logits`: one dot product a position."""
    found = torch.empty(len(targets), device=hidden.device)
    if len(targets):
        _target_logits_kernel[(triton.cdiv(len(targets), _POSITIONS),)](
            hidden,
            projection.weight,
            projection.weight if projection.bias is None else projection.bias,
            target_rows,
            targets,
            found,
            len(targets),
            hidden.stride(0),
            projection.weight.stride(0),
            projection.first,
            len(projection.weight),
            projection.scale,
            hidden.shape[1],
            has_bias=projection.bias is not None,
            block_positions=_POSITIONS,
            block_depth=_DOT_DEPTH,
        )
    return found


def overwrite_entries(tile: Tensor, entries: Entries, first_row: int, first_token: int) -> None:
    """`tiles.overwrite_entries`: no two entries share a place."""
    if len(entries.rows):
        _overwrite_kernel[(triton.cdiv(len(entries.rows), _ENTRIES),)](
            tile,
            tile.stride(0),
            *tile.shape,
            entries.rows,
            entries.tokens,
            entries.values,
            len(entries.rows),
            first_row,
            first_token,
            block=_ENTRIES,
        )


def _operands(hidden: Tensor, projection: Projection) -> tuple[object, ...]:
    weight = projection.weight
    return (
        TensorDescriptor.from_tensor(hidden, [CONFIG.rows, CONFIG.depth]),
        TensorDescriptor.from_tensor(weight, [CONFIG.tokens, CONFIG.depth]),
        weight if projection.bias is None else projection.bias,
        len(hidden),
        len(weight),
        hidden.shape[1],
        projection.scale,
    )


def _meta(projection: Projection) -> dict[str, int | bool]:
    return {
        "has_bias": projection.bias is not None,
        "block_rows": CONFIG.rows,
        "block_tokens": CONFIG.tokens,
        "block_depth": CONFIG.depth,
        "group": CONFIG.group,
        "num_warps": CONFIG.warps,
        "num_stages": CONFIG.stages,
    }


@triton.jit
def _tile_of(program, rows, tokens, block_rows, block_tokens, group: tl.constexpr):
    """First row and token of a program's tile; groups of row tiles share the tokens' tiles."""
    row_tiles = tl.cdiv(rows, block_rows)
    token_tiles = tl.cdiv(tokens, block_tokens)
    in_group = group * token_tiles
    first = program // in_group * group
    size = min(row_tiles - first, group)
    row = first + program % in_group % size
    token = program % in_group // size
    return row * block_rows, token * block_tokens


@triton.jit
def _logits(
    hidden,
    weight,
    bias,
    row,
    token,
    tokens,
    depth,
    scale,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    block_depth: tl.constexpr,
):
    """[block_rows, block_tokens] logits after temperature."""
    z = tl.zeros((block_rows, block_tokens), dtype=tl.float32)
    for k in range(0, depth, block_depth):
        z = tl.dot(hidden.load([row, k]), weight.load([token, k]).T, z)
    if has_bias:
        at = token + tl.arange(0, block_tokens)
        z += tl.load(bias + at, mask=at < tokens, other=0.0).to(tl.float32)[None, :]
    return z * scale


@triton.jit
def _row_sums_kernel(
    hidden,
    weight,
    bias,
    rows,
    tokens,
    depth,
    scale,
    maximum,
    sum_exp,
    moment,
    weighted: tl.constexpr,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    block_depth: tl.constexpr,
    group: tl.constexpr,
):
    row, token = _tile_of(tl.program_id(0), rows, tokens, block_rows, block_tokens, group)
    z = _logits(
        hidden, weight, bias, row, token, tokens, depth, scale,
        has_bias, block_rows, block_tokens, block_depth,
    )  # fmt: skip
    inside = token + tl.arange(0, block_tokens) < tokens
    top = tl.max(tl.where(inside[None, :], z, float("-inf")), 1)
    e = tl.where(inside[None, :], tl.exp(z - top[:, None]), 0.0)
    at = row + tl.arange(0, block_rows)
    to = (token // block_tokens).to(tl.int64) * rows + at
    tl.store(maximum + to, top, mask=at < rows)
    tl.store(sum_exp + to, tl.sum(e, 1), mask=at < rows)
    if weighted:
        tl.store(moment + to, tl.sum(e * z, 1), mask=at < rows)


@triton.jit
def _gradient_kernel(
    hidden,
    weight,
    bias,
    rows,
    tokens,
    depth,
    scale,
    tile,
    stride,
    log_partition,
    by_row,
    entropy,
    by_entropy,
    has_entropy: tl.constexpr,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    block_depth: tl.constexpr,
    group: tl.constexpr,
):
    row, token = _tile_of(tl.program_id(0), rows, tokens, block_rows, block_tokens, group)
    z = _logits(
        hidden, weight, bias, row, token, tokens, depth, scale,
        has_bias, block_rows, block_tokens, block_depth,
    )  # fmt: skip
    at = row + tl.arange(0, block_rows)
    here = at < rows
    logp = z - tl.load(log_partition + at, mask=here, other=0.0)[:, None]
    factor = tl.load(by_row + at, mask=here, other=0.0)[:, None] * -scale
    if has_entropy:
        to_entropy = tl.load(by_entropy + at, mask=here, other=0.0)[:, None] * -scale
        factor = factor + (logp + tl.load(entropy + at, mask=here, other=0.0)[:, None]) * to_entropy
    to = token + tl.arange(0, block_tokens)
    tl.store(
        tile + at.to(tl.int64)[:, None] * stride + to[None, :],
        (tl.exp(logp) * factor).to(tile.dtype.element_ty),
        mask=here[:, None] & (to < tokens)[None, :],
    )


@triton.jit
def _target_logits_kernel(
    hidden,
    weight,
    bias,
    target_rows,
    targets,
    found,
    positions,
    hidden_stride,
    weight_stride,
    first,
    tokens,
    scale,
    depth,
    has_bias: tl.constexpr,
    block_positions: tl.constexpr,
    block_depth: tl.constexpr,
):
    at = tl.program_id(0) * block_positions + tl.arange(0, block_positions)
    row = tl.load(target_rows + at, mask=at < positions, other=0)
    token = tl.load(targets + at, mask=at < positions, other=-1) - first
    inside = (at < positions) & (token >= 0) & (token < tokens)
    token = tl.where(inside, token, 0)
    z = tl.zeros((block_positions,), dtype=tl.float32)
    for k in range(0, depth, block_depth):
        d = k + tl.arange(0, block_depth)
        here = inside[:, None] & (d < depth)[None, :]
        a = tl.load(hidden + row[:, None] * hidden_stride + d[None, :], mask=here, other=0.0)
        b = tl.load(weight + token[:, None] * weight_stride + d[None, :], mask=here, other=0.0)
        z += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    if has_bias:
        z += tl.load(bias + token, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + at, tl.where(inside, z * scale, 0.0), mask=at < positions)


@triton.jit
def _overwrite_kernel(
    tile,
    stride,
    rows,
    tokens,
    entry_rows,
    entry_tokens,
    values,
    entries,
    first_row,
    first_token,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.load(entry_rows + at, mask=at < entries, other=-1) - first_row
    token = tl.load(entry_tokens + at, mask=at < entries, other=-1) - first_token
    inside = (at < entries) & (row >= 0) & (row < rows) & (token >= 0) & (token < tokens)
    value = tl.load(values + at, mask=inside, other=0.0)
    tl.store(tile + row.to(tl.int64) * stride + token, value.to(tile.dtype.element_ty), mask=inside)
