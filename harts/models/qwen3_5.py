"""Qwen3.5 (``qwen3_5_text``): Gated DeltaNet and gated GQA layers, dense FFNs.

Shapes: R physical rows · D model width.
"""

from typing import Any

from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
)

from harts.models.families import ModelFamily
from harts.models.linear_attention import TreeLayer, gated_delta_net, normalised_output
from harts.models.random_weights import draw_wide, slow_half_of_the_heads
from harts.ops.tree_index import TreeIndex


class TreeQwen35GatedDeltaNet(TreeLayer, Qwen3_5GatedDeltaNet):  # type: ignore[misc]
    """Gated DeltaNet of Qwen3.5."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        rows = hidden[0]
        beta = self.in_proj_b(rows).sigmoid()
        output = gated_delta_net(self, self.in_proj_qkv(rows), self.in_proj_a(rows), beta, tree)
        gate = self.in_proj_z(rows)
        projected: Tensor = self.out_proj(normalised_output(self.norm, output, gate))
        return projected


def small_model(vocabulary: int) -> Qwen3_5ForCausalLM:
    """Two Gated DeltaNet layers around one of attention, all dense; for checks and tests."""
    config = Qwen3_5TextConfig(
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
        intermediate_size=48,
        attn_implementation="eager",
    )
    model = Qwen3_5ForCausalLM(config)
    draw_wide(model)
    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            slow_half_of_the_heads(module, module.num_v_heads)
    return model


FAMILY = ModelFamily(
    model_type="qwen3_5_text",
    tree_layers={Qwen3_5GatedDeltaNet: TreeQwen35GatedDeltaNet},
    chunk_size=64,
    small_model=small_model,
)
