"""Tree attention in packed calls of bounded memory: ancestor views and shared runs.

Shapes: R physical rows · C compact rows · H query heads · Hkv key/value heads · K key dim ·
V value dim.

Forward merges what a row gets from its view and from shared runs by their log-sum-exps. Backward
runs each call again with the merged output and log-sum-exp, copies keys anew instead of keeping
them, and sums the gradients of a row's copies in a fixed order. `pieces` says how calls are cut.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.attention.packed import (
    TORCH,
    Kernel,
    add_rows,
    fold_rows,
    gather_rows,
    merge_rows,
)
from harts.ops.attention.pieces import (
    AttentionPlan,
    Fold,
    PackedKeys,
    Speeds,
    estimate_seconds,
    plan_attention,
)
from harts.ops.index_cache import derived
from harts.ops.kept_outputs import kept
from harts.ops.tree_index import TreeIndex

WORKSPACE_BYTES = 3 * 2**30
"""Copied keys, repacked queries and their gradients in one call; see `attend_tree_varlen`."""
_HEAD_MULTIPLE = 8
"""What the kernels want the head dim to be a multiple of."""


def attend_tree_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: TreeIndex,
    scale: float,
    workspace_bytes: int = WORKSPACE_BYTES,
    kernel: Kernel = TORCH,
) -> Tensor:
    """`tree_attention` after its checks, for bfloat16 and float16 on a GPU.

    Memory beyond inputs, output and gradients: the workspace, or what the longest single path
    needs if that is more, and float32 sums of the gradients.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    widths = _widths(query.shape[2], value.shape[2], kernel)
    key_budget = workspace_bytes // key_bytes(query, key, value, kernel)
    query_budget = workspace_bytes // (query.element_size() * 5 * max(widths) * heads)
    speeds = _speeds(kernel)
    plan = derived(
        index,
        f"attention {heads} {kv_heads} {key_budget} {query_budget} {speeds}",
        partial(
            plan_attention,
            heads=heads,
            kv_heads=kv_heads,
            key_budget=max(1, key_budget),
            query_budget=max(1, query_budget),
            speeds=speeds,
        ),
    )
    out: Tensor = _VarlenAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, plan, index.compact_rows, kernel, widths, scale
    )
    return out


def estimate_varlen(index: TreeIndex, heads: int, kv_heads: int, kernel: Kernel) -> float:
    """Seconds on an H200, comparable with those of other forms only."""
    speeds = _speeds(kernel)
    return derived(
        index,
        f"attention estimate {heads} {kv_heads} {speeds}",
        partial(estimate_seconds, heads=heads, kv_heads=kv_heads, speeds=speeds),
    )


