"""Qwen3 MoE (``qwen3_moe``): GQA layers with normalised heads, softmax-routed MoE."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from harts.models.families import ModelFamily
from harts.models.random_weights import drawn


def small_model(vocabulary: int) -> Qwen3MoeForCausalLM:
    """Two layers of grouped-query attention, the first dense, then MoE; for checks and tests."""
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return drawn(Qwen3MoeForCausalLM(config))


FAMILY = ModelFamily(
    model_type="qwen3_moe",
    router_class=Qwen3MoeTopKRouter,
    router_score="softmax",
    small_model=small_model,
)
