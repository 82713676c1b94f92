"""Tiles of the logits and of their gradient: the parts of mapped log-probs that see the vocabulary.

Shapes: R physical rows · T rows that some position reads · P positions · D model width ·
A vocabulary · r rows and v tokens of one tile · U distinct (row, target) entries.

On a GPU these are Triton kernels that never write a logit; elsewhere they are plain PyTorch, so
that everything built on them is tested without a GPU, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts.ops.logprobs.records import (
    Entries,
    Projection,
    RowGradient,
    RowSums,
    compute_dtype,
)

_BLOCK_POSITIONS = 4096
"""Positions whose hidden and weight rows PyTorch gathers at once."""


def row_sums(hidden: Tensor, projection: Projection, weighted: bool) -> RowSums:
    """Maximum and sum of exponentials of each row of hidden [T, D]."""
    if hidden.is_cuda:
        from harts.ops.logprobs import triton_kernels

        return triton_kernels.row_sums(hidden, projection, weighted)
    logits = _logits(hidden, projection)
    maximum = logits.amax(-1)
    exponentials = (logits - maximum[:, None]).exp()
    return RowSums(
        maximum, exponentials.sum(-1), (logits * exponentials).sum(-1) if weighted else None
    )


def merge_row_sums(a: RowSums, b: RowSums) -> RowSums:
    """Sums over the tokens of both."""
    maximum = torch.maximum(a.maximum, b.maximum)
    at_a, at_b = (a.maximum - maximum).exp(), (b.maximum - maximum).exp()
    weighted = None
    if a.weighted is not None and b.weighted is not None:
        weighted = a.weighted * at_a + b.weighted * at_b
    return RowSums(maximum, a.sum_exp * at_a + b.sum_exp * at_b, weighted)


def target_logits(
    hidden: Tensor, projection: Projection, target_rows: Tensor, targets: Tensor
) -> Tensor:
    """[P] logit of each target; 0 where the target lies outside the shard."""
    if hidden.is_cuda:
        from harts.ops.logprobs import triton_kernels

        return triton_kernels.target_logits(hidden, projection, target_rows, targets)
    dtype = compute_dtype(hidden.dtype)
    found = torch.zeros(len(targets), dtype=dtype)
    local = targets - projection.first
    inside = ((local >= 0) & (local < len(projection.weight))).nonzero()[:, 0]
    for start in range(0, len(inside), _BLOCK_POSITIONS):
        at = inside[start : start + _BLOCK_POSITIONS]
        rows, tokens = hidden[target_rows[at]].to(dtype), projection.weight[local[at]].to(dtype)
        logits = torch.linalg.vecdot(rows, tokens)
        if projection.bias is not None:
            logits += projection.bias[local[at]].to(dtype)
        found[at] = logits * projection.scale
    return found


def fill_gradient_tile(
    tile: Tensor, hidden: Tensor, projection: Projection, gradient: RowGradient
) -> None:
    """Write the gradient of the undivided logits, targets aside, to tile [r, v] (Eq. 19).

    With p the probabilities of hidden [r, D] over the projection's v tokens, it is
    -scale * p * (by_row + (log p + entropy) * by_entropy).
    """
    if hidden.is_cuda:
        from harts.ops.logprobs import triton_kernels

        triton_kernels.fill_gradient_tile(tile, hidden, projection, gradient)
        return
    logp = _logits(hidden, projection) - gradient.log_partition[:, None]
    factor = gradient.by_row[:, None]
    if gradient.entropy is not None and gradient.by_entropy is not None:
        factor = factor + (logp + gradient.entropy[:, None]) * gradient.by_entropy[:, None]
    tile.copy_(logp.exp() * factor * -projection.scale)


def overwrite_entries(tile: Tensor, entries: Entries, first_row: int, first_token: int) -> None:
    """Put the entries that lie in tile [r, v], whose corner is given, in their places."""
    if tile.is_cuda:
        from harts.ops.logprobs import triton_kernels

        triton_kernels.overwrite_entries(tile, entries, first_row, first_token)
        return
    rows, tokens = entries.rows - first_row, entries.tokens - first_token
    inside = (rows >= 0) & (rows < tile.shape[0]) & (tokens >= 0) & (tokens < tile.shape[1])
    tile[rows[inside], tokens[inside]] = entries.values[inside].to(tile.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total, whose dtype may be wider than theirs; nothing is rounded between."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def _logits(hidden: Tensor, projection: Projection) -> Tensor:
    dtype = compute_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ projection.weight.to(dtype).t()
    if projection.bias is not None:
        logits += projection.bias.to(dtype)
    return logits * projection.scale
