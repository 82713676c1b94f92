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
    add_rows,
    attend,
    attend_backward,
    gather_rows,
    merge_rows,
)
from harts.ops.attention.pieces import AttentionPlan, PackedKeys, plan_attention
from harts.ops.index_cache import derived
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
) -> Tensor:
    """`tree_attention` after its checks, for bfloat16 and float16 on a GPU.

    Memory beyond inputs, output and gradients: the workspace, or what the longest single path
    needs if that is more, and float32 sums of the gradients.
    """
    heads, kv_heads, value_dim = query.shape[1], key.shape[1], value.shape[2]
    width = -(-max(query.shape[2], value_dim) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    element = width * query.element_size()
    # Keys and values copied, their gradients by query head; queries, outputs and gradients of both.
    key_budget = max(1, workspace_bytes // (element * (2 * kv_heads + 2 * heads)))
    query_budget = max(1, workspace_bytes // (element * 5 * heads))
    plan = derived(
        index,
        f"attention {heads} {kv_heads} {key_budget} {query_budget}",
        partial(
            plan_attention,
            heads=heads,
            kv_heads=kv_heads,
            key_budget=key_budget,
            query_budget=query_budget,
        ),
    )
    out: Tensor = _VarlenAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, plan, index.compact_rows, width, scale
    )
    return out


class _VarlenAttention(torch.autograd.Function):
    """q [R, H, K], k [R, Hkv, K], v [R, Hkv, V] -> [R, H, V]; zeros in padding rows.

    Head dims are padded to one width call by call: zero columns change neither scores nor values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttentionPlan,
        compact_rows: int,
        width: int,
        scale: float,
    ) -> Tensor:
        value_dim = v.shape[2]
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        # Parts are merged in the wider dtype, and rounded once.
        out = q.new_empty(*q.shape[:2], value_dim, dtype=exact if plan.shared else q.dtype)
        out[compact_rows:] = 0
        lse = q.new_empty(q.shape[1], len(q), dtype=exact)

        def run(at: slice | Tensor, packed: PackedKeys) -> tuple[Tensor, Tensor]:
            part, part_lse = attend(
                _rows(q, at, width),
                _rows(k, packed.key_rows, width),
                _rows(v, packed.key_rows, width),
                packed,
                scale,
            )
            return part[..., :value_dim], part_lse

        for view in plan.views:
            out[view.own], lse[:, view.own] = run(view.own, view.packed)
        for shared in plan.shared:
            merge_rows(out, lse, *run(shared.query_rows, shared.packed), shared.queries)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.width, ctx.scale = plan, width, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        width: int = ctx.width
        # One call's sums are final; several add up in the wider dtype of the log-sum-exp.
        several = len(plan.views) + len(plan.shared) > 1
        grad_q = torch.zeros_like(q, dtype=lse.dtype if plan.shared else q.dtype)
        grad_k = torch.zeros_like(k, dtype=lse.dtype if several else k.dtype)
        grad_v = torch.zeros_like(v, dtype=lse.dtype if several else v.dtype)

        def run(at: slice | Tensor, packed: PackedKeys) -> Tensor:
            part_q, part_k, part_v = attend_backward(
                _rows(grad, at, width),
                _rows(q, at, width),
                _rows(k, packed.key_rows, width),
                _rows(v, packed.key_rows, width),
                _rows(out, at, width),
                lse[:, at].contiguous(),
                packed,
                ctx.scale,
            )
            add_rows(grad_k, part_k, packed.keys)
            add_rows(grad_v, part_v, packed.keys)
            return part_q

        for view in plan.views:
            grad_q[view.own] = run(view.own, view.packed)[..., : q.shape[2]]
        for shared in plan.shared:
            add_rows(grad_q, run(shared.query_rows, shared.packed), shared.queries)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), *(None,) * 4


def _rows(rows: Tensor, at: slice | Tensor, width: int) -> Tensor:
    """Some rows of [R, heads, dim], padded with zero columns to [n, heads, width]."""
    if not isinstance(at, slice):
        return gather_rows(rows, at, width)
    missing = width - rows.shape[2]
    return F.pad(rows[at], (0, missing)) if missing else rows[at].contiguous()
