"""Packed attention with its log-sum-exp, and sums and merges over packed rows.

Shapes: n packed queries · m packed keys · H query heads · Hkv key/value heads · K head dim ·
R physical rows · U rows that a call reads or adds to.

On a GPU these are the FlashAttention that comes with PyTorch and Triton kernels; elsewhere they are
plain PyTorch, so that everything built on them is tested without a GPU, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harts.ops.attention.pieces import Fold, PackedKeys, RowSum, Speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What computes packed attention."""

    name: str
    attend: Callable[..., tuple[Tensor, Tensor]]
    """As `attend` of this module."""
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """As `attend_backward` of this module."""
    one_width: bool
    """Whether keys and values must be equally wide, and key gradients come a query head each."""
    speeds: Speeds
    deterministic_speeds: Speeds
    """The same under `torch.use_deterministic_algorithms`."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, call: PackedKeys, scale: float, _into: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[n, H, K], [m, Hkv, K], [m, Hkv, K] -> output [n, H, K], log-sum-exp [H, n] float32.

    A kernel may write the output into the last argument, where there is one.
    """
    if not query.is_cuda:
        return attend_plainly(query, key, value, call, scale)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        call.cu_queries,
        call.cu_keys,
        call.max_queries,
        call.max_keys,
        0.0,
        False,
        False,
        scale=scale,
        # Aligned bottom right, which `is_causal` does not promise for fewer queries than keys.
        window_size_left=-1,
        window_size_right=0 if call.causal else -1,
    )
    return out, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: PackedKeys,
    scale: float,
    _into: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    A kernel may write the first into the last argument, where there is one. Output and log-sum-exp
    may be those over more keys than this call's: exp(score - lse) is then the probability among all
    of them, and the gradients of all calls add up to the whole.
    """
    if not query.is_cuda:
        return backward_plainly(grad, query, key, value, out, lse, call, scale)
    unused = query.new_empty(2, dtype=torch.uint64)  # state of the dropout that there is none of
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        call.cu_queries,
        call.cu_keys,
        call.max_queries,
        call.max_keys,
        0.0,
        False,
        unused,
        unused,
        scale=scale,
        window_size_left=-1,
        window_size_right=0 if call.causal else -1,
    )
    return found


TORCH = Kernel(
    name="varlen",
    attend=attend,
    attend_backward=attend_backward,
    one_width=True,
    speeds=Speeds(score=11e-12),
    deterministic_speeds=Speeds(score=22e-12),
)
"""The FlashAttention that comes with PyTorch."""


def gather_rows(rows: Tensor, at: Tensor, width: int) -> Tensor:
    """Rows at [n] of [R, heads, dim], padded with zero columns to [n, heads, width]."""
    if rows.is_cuda and len(at):
        from harts.ops.attention import triton_kernels

        return triton_kernels.gather_rows(
            rows if rows.stride(2) == 1 else rows.contiguous(), at, width
        )
    return F.pad(rows.index_select(0, at), (0, width - rows.shape[2]))


def add_rows(total: Tensor, packed: Tensor, rows: RowSum) -> None:
    """Add the packed entries [n, Hkv, K] to their rows of total [R, Hkv, V], V <= K.

    Each row's entries are summed in float32 in a fixed order.
    """
    if total.is_cuda:
        from harts.ops.attention import triton_kernels

        triton_kernels.add_rows(total, packed, rows)
        return
    row = torch.repeat_interleave(rows.rows, rows.offsets.diff())
    total.index_add_(0, row, packed[rows.entries, :, : total.shape[2]].to(total.dtype))


def fold_rows(final: Tensor, carried: Tensor, packed: Tensor, rows: RowSum, fold: Fold) -> None:
    """Add the packed entries [n, Hkv, K] to their rows of final [R, Hkv, V], V <= K.

    Sums are carried [slots, Hkv, V] from call to call in float32, in a fixed order, and rounded to
    `final` once.
    """
    if final.is_cuda:
        from harts.ops.attention import triton_kernels

        triton_kernels.fold_rows(final, carried, packed, rows, fold)
        return
    sums = carried.new_zeros(len(rows.rows), *final.shape[1:])
    row = torch.repeat_interleave(torch.arange(len(sums)), rows.offsets.diff())
    sums.index_add_(0, row, packed[rows.entries, :, : final.shape[2]].to(sums.dtype))
    sums[~fold.first] += carried[fold.slots[~fold.first]]
    carried[fold.slots[~fold.last]] = sums[~fold.last]
    final[rows.rows[fold.last]] = sums[fold.last].to(final.dtype)


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: RowSum) -> None:
    """Merge parts [n, H, V] with their log-sum-exps [H, n] into out [R, H, V], lse [H, R].

    All parts of a row are merged at once, in float32.
    """
    if out.is_cuda:
        from harts.ops.attention import triton_kernels

        triton_kernels.merge_rows(out, lse, part, part_lse, rows)
        return
    for row, (a, b) in zip(
        rows.rows.tolist(), itertools.pairwise(rows.offsets.tolist()), strict=True
    ):
        at = rows.entries[a:b]
        every = torch.cat([lse[:, row, None], part_lse[:, at]], 1)
        whole = every.logsumexp(1)
        values = torch.cat([out[row, :, None], part[at].transpose(0, 1)], 1)
        out[row] = ((every - whole[:, None]).exp()[..., None] * values).sum(1)
        lse[:, row] = whole


def _slices(call: PackedKeys) -> list[tuple[slice, slice]]:
    queries, keys = (
        [slice(a, b) for a, b in itertools.pairwise(bounds.tolist())]
        for bounds in (call.cu_queries, call.cu_keys)
    )
    return list(zip(queries, keys, strict=True))


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """[H, l, h] scores of one piece, -inf where a query does not see a key."""
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * scale
    if causal:
        hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, call: PackedKeys, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend` anywhere, in any dtype; V may differ from K."""
    out = query.new_empty(*query.shape[:2], value.shape[2])
    lse = query.new_empty(query.shape[1], len(query))
    group = query.shape[1] // key.shape[1]
    for q, k in _slices(call):
        scores = _scores(query[q], key[k], call.causal, scale)
        out[q] = torch.einsum(
            "hqk,khd->qhd", scores.softmax(-1), value[k].repeat_interleave(group, 1)
        )
        lse[:, q] = scores.logsumexp(-1)
    return out, lse


def backward_plainly(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: PackedKeys,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` anywhere, in any dtype; V may differ from K."""
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    kv_heads = key.shape[1]
    group = query.shape[1] // kv_heads
    through = (grad * out).sum(-1).t()
    for q, k in _slices(call):
        p = (_scores(query[q], key[k], call.causal, scale) - lse[:, q, None]).exp()
        values = value[k].repeat_interleave(group, 1)
        by_p = torch.einsum("qhd,khd->hqk", grad[q], values)
        by_score = p * (by_p - through[:, q, None]) * scale
        keys = key[k].repeat_interleave(group, 1)
        grads[0][q] = torch.einsum("hqk,khd->qhd", by_score, keys)
        by_key = torch.einsum("hqk,qhd->khd", by_score, query[q])
        by_value = torch.einsum("hqk,qhd->khd", p, grad[q])
        grads[1][k] = by_key.view(-1, kv_heads, group, key.shape[2]).sum(2)
        grads[2][k] = by_value.view(-1, kv_heads, group, value.shape[2]).sum(2)
    return grads
