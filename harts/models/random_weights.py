"""Weights of the small models for checks: wide, so that every branch matters; slow to forget."""

from typing import Any

import torch
from torch import nn


@torch.no_grad()
def draw_wide(model: nn.Module) -> None:
    """Draw every matrix so that its outputs are about as large as its inputs."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.5 if "conv1d" in name else parameter.shape[-1] ** -0.5)
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias.normal_(std=0.05)


@torch.no_grad()
def slow_half_of_the_heads(gate: Any, heads: int) -> None:
    """Bias every other head to a log decay within [-0.01, 0]: a wrong state shows ever after.

    ``gate`` has A_log, one number a head, and dt_bias, as many numbers for each head.
    """
    slow = torch.arange(heads) % 2 == 0
    gate.A_log.view(heads)[slow] = 0.0
    gate.dt_bias.view(heads, -1)[slow] = -11.0
