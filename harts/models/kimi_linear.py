"""Kimi Linear (``kimi_linear``): KDA and MLA layers without positions, sigmoid-routed MoE.

Shapes: R physical rows · D model width.
"""

from typing import Any

from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearDeltaAttention,
    KimiLinearTopkRouter,
)

from harts.models.families import ModelFamily
from harts.models.group_router import GroupRouter
from harts.models.linear_attention import TreeLayer, kimi_delta_attention, normalised_output
from harts.models.random_weights import drawn
from harts.ops.tree_index import TreeIndex


class TreeKimiLinearDeltaAttention(TreeLayer, KimiLinearDeltaAttention):  # type: ignore[misc]
    """KDA of Kimi Linear; its output gate has low rank."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        output = kimi_delta_attention(self, hidden, tree)
        gate = self.g_b_proj(self.g_a_proj(hidden))
        projected: Tensor = self.o_proj(normalised_output(self.o_norm, output, gate))
        return projected


class TreeKimiLinearTopkRouter(GroupRouter, KimiLinearTopkRouter):  # type: ignore[misc]
    """The router, which can choose by the compiled form."""


def small_model(vocabulary: int) -> KimiLinearForCausalLM:
    """KDA, MLA, KDA; the first layer dense, then MoE in groups; for checks and tests."""
    config = KimiLinearConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_num_heads=2,
        linear_head_dim=16,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return drawn(KimiLinearForCausalLM(config))


FAMILY = ModelFamily(
    model_type="kimi_linear",
    tree_layers={KimiLinearDeltaAttention: TreeKimiLinearDeltaAttention},
    router_class=KimiLinearTopkRouter,
    tree_routers={KimiLinearTopkRouter: TreeKimiLinearTopkRouter},
    router_score="sigmoid",
    expert_bias="e_score_correction_bias",
    chunk_size=64,
    small_model=small_model,
)
