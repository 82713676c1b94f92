"""Llama (``llama``): GQA layers, dense FFNs."""

from transformers import LlamaConfig, LlamaForCausalLM

from harts.models.families import ModelFamily
from harts.models.random_weights import drawn


def small_model(vocabulary: int) -> LlamaForCausalLM:
    """Two layers of grouped-query attention, the head tied to the embedding; for checks."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    return drawn(LlamaForCausalLM(config))


FAMILY = ModelFamily(model_type="llama", small_model=small_model)
