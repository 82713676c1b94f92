"""DeepSeek-V3 (``deepseek_v3``): MLA layers, dense first, then sigmoid-routed MoE with a bias."""

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from harts.models.families import ModelFamily
from harts.models.group_router import GroupRouter
from harts.models.random_weights import drawn


class TreeDeepseekV3TopkRouter(GroupRouter, DeepseekV3TopkRouter):  # type: ignore[misc]
    """The router, which can choose by the compiled form."""


def small_model(vocabulary: int) -> DeepseekV3ForCausalLM:
    """Two MLA layers, the first dense, then MoE in groups; for checks and tests."""
    config = DeepseekV3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return drawn(DeepseekV3ForCausalLM(config))


FAMILY = ModelFamily(
    model_type="deepseek_v3",
    router_class=DeepseekV3TopkRouter,
    tree_routers={DeepseekV3TopkRouter: TreeDeepseekV3TopkRouter},
    router_score="sigmoid",
    expert_bias="e_score_correction_bias",
    small_model=small_model,
)
