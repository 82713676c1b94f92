"""CPU form of tree attention: one fused call per run of ancestors that sequences share.

Shapes: R physical rows · C compact rows · H query heads · Hkv key/value heads · K key dim ·
V value dim · n queries and m keys of one piece.

The ancestors of a sequence are a few runs of contiguous rows, and all sequences below a fork read
the same runs. So attention splits into pieces: each sequence against itself (causal), and each
distinct run against the queries of every sequence below it (no mask). No KV is copied, no mask is
made, and memory is O(C). A row's pieces are merged by their log-sum-exp. Backward runs the fused
backward of each piece with the *merged* output and log-sum-exp: then exp(score - lse) is the
probability over the whole prefix, so the sum over pieces is exact (FlashAttention's tiling).
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.tree_index import TreeIndex

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Piece(NamedTuple):
    """Queries that all see the same contiguous keys."""

    queries: slice | Tensor
    """Compact rows of the queries: a slice where they are contiguous, else [n] int64."""
    keys: slice
    causal: bool
    """True: queries are the keys' own rows; each sees those up to itself. False: all."""


def attend_tree_cascade(
    query: Tensor, key: Tensor, value: Tensor, index: TreeIndex, scale: float
) -> Tensor:
    """`tree_attention` after its checks, on the CPU."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    value_dim = value.shape[2]
    # The fused kernel wants equal head dims; zero columns change neither scores nor values.
    width = max(query.shape[2], value_dim)
    q, k, v = (F.pad(t.to(dtype), (0, width - t.shape[2])) for t in (query, key, value))
    out: Tensor = _CascadeAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, _pieces(index), index.compact_rows, scale
    )
    return out[..., :value_dim].to(query.dtype)


def _pieces(index: TreeIndex) -> list[_Piece]:
    """Own pieces of all sequences, then the shared runs; own first, so that merging can start."""
    own = index.sequence_offsets.numpy()
    own_slices = [slice(int(a), int(b)) for a, b in itertools.pairwise(own)]
    pieces = [_Piece(s, s, True) for s in own_slices if s.stop > s.start]
    rows, offsets = index.ancestor_rows.numpy(), index.ancestor_offsets.numpy()
    if not len(rows):
        return pieces
    # Runs are cut where a sequence begins too, so that all who read a run name it alike.
    begins = np.zeros(index.rows, dtype=bool)
    begins[own[:-1][np.diff(own) > 0]] = True
    cut = begins[rows]
    cut[1:] |= np.diff(rows) != 1
    cut[offsets[offsets < len(rows)]] = True
    first = np.flatnonzero(cut)
    last = np.append(first[1:], len(rows)) - 1
    reader = np.searchsorted(offsets, first, side="right") - 1
    readers: dict[tuple[int, int], list[int]] = {}
    for start, end, sequence in zip(
        rows[first].tolist(), rows[last].tolist(), reader.tolist(), strict=True
    ):
        readers.setdefault((start, end + 1), []).append(sequence)
    for (start, stop), sequences in readers.items():
        queries = _rows_of([own_slices[i] for i in sequences])
        pieces.append(_Piece(queries, slice(start, stop), False))
    return pieces


def _rows_of(slices: list[slice]) -> slice | Tensor:
    if all(a.stop == b.start for a, b in itertools.pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    return torch.cat([torch.arange(s.start, s.stop) for s in slices])


class _CascadeAttention(torch.autograd.Function):
    """q [R, H, K], k [R, Hkv, K], v [R, Hkv, K] -> [R, H, K]; zeros in padding rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pieces: list[_Piece],
        compact_rows: int,
        scale: float,
    ) -> Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(compact_rows, q.shape[1])
        for piece in pieces:
            part, part_lse = _FUSED(
                _heads_first(q[piece.queries]),
                _heads_first(k[piece.keys]),
                _heads_first(v[piece.keys]),
                0.0,
                piece.causal,
                scale=scale,
            )
            part, part_lse = part[0].transpose(0, 1), part_lse[0].t()
            if not piece.causal:
                before = lse[piece.queries]
                total = torch.logaddexp(before, part_lse)
                part = part.mul_((part_lse - total).exp_()[..., None])
                part.addcmul_(out[piece.queries], (before - total).exp_()[..., None])
                part_lse = total
            out[piece.queries] = part
            lse[piece.queries] = part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece in ctx.pieces:
            parts = _FUSED_BACKWARD(
                _heads_first(grad[piece.queries]),
                _heads_first(q[piece.queries]),
                _heads_first(k[piece.keys]),
                _heads_first(v[piece.keys]),
                _heads_first(out[piece.queries]),
                lse[piece.queries].t()[None],
                0.0,
                piece.causal,
                scale=ctx.scale,
            )
            part_q, part_k, part_v = (part[0].transpose(0, 1) for part in parts)
            if isinstance(piece.queries, slice):
                grad_q[piece.queries] += part_q
            else:
                grad_q.index_add_(0, piece.queries, part_q)
            grad_k[piece.keys] += part_k
            grad_v[piece.keys] += part_v
        return grad_q, grad_k, grad_v, None, None, None


def _heads_first(rows: Tensor) -> Tensor:
    """[n, H, K] -> [1, H, n, K], a view."""
    return rows.transpose(0, 1)[None]
