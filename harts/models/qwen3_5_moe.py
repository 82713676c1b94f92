"""Qwen3.5 MoE (``qwen3_5_moe_text``): layers of Qwen3.5, softmax-routed MoE."""

from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeTopKRouter,
)

from harts.models.families import ModelFamily
from harts.models.qwen3_5 import TreeQwen35Layer
from harts.models.random_weights import GATED_DELTA_NET, SOFTMAX_MOE, drawn


class TreeQwen35MoeGatedDeltaNet(TreeQwen35Layer, Qwen3_5MoeGatedDeltaNet):  # type: ignore[misc]
    """The MoE model's."""


def small_model(vocabulary: int) -> Qwen3_5MoeForCausalLM:
    """Every layer MoE; for checks and tests."""
    shape = {k: v for k, v in GATED_DELTA_NET.items() if k != "intermediate_size"}
    return drawn(
        Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(vocab_size=vocabulary, **shape, **SOFTMAX_MOE))
    )


FAMILY = ModelFamily(
    model_type="qwen3_5_moe_text",
    tree_layers={Qwen3_5MoeGatedDeltaNet: TreeQwen35MoeGatedDeltaNet},
    router_class=Qwen3_5MoeTopKRouter,
    router_score="softmax",
    chunk_size=64,
    small_model=small_model,
)
