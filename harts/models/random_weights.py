"""Weights of the small models for checks: wide, so that every branch matters; slow to forget."""

from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)

GATED_DELTA_NET = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "attn_implementation": "eager",
}
"""Two Gated DeltaNet layers around one of attention, in the words of Qwen's configurations."""
SOFTMAX_MOE = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
"""Eight experts, two a token, in the same words."""


@torch.no_grad()
def drawn(model: Model) -> Model:
    """Draw every matrix so that its outputs are about as large as its inputs.

    Every other linear-attention head gets a log decay within [-0.01, 0]: there a wrong state shows
    ever after.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.5 if "conv1d" in name else parameter.shape[-1] ** -0.5)
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias.normal_(std=0.05)
        if hasattr(module, "A_log"):
            _slow_half_of_the_heads(module)
    return model


def _slow_half_of_the_heads(gate: Any) -> None:
    """``gate`` has A_log, one number a head, and dt_bias, as many numbers for each head."""
    heads = gate.A_log.numel()
    slow = torch.arange(heads) % 2 == 0
    gate.A_log.view(heads)[slow] = 0.0
    gate.dt_bias.view(heads, -1)[slow] = -11.0
