"""Qwen3 (``qwen3``): GQA layers with normalised heads, dense FFNs."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from harts.models.families import ModelFamily
from harts.models.random_weights import drawn


def small_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Two layers of grouped-query attention; for checks and tests."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
    )
    return drawn(Qwen3ForCausalLM(config))


FAMILY = ModelFamily(model_type="qwen3", small_model=small_model)
