"""Gated DeltaNet for Megatron: heads over tensor and context parallelism, a tree in the core.

Shapes: R physical rows, r of them on this rank · H key heads of this tensor-parallel rank, each of
which serves G value heads · K key dim · V value dim · W convolution width · D model width.

One projection makes query, key, values, output gates, step sizes and decays, key head after key
head, so that tensor parallelism cuts it contiguously and context parallelism trades rows for whole
key heads with the value heads they serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from harts.megatron.layers import (
    column_projection,
    device_of,
    drawn_apart,
    heads_of_rank,
    heads_to_rows,
    mark_split,
    own_heads,
    row_projection,
    rows_to_heads,
)
from harts.megatron.packet import tree_of
from harts.ops.convolution import tree_causal_convolution
from harts.ops.delta_rule import tree_delta_rule
from harts.ops.heads import l2_normalise
from harts.ops.tree_index import TreeIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaShape:
    """Sizes of a Gated DeltaNet layer over all ranks."""

    key_heads: int
    values_per_key: int
    """G, value heads that one key head serves."""
    key_dim: int
    value_dim: int
    convolution_width: int
    norm_epsilon: float

    @property
    def convolved(self) -> int:
        """Numbers a key head that the convolution mixes: query, key, values."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def columns(self) -> int:
        """Numbers a key head in the projection: the convolved, gates, step sizes and decays."""
        return self.convolved + self.values_per_key * (self.value_dim + 2)


@dataclass(slots=True, kw_only=True)
class GatedDeltaSubmodules:
    """Parts that a backend may replace."""

    in_proj: Any
    out_norm: Any
    out_proj: Any


class TreeGatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """Gated DeltaNet of Qwen3-Next on the rows of a tree."""

    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaSubmodules,
        layer_number: int,
        *,
        shape: GatedDeltaShape,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.shape = shape
        self.cp_group = pg_collection.cp
        self.heads = heads_of_rank(shape.key_heads, pg_collection, kind="linear-attention key")
        group, columns = pg_collection.tp, shape.key_heads * shape.columns
        self.in_proj = column_projection(
            submodules.in_proj, config, group, config.hidden_size, columns, "fc1"
        )
        self.conv_weight = self._split(shape.convolved, shape.convolution_width)
        self.decay_log_rate = self._split(shape.values_per_key)
        self.decay_bias = self._split(shape.values_per_key)
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=shape.value_dim, eps=shape.norm_epsilon
        )
        values = shape.key_heads * shape.values_per_key * shape.value_dim
        self.out_proj = row_projection(submodules.out_proj, config, group, values, "fc2")
        if config.perform_initialization:
            self._initialise()

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[r, 1, D] rows of this rank to the same, and no bias."""
        tree = tree_of(packed_seq_params)
        shape = self.shape
        projected, _bias = self.in_proj(hidden_states)
        by_head = projected.view(projected.shape[0], self.heads, shape.columns)
        per_key = shape.values_per_key
        qkv, gate, scalars = by_head.split(
            [shape.convolved, per_key * shape.value_dim, 2 * per_key], -1
        )
        if self.cp_group.size() > 1:
            together = rows_to_heads(torch.cat([qkv, scalars], -1), self.cp_group)
            qkv, scalars = torch.split(together, [shape.convolved, 2 * per_key], -1)
        core = heads_to_rows(self._core(qkv, scalars, tree), self.cp_group)
        values = (core.shape[0], self.heads * per_key, shape.value_dim)
        normed = self.out_norm(core.reshape(values), gate.reshape(values))
        output, _bias = self.out_proj(normed.reshape(values[0], 1, -1))
        return output, None

    def _core(self, qkv: Tensor, scalars: Tensor, tree: TreeIndex) -> Tensor:
        """All rows of h key heads: [R, h, 2 K + G V] and [R, h, 2 G] to [R, h, G V]."""
        rows, heads, _ = qkv.shape
        shape = self.shape
        per_key, dim = shape.values_per_key, shape.key_dim
        step, decay = scalars.chunk(2, -1)
        convolved = tree_causal_convolution(
            qkv.reshape(rows, -1),
            own_heads(self.conv_weight, self.cp_group).flatten(0, 1),
            index=tree,
            activation="silu",
        ).view(rows, heads, -1)
        query, key, value = torch.split(convolved, [dim, dim, per_key * shape.value_dim], -1)
        output: Tensor = tree_delta_rule(
            l2_normalise(query),
            l2_normalise(key),
            value.reshape(rows, heads * per_key, shape.value_dim),
            self._log_decay(decay).flatten(1),
            torch.sigmoid(step).flatten(1),
            index=tree,
        ).to(qkv.dtype)
        return output.view(rows, heads, -1)

    def _log_decay(self, projected: Tensor) -> Tensor:
        """[R, h, G], in float32 or wider as the library's layer has it."""
        wide = projected if projected.dtype == torch.float64 else projected.float()
        rate = own_heads(self.decay_log_rate, self.cp_group).to(wide.dtype).exp()
        return -rate * nn.functional.softplus(wide + own_heads(self.decay_bias, self.cp_group))

    def _split(self, *dims: int) -> nn.Parameter:
        """A parameter of this rank's key heads."""
        parameter = nn.Parameter(
            torch.empty(
                self.heads, *dims, dtype=self.config.params_dtype, device=device_of(self.config)
            )
        )
        mark_split(parameter)
        return parameter

    @torch.no_grad()
    def _initialise(self) -> None:
        """As the library does: rates in (0.01, 16), biases of 1."""
        with drawn_apart(self.config):
            self.conv_weight.normal_(std=self.shape.convolution_width**-0.5)
            self.decay_log_rate.uniform_(0.01, 16).log_()
            self.decay_bias.fill_(1.0)
