"""KDA for Megatron: heads over tensor and context parallelism, rows of a tree in the core.

Shapes: R physical rows · H heads of this tensor-parallel rank · K head dim, of keys and values
alike · W convolution width · D model width.

One projection makes query, key, value, decay, output gate and step size, head after head, so that
tensor parallelism cuts it contiguously and context parallelism trades rows for whole heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from harts.megatron.layers import (
    Float32Parameters,
    at_least_float32,
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
class KimiDeltaShape:
    """Sizes of a KDA layer over all ranks."""

    heads: int
    head_dim: int
    convolution_width: int
    norm_epsilon: float
    lowest_log_decay: float | None
    """Log decays lie in (this, 0) through a sigmoid; None for the unbounded softplus gate."""

    @property
    def columns(self) -> int:
        """Numbers a head in the fused projection: gate, query, key, value, decay, step size."""
        return 5 * self.head_dim + 1


@dataclass(slots=True, kw_only=True)
class KimiDeltaSubmodules:
    """Parts that a backend may replace."""

    in_proj: Any
    out_norm: Any
    out_proj: Any


class TreeKimiDeltaAttention(Float32Parameters):
    """KDA of Ling 3 on the rows of a tree; its own parameters stay in float32, as there."""

    def __init__(
        self,
        config: Any,
        submodules: KimiDeltaSubmodules,
        layer_number: int,
        *,
        shape: KimiDeltaShape,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.shape = shape
        self.cp_group = pg_collection.cp
        self.heads = heads_of_rank(shape.heads, pg_collection, kind="linear-attention")
        group = pg_collection.tp
        self.in_proj = column_projection(
            submodules.in_proj,
            config,
            group,
            config.hidden_size,
            shape.heads * shape.columns,
            "fc1",
        )
        self.conv_weight = self._split(3 * shape.head_dim, shape.convolution_width)
        self.decay_log_rate = self._split()
        self.decay_bias = self._split(shape.head_dim)
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=shape.head_dim, eps=shape.norm_epsilon
        )
        self.out_proj = row_projection(
            submodules.out_proj, config, group, shape.heads * shape.head_dim, "fc2"
        )
        self._initialise()

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[r, 1, D] rows of this rank to the same, and no bias."""
        tree = tree_of(packed_seq_params)
        projected, _bias = self.in_proj(hidden_states)
        by_head = projected.view(projected.shape[0], self.heads, self.shape.columns)
        gate, mixed = by_head.split(
            [self.shape.head_dim, by_head.shape[2] - self.shape.head_dim], 2
        )
        core = self._core(rows_to_heads(mixed, self.cp_group), tree)
        normed = self.out_norm(heads_to_rows(core, self.cp_group), gate)
        output, _bias = self.out_proj(normed.reshape(normed.shape[0], 1, -1))
        return output, None

    def _core(self, mixed: Tensor, tree: TreeIndex) -> Tensor:
        """All rows of some heads: [R, h, 4 K + 1] to [R, h, K]."""
        rows, heads, _ = mixed.shape
        dim = self.shape.head_dim
        qkv, decay, step = torch.split(mixed, [3 * dim, dim, 1], 2)
        convolved = tree_causal_convolution(
            qkv.reshape(rows, -1),
            own_heads(self.conv_weight, self.cp_group).flatten(0, 1),
            index=tree,
            activation="silu",
        ).view(rows, heads, 3, dim)
        query, key, value = convolved.unbind(2)
        output: Tensor = tree_delta_rule(
            l2_normalise(query),
            l2_normalise(key),
            value,
            self._log_decay(decay),
            torch.sigmoid(step[..., 0]),
            index=tree,
            lowest_log_decay=self.shape.lowest_log_decay,
        ).to(mixed.dtype)
        return output

    def _log_decay(self, projected: Tensor) -> Tensor:
        """[R, h, K] in the dtype of the projection."""
        wide = projected if projected.dtype == torch.float64 else projected.float()
        rate = own_heads(self.decay_log_rate, self.cp_group).to(wide.dtype).exp()[:, None]
        biased = wide + own_heads(self.decay_bias, self.cp_group)
        lowest = self.shape.lowest_log_decay
        decay = (
            -rate * nn.functional.softplus(biased)
            if lowest is None
            else lowest * torch.sigmoid(rate * biased)
        )
        return decay.to(projected.dtype)

    def _split(self, *dims: int) -> nn.Parameter:
        """A parameter of this rank's heads."""
        parameter = nn.Parameter(
            torch.empty(
                self.heads,
                *dims,
                dtype=at_least_float32(self.config.params_dtype),
                device=device_of(self.config),
            )
        )
        mark_split(parameter)
        return parameter

    @torch.no_grad()
    def _initialise(self) -> None:
        """Slow gates, as the library draws them: rates in [1, 16], steps in [0.001, 0.1]."""
        if not self.config.perform_initialization:
            return
        with drawn_apart(self.config):
            self.conv_weight.normal_(std=self.shape.convolution_width**-0.5)
            self.decay_log_rate.uniform_(1, 16).log_()
            steps = torch.empty_like(self.decay_bias).uniform_(-6.9, -2.3).exp()
        self.decay_bias.copy_(steps + torch.log(-torch.expm1(-steps)))
