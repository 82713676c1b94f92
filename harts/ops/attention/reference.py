"""PyTorch form of tree attention: per sequence, packed queries against ancestor and own KV.

Shapes: R physical rows · C compact rows · H query heads · Hkv key/value heads · K key dim ·
V value dim · h ancestors and l own rows of one sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from harts.ops.index_cache import on_host
from harts.ops.tree_index import TreeIndex

_BLOCK_QUERIES = 512
"""Queries per call: bounds the mask, and how much later KV a call reads only to mask it."""


def attend_tree(
    query: Tensor, key: Tensor, value: Tensor, index: TreeIndex, scale: float
) -> Tensor:
    """`tree_attention` after its checks, on any device."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    host = on_host(index)
    own, ancestors = host.sequence_offsets.tolist(), host.ancestor_offsets.tolist()
    views = [
        view
        for i in range(len(own) - 1)
        for view in (
            index.ancestor_rows[ancestors[i] : ancestors[i + 1]],
            torch.arange(own[i], own[i + 1], device=query.device),
        )
    ]
    # One gather for all sequences: a gather each would make a full gradient of the rows each.
    rows = torch.cat([*views, index.ancestor_rows[:0]])
    lengths = [ancestors[i + 1] - ancestors[i] + own[i + 1] - own[i] for i in range(len(own) - 1)]
    keys = torch.split(key.to(dtype).index_select(0, rows), lengths)
    values = torch.split(value.to(dtype).index_select(0, rows), lengths)
    queries = torch.split(
        query[: index.compact_rows].to(dtype), host.sequence_offsets.diff().tolist()
    )
    parts = [
        _attend_sequence(q, k, v, scale) for q, k, v in zip(queries, keys, values, strict=True)
    ]
    padding = query.new_zeros(
        index.rows - index.compact_rows, query.shape[1], value.shape[2], dtype=dtype
    )
    return torch.cat([*parts, padding]).to(query.dtype)


def _attend_sequence(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[l, H, K], [h + l, Hkv, K], [h + l, Hkv, V] -> [l, H, V], bottom-right causal."""
    own, total = len(query), len(key)
    ancestors = total - own
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    blocks = []
    for a in range(0, own, _BLOCK_QUERIES):
        b = min(a + _BLOCK_QUERIES, own)
        seen = ancestors + b
        mask = torch.arange(seen, device=q.device) <= ancestors + torch.arange(
            a, b, device=q.device
        ).unsqueeze(1)
        blocks.append(
            F.scaled_dot_product_attention(
                q[:, :, a:b],
                k[:, :, :seen],
                v[:, :, :seen],
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
        )
    return torch.cat(blocks, dim=2)[0].transpose(0, 1) if blocks else query[..., :0]
