"""Ling 3 (``bailing_hybrid``): KDA and MLA layers, dense first layer, then sigmoid-routed MoE.

Shapes: R physical rows · D model width.
"""

from typing import Any

from torch import Tensor
from transformers import BailingHybridConfig, BailingHybridForCausalLM
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridDeltaAttention,
    BailingHybridTopkRouter,
)

from harts.models.families import ModelFamily
from harts.models.group_router import GroupRouter
from harts.models.linear_attention import TreeLayer, kimi_delta_attention, normalised_output
from harts.models.random_weights import drawn
from harts.ops.tree_index import TreeIndex


class TreeBailingHybridDeltaAttention(TreeLayer, BailingHybridDeltaAttention):  # type: ignore[misc]
    """KDA of Ling 3."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        gate = self.forget_gate
        lowest = gate.lower_bound if gate.safe_gate else None
        output = kimi_delta_attention(self, hidden, tree, lowest)
        projected: Tensor = self.o_proj(normalised_output(self.o_norm, output, self.g_proj(hidden)))
        return projected


class TreeBailingHybridTopkRouter(GroupRouter, BailingHybridTopkRouter):  # type: ignore[misc]
    """The router, which can choose by the compiled form."""


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
    return drawn(BailingHybridForCausalLM(config))


FAMILY = ModelFamily(
    model_type="bailing_hybrid",
    tree_layers={BailingHybridDeltaAttention: TreeBailingHybridDeltaAttention},
    router_class=BailingHybridTopkRouter,
    tree_routers={BailingHybridTopkRouter: TreeBailingHybridTopkRouter},
    router_score="sigmoid",
    expert_bias="e_score_correction_bias",
    chunk_size=64,
    small_model=small_model,
)