def key_bytes(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> int:
    """Workspace of one copied key: itself, its value, and the gradients of both."""
    width = sum(_widths(query.shape[2], value.shape[2], kernel))
    heads, kv_heads = query.shape[1], key.shape[1]
    gradients = heads if kernel.one_width else kv_heads
    # Several query heads that share a key add up in float32.
    sums = 4 * kv_heads if heads > kv_heads and not kernel.one_width else 0
    return width * (query.element_size() * (kv_heads + gradients) + sums)


def _speeds(kernel: Kernel) -> Speeds:
    exact = torch.are_deterministic_algorithms_enabled()
    return kernel.deterministic_speeds if exact else kernel.speeds


def _widths(key_dim: int, value_dim: int, kernel: Kernel) -> tuple[int, int]:
    """Columns that keys and values are padded to."""
    if kernel.one_width:
        key_dim = value_dim = max(key_dim, value_dim)
    key_dim, value_dim = (-(-d // _HEAD_MULTIPLE) * _HEAD_MULTIPLE for d in (key_dim, value_dim))
    return key_dim, value_dim


class _VarlenAttention(torch.autograd.Function):
    """q [R, H, K], k [R, Hkv, K], v [R, Hkv, V] -> [R, H, V]; zeros in padding rows.

    Head dims are padded call by call: zero columns change neither scores nor values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttentionPlan,
        compact_rows: int,
        kernel: Kernel,
        widths: tuple[int, int],
        scale: float,
    ) -> Tensor:
        out, lse = kept(lambda: _attend(q, k, v, plan, compact_rows, kernel, widths, scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.compact_rows = plan, compact_rows
        ctx.kernel, ctx.widths, ctx.scale = kernel, widths, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        kernel: Kernel = ctx.kernel
        wide, value_wide = ctx.widths
        rows: int = ctx.compact_rows
        grad_q, grad_k, grad_v = (
            torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)
            for t, dtype in ((q, lse.dtype if plan.shared else q.dtype), (k, k.dtype), (v, v.dtype))
        )
        for t in (grad_q, grad_k, grad_v):
            t[rows:] = 0
        # What several calls reach adds up in the wider dtype of the log-sum-exp.
        carried_k, carried_v = (lse.new_empty(max(1, plan.slots), *t.shape[1:]) for t in (k, v))

        def run(
            at: slice | Tensor, packed: PackedKeys, fold: Fold, into: Tensor | None = None
        ) -> Tensor:
            part_q, part_k, part_v = kernel.attend_backward(
                _rows(grad, at, value_wide),
                _rows(q, at, wide),
                _rows(k, packed.key_rows, wide),
                _rows(v, packed.key_rows, value_wide),
                _rows(out, at, value_wide),
                lse[:, at].contiguous(),
                packed,
                ctx.scale,
                into,
            )
            fold_rows(grad_k, carried_k, part_k, packed.keys, fold)
            fold_rows(grad_v, carried_v, part_v, packed.keys, fold)
            return part_q

        folds = iter(plan.folds)
        for view, fold in zip(plan.views, folds, strict=False):
            into = _target(grad_q[view.own], q.dtype, wide)
            part = run(view.own, view.packed, fold, into)
            _settle(grad_q[view.own], part[..., : q.shape[2]])
        for shared, fold in zip(plan.shared, folds, strict=True):
            add_rows(grad_q, run(shared.query_rows, shared.packed, fold), shared.queries)
        return grad_q.to(q.dtype), grad_k, grad_v, *(None,) * 5


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    compact_rows: int,
    kernel: Kernel,
    widths: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [R, H, V] and log-sum-exp [H, R]."""
    value_dim = v.shape[2]
    wide, value_wide = widths
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Parts are merged in the wider dtype, and rounded once.
    out = q.new_empty(*q.shape[:2], value_dim, dtype=exact if plan.shared else q.dtype)
    out[compact_rows:] = 0
    lse = q.new_empty(q.shape[1], len(q), dtype=exact)

    def run(
        at: slice | Tensor, packed: PackedKeys, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        part, part_lse = kernel.attend(
            _rows(q, at, wide),
            _rows(k, packed.key_rows, wide),
            _rows(v, packed.key_rows, value_wide),
            packed,
            scale,
            into,
        )
        return part[..., :value_dim], part_lse

    for view in plan.views:
        into = _target(out[view.own], q.dtype, value_wide)
        part, lse[:, view.own] = run(view.own, view.packed, into)
        _settle(out[view.own], part)
    for shared in plan.shared:
        merge_rows(out, lse, *run(shared.query_rows, shared.packed), shared.queries)
    return out.to(q.dtype), lse


def _target(rows: Tensor, dtype: torch.dtype, width: int) -> Tensor | None:
    """Rows that a kernel can write its result to, if it is of this dtype and width."""
    return rows if rows.dtype == dtype and rows.shape[2] == width else None


def _settle(rows: Tensor, found: Tensor) -> None:
    """Copy a result to its rows, unless the kernel wrote it there."""
    if rows.data_ptr() != found.data_ptr():
        rows.copy_(found)


def _rows(rows: Tensor, at: slice | Tensor, width: int) -> Tensor:
    """Some rows of [R, heads, dim], padded with zero columns to [n, heads, width]."""
    if not isinstance(at, slice):
        return gather_rows(rows, at, width)
    part, missing = rows[at], width - rows.shape[2]
    if missing:
        return F.pad(part, (0, missing))
    # A copy: contiguous() would hand back rows that only begin at the wrong place.
    return part if _in_place(part) else part.clone(memory_format=torch.contiguous_format)


def _in_place(rows: Tensor) -> bool:
    """Whether kernels can read these rows where they lie, such as heads that lie before rows."""
    row, head, column = rows.stride()
    apart = row > 0 and head > 0 and column == 1
    aligned = not any(n % _HEAD_MULTIPLE for n in (row, head, rows.storage_offset()))
    return apart and aligned
