"""Ling 3 (``bailing_hybrid``): KDA and MLA layers, dense first layer, then sigmoid-routed MoE.

Shapes: R physical rows · H heads · K key and value dim · D model width · W convolution width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import BailingHybridConfig, BailingHybridForCausalLM
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridDeltaAttention,
    BailingHybridForgetGate,
    BailingHybridTopkRouter,
)

from harts.models.families import ModelFamily
from harts.ops.convolution import tree_causal_convolution
from harts.ops.delta_rule import tree_delta_rule
from harts.ops.tree_index import TreeIndex

_L2_NORM_EPSILON = 1e-6


class TreeBailingHybridDeltaAttention(BailingHybridDeltaAttention):  # type: ignore[misc]
    """The library's KDA layer with the same weights; with ``tree`` it runs compact rows."""

    def forward(
        self, hidden_states: Tensor, *args: Any, tree: TreeIndex | None = None, **kwargs: Any
    ) -> Tensor:
        """Run one layer on [1, R, D]; without ``tree`` this is the library's own forward."""
        if tree is None:
            alone: Tensor = super().forward(hidden_states, *args, **kwargs)
            return alone
        rows = hidden_states[0]
        heads = (rows.shape[0], self.num_heads, self.head_dim)
        mixed = torch.cat([self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)], dim=-1)
        mixed = tree_causal_convolution(
            mixed,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            index=tree,
            activation=self.activation,
        )
        query, key, value = (x.view(heads) for x in mixed.chunk(3, dim=-1))
        output = tree_delta_rule(
            l2_normalise(query),
            l2_normalise(key),
            value,
            self.forget_gate(hidden_states)[0],
            torch.sigmoid(self.b_proj(rows)),
            index=tree,
            lowest_log_decay=self.forget_gate.lower_bound if self.forget_gate.safe_gate else None,
        )
        gate = self.g_proj(rows).view(heads)
        output = self.o_norm(output.to(rows.dtype), gate).reshape(rows.shape[0], -1)
        projected: Tensor = self.o_proj(output)
        return projected.unsqueeze(0)


def l2_normalise(x: Tensor) -> Tensor:
    """Scale to x / sqrt(sum x^2 + 1e-6) over the last dim; float32 or wider inside."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide / torch.sqrt((wide * wide).sum(dim=-1, keepdim=True) + _L2_NORM_EPSILON)
    return scaled.to(x.dtype)


def small_model(vocabulary: int) -> BailingHybridForCausalLM:
    """Four layers (KDA, KDA, KDA, MLA; dense first, then MoE) of width 32, for checks and tests.

    Weights are drawn wide enough that every branch matters. Half of the KDA heads decay by at
    most 1% a token: a boundary state that is wrong shows in all later tokens.
    """
    config = BailingHybridConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        layer_group_size=4,
        first_k_dense_replace=1,
        num_experts=8,
        num_experts_per_token=2,
        num_expert_group=4,
        topk_group=2,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        pad_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = BailingHybridForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "conv1d" in name else parameter.shape[-1] ** -0.5)
        for module in model.modules():
            if isinstance(module, BailingHybridForgetGate):
                _slow_half_of_the_heads(module)
            if isinstance(module, BailingHybridTopkRouter):
                module.e_score_correction_bias.normal_(std=0.05)
    return model


def _slow_half_of_the_heads(gate: BailingHybridForgetGate) -> None:
    """Bias every other head so that its log decay stays within [-0.01, 0]."""
    slow = torch.arange(gate.num_heads) % 2 == 0
    gate.A_log[slow] = 0.0
    gate.dt_bias.view(gate.num_heads, gate.head_dim)[slow] = -11.0


FAMILY = ModelFamily(
    model_type="bailing_hybrid",
    tree_layers={BailingHybridDeltaAttention: TreeBailingHybridDeltaAttention},
    router_class=BailingHybridTopkRouter,
    router_score="sigmoid",
    expert_bias="e_score_correction_bias",
    chunk_size=64,
    small_model=small_model,
)
