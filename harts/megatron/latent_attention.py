"""MLA for Megatron: heads over tensor and context parallelism, rows of a tree in the core.

Shapes: R physical rows, r of them on this rank · H heads of this tensor-parallel rank · N key dim
without positions · T key dim with rotary positions · V value dim · L latent width · D model width.

Megatron's own MLA knows no output gate, turns positions by the place in the pack and needs
Transformer Engine to cut rows; this one is as short as reading around all three would be.
"""

from __future__ import annotations

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
class LatentShape:
    """Sizes of an MLA layer over all ranks."""

    heads: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    latent_dim: int
    rotary_base: float
    norm_epsilon: float

    @property
    def query_columns(self) -> int:
        """Numbers a head in the query projection: the query and its output gate."""
        return self.key_dim + self.rotary_dim + 1


@dataclass(slots=True, kw_only=True)
class LatentSubmodules:
    """Parts that a backend may replace."""

    linear_query: Any
    linear_up: Any
    latent_norm: Any
    linear_proj: Any


class TreeLatentAttention(MegatronModule):  # type: ignore[misc]
    """MLA of Ling 3, with its gate on each head's output."""

    def __init__(
        self,
        config: Any,
        submodules: LatentSubmodules,
        layer_number: int,
        *,
        shape: LatentShape,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.shape = shape
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        self.heads = heads_of_rank(shape.heads, pg_collection, kind="attention")
        group, queries = self.tp_group, shape.heads * shape.query_columns
        self.linear_query = column_projection(
            submodules.linear_query, config, group, config.hidden_size, queries, "q_proj"
        )
        self.linear_down = ReplicatedLinear(
            config, config.hidden_size, shape.latent_dim + shape.rotary_dim
        )
        self.latent_norm = build_module(
            submodules.latent_norm,
            config=config,
            hidden_size=shape.latent_dim,
            eps=shape.norm_epsilon,
        )
        columns = shape.heads * (shape.key_dim + shape.value_dim)
        self.linear_up = column_projection(
            submodules.linear_up, config, group, shape.latent_dim, columns, "kv_up_proj"
        )
        self.linear_proj = row_projection(
            submodules.linear_proj, config, group, shape.heads * shape.value_dim, "proj"
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[r, 1, D] rows of this rank to the same, and no bias."""
        tree = tree_of(packed_seq_params)
        shape = self.shape
        angles = rotary_angles(
            tree.positions[packed_seq_params.context_rows], shape.rotary_dim, shape.rotary_base
        )
        query, gate = self._query(hidden_states, angles)
        key, value = self._key_value(hidden_states, angles)
        dim = shape.key_dim + shape.rotary_dim
        if self.cp_group.size() > 1:
            together = rows_to_heads(torch.cat([query, key, value], -1), self.cp_group)
            query, key, value = torch.split(together, [dim, dim, shape.value_dim], -1)
        core = tree_attention(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            index=tree,
            scale=dim**-0.5,
        )
        attended = heads_to_rows(core, self.cp_group)
        wide = gate if gate.dtype == torch.float64 else gate.float()
        attended = attended * torch.sigmoid(wide).to(attended.dtype)
        output, _bias = self.linear_proj(attended.reshape(attended.shape[0], 1, -1))
        return output, None

    def _query(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [r, H, N + T] and output gates [r, H, 1]."""
        projected, _bias = self.linear_query(hidden)
        by_head = projected.view(projected.shape[0], self.heads, self.shape.query_columns)
        shape = self.shape
        query, rotary, gate = by_head.split([shape.key_dim, shape.rotary_dim, 1], -1)
        return torch.cat([query, _turn(rotary, angles)], -1), gate

    def _key_value(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [r, H, N + T] and values [r, H, V]; the heads share their rotary keys."""
        shape = self.shape
        latent, rotary = self.linear_down(hidden).split([shape.latent_dim, shape.rotary_dim], -1)
        up, _bias = self.linear_up(self.latent_norm(latent))
        if self.config.sequence_parallel:
            rotary = gather_from_sequence_parallel_region(rotary.contiguous(), group=self.tp_group)
        by_head = up.view(up.shape[0], self.heads, shape.key_dim + shape.value_dim)
        key, value = by_head.split([shape.key_dim, shape.value_dim], -1)
        turned = _turn(rotary, angles).expand(-1, self.heads, -1)
        return torch.cat([key, turned], -1), value


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the interleaved pairs of [r, H, T] by [r, T / 2]; the result is not interleaved."""
    cos, sin = (f[:, None].to(x.dtype) for f in (angles.cos(), angles.sin()))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)
