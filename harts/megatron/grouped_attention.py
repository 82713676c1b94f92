"""Grouped-query attention for Megatron: heads over tensor and context parallelism, rows of a tree.

Shapes: R physical rows, r of them on this rank · H query heads and N key/value heads of this
tensor-parallel rank · K head dim · T of them with rotary positions · D model width.

One projection makes the queries of a key/value head, its key and its value, head after head. Ranks
beyond the key/value heads share them: over tensor parallelism each then projects all keys of its
own rows, over context parallelism each gets a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from harts.megatron.layers import (
    ReplicatedLinear,
    column_projection,
    heads_of_rank,
    heads_to_rows,
    rotary_angles,
    row_projection,
    rows_to_heads,
)
from harts.megatron.packet import tree_of
from harts.ops.attention import tree_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedShape:
    """Sizes of a grouped-query layer over all ranks."""

    heads: int
    key_value_heads: int
    head_dim: int
    rotary_dim: int
    rotary_base: float
    norm_epsilon: float
    gated: bool
    """Whether the query projection also makes a gate for each number of the output."""

    @property
    def query_columns(self) -> int:
        """Numbers a query head in the projection."""
        return self.head_dim * (2 if self.gated else 1)

    @property
    def queries_columns(self) -> int:
        """Numbers of the query heads that share a key/value head."""
        return self.heads // self.key_value_heads * self.query_columns


@dataclass(slots=True, kw_only=True)
class GroupedSubmodules:
    """Parts that a backend may replace."""

    linear_qkv: Any
    q_layernorm: Any
    k_layernorm: Any
    linear_proj: Any


class TreeGroupedAttention(MegatronModule):  # type: ignore[misc]
    """Attention of Qwen3 and, with an output gate, of Qwen3-Next; queries and keys normalised."""

    def __init__(
        self,
        config: Any,
        submodules: GroupedSubmodules,
        layer_number: int,
        *,
        shape: GroupedShape,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.shape = shape
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        self.heads = heads_of_rank(shape.heads, pg_collection, kind="attention")
        keys = 2 * shape.key_value_heads * shape.head_dim
        shared = self.tp_group.size() > shape.key_value_heads  # a multiple: Megatron checks that
        self.groups = 1 if shared else shape.key_value_heads // self.tp_group.size()
        columns = shape.heads * shape.query_columns + (0 if shared else keys)
        self.linear_qkv = column_projection(
            submodules.linear_qkv, config, self.tp_group, config.hidden_size, columns, "qkv"
        )
        self.linear_kv = ReplicatedLinear(config, config.hidden_size, keys) if shared else None
        norm = {"config": config, "hidden_size": shape.head_dim, "eps": shape.norm_epsilon}
        self.q_layernorm = build_module(submodules.q_layernorm, **norm)
        self.k_layernorm = build_module(submodules.k_layernorm, **norm)
        self.linear_proj = row_projection(
            submodules.linear_proj, config, self.tp_group, shape.heads * shape.head_dim, "proj"
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[r, 1, D] rows of this rank to the same, and no bias."""
        tree = tree_of(packed_seq_params)
        shape, dim = self.shape, self.shape.head_dim
        query, key, value, gate = self._project(hidden_states)
        angles = rotary_angles(
            tree.positions[packed_seq_params.context_rows], shape.rotary_dim, shape.rotary_base
        )
        query = turn_halves(self.q_layernorm(query), angles)
        key = turn_halves(self.k_layernorm(key), angles)
        if self.cp_group.size() > 1:
            query, key, value = self._whole_rows(query, key, value)
        core = tree_attention(
            query.contiguous(), key.contiguous(), value.contiguous(), index=tree, scale=dim**-0.5
        )
        attended = heads_to_rows(core, self.cp_group)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        output, _bias = self.linear_proj(attended.reshape(attended.shape[0], 1, -1))
        return output, None

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [r, H, K], keys and values [r, N, K], output gates [r, H, K]."""
        shape, dim = self.shape, self.shape.head_dim
        projected, _bias = self.linear_qkv(hidden)
        by_group = projected.view(projected.shape[0], self.groups, -1)
        if self.linear_kv is None:
            queries, key, value = by_group.split([shape.queries_columns, dim, dim], -1)
        else:
            queries, (key, value) = by_group, self._shared_keys(hidden)
        by_head = queries.reshape(len(queries), self.heads, shape.query_columns)
        gate = by_head[..., dim:] if shape.gated else None
        return by_head[..., :dim], key, value, gate

    def _shared_keys(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value [r, 1, K] of a head that other tensor-parallel ranks use as well.

        Each projects its own rows for all heads, so no product is done twice.
        """
        assert self.linear_kv is not None
        rows = gather_from_sequence_parallel_region(self.linear_kv(hidden), group=self.tp_group)
        heads = self.shape.key_value_heads
        own = self.tp_group.rank() * heads // self.tp_group.size()
        by_head = rows.view(rows.shape[0], 2, heads, -1)[:, :, own : own + 1]
        return by_head[:, 0], by_head[:, 1]

    def _whole_rows(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """All rows of some heads; ranks that share a key/value head get a copy each."""
        size = self.cp_group.size()
        copies = size // math.gcd(size, self.groups)
        groups, rows, dim = self.groups * copies, query.shape[0], self.shape.head_dim
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        per_group = self.heads // groups
        together = torch.cat([query.reshape(rows, groups, -1), key, value], -1)
        queries, key, value = torch.split(
            rows_to_heads(together, self.cp_group), [per_group * dim, dim, dim], -1
        )
        return queries.reshape(queries.shape[0], -1, dim), key, value


def turn_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Turn number i with number i + T / 2 of [r, H, K] by [r, T / 2]; the rest stays."""
    cos, sin = (f[:, None].to(x.dtype) for f in (angles.cos(), angles.sin()))
    half = angles.shape[1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
