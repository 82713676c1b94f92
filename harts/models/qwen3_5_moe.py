"""Qwen3.5 MoE (``qwen3_5_moe_text``): Gated DeltaNet and gated GQA layers, softmax-routed MoE.

Shapes: R physical rows · D model width.
"""

from typing import Any

from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeTopKRouter,
)

from harts.models.families import ModelFamily
from harts.models.linear_attention import TreeLayer, gated_delta_net, normalised_output
from harts.models.random_weights import draw_wide, slow_half_of_the_heads
from harts.ops.tree_index import TreeIndex


class TreeQwen35MoeGatedDeltaNet(TreeLayer, Qwen3_5MoeGatedDeltaNet):  # type: ignore[misc]
    """Gated DeltaNet of Qwen3.5 MoE."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        rows = hidden[0]
        beta = self.in_proj_b(rows).sigmoid()
        output = gated_delta_net(self, self.in_proj_qkv(rows), self.in_proj_a(rows), beta, tree)
        gate = self.in_proj_z(rows)
        projected: Tensor = self.out_proj(normalised_output(self.norm, output, gate))
        return projected


def small_model(vocabulary: int) -> Qwen3_5MoeForCausalLM:
    """Two Gated DeltaNet layers around one of attention, all MoE; for checks and tests."""
    config = Qwen3_5MoeTextConfig(
        vocab_size=vocabulary,
        hidden_size=32,
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
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = Qwen3_5MoeForCausalLM(config)
    draw_wide(model)
    for module in model.modules():
        if isinstance(module, Qwen3_5MoeGatedDeltaNet):
            slow_half_of_the_heads(module, module.num_v_heads)
    return model


FAMILY = ModelFamily(
    model_type="qwen3_5_moe_text",
    tree_layers={Qwen3_5MoeGatedDeltaNet: TreeQwen35MoeGatedDeltaNet},
    router_class=Qwen3_5MoeTopKRouter,
    router_score="softmax",
    chunk_size=64,
    small_model=small_model,
)
