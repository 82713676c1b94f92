"""Qwen3-Next (``qwen3_next``): Gated DeltaNet and gated GQA layers, softmax-routed MoE.

Shapes: R physical rows · D model width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    Qwen3NextTopKRouter,
)

from harts.models.families import ModelFamily
from harts.models.linear_attention import TreeLayer, gated_delta_net, normalised_output
from harts.models.random_weights import draw_wide, slow_half_of_the_heads
from harts.ops.tree_index import TreeIndex


class TreeQwen3NextGatedDeltaNet(TreeLayer, Qwen3NextGatedDeltaNet):  # type: ignore[misc]
    """Gated DeltaNet of Qwen3-Next; its projections interleave the heads."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        parts = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        )
        query, key, value, gate, beta, decay = (x[0] for x in parts)
        mixed = torch.cat([x.flatten(1) for x in (query, key, value)], dim=-1)
        output = gated_delta_net(self, mixed, decay, beta.sigmoid(), tree)
        projected: Tensor = self.out_proj(normalised_output(self.norm, output, gate))
        return projected


def small_model(vocabulary: int) -> Qwen3NextForCausalLM:
    """Two Gated DeltaNet layers around one of attention, all MoE; for checks and tests."""
    config = Qwen3NextConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = Qwen3NextForCausalLM(config)
    draw_wide(model)
    for module in model.modules():
        if isinstance(module, Qwen3NextGatedDeltaNet):
            slow_half_of_the_heads(module, module.num_v_heads)
    return model


FAMILY = ModelFamily(
    model_type="qwen3_next",
    tree_layers={Qwen3NextGatedDeltaNet: TreeQwen3NextGatedDeltaNet},
    router_class=Qwen3NextTopKRouter,
    router_score="softmax",
    chunk_size=64,
    small_model=small_model,
)
