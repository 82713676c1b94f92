"""AdamW and the learning rate of each step."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from harts.errors import InputError

ScheduleKind = Literal["constant", "linear", "cosine"]

HIGHEST_LEARNING_RATE = 1e3
"""AdamW moves a weight by about the learning rate, so anything near this is a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Options of AdamW (Loshchilov and Hutter, 2019) and of gradient clipping."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices; norms, biases and gates of one dimension are left alone."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; null never does."""

    def __post_init__(self) -> None:
        _require(
            0 < self.learning_rate <= HIGHEST_LEARNING_RATE,
            "learning_rate",
            f"above 0 and at most {HIGHEST_LEARNING_RATE:g}",
            self.learning_rate,
        )
        inside = all(0 <= beta < 1 for beta in self.betas)
        _require(inside, "betas", "two numbers of at least 0 and below 1", list(self.betas))
        _require(0 < self.eps < math.inf, "eps", "above 0", self.eps)
        _require(0 <= self.weight_decay < math.inf, "weight_decay", "at least 0", self.weight_decay)
        norm = self.max_grad_norm
        _require(norm is None or norm > 0, "max_grad_norm", "above 0, or null", norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves: a linear warm-up, then constant or down to zero."""

    warmup_steps: int = 0
    kind: ScheduleKind = "constant"

    def __post_init__(self) -> None:
        _require(self.warmup_steps >= 0, "warmup_steps", "at least 0", self.warmup_steps)
        _require(
            self.kind in get_args(ScheduleKind),
            "kind",
            f"one of {', '.join(get_args(ScheduleKind))}",
            self.kind,
        )

    def factor(self, step: int, steps: int) -> float:
        """The learning rate of step ``step`` (from 0) of ``steps``, over the configured one.

        It depends on nothing else, so a resumed run needs no saved scheduler.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(steps - self.warmup_steps, 1)
        if self.kind == "linear":
            return 1 - done
        if self.kind == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        return 1.0


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters, weight decay on those of two dimensions or more."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def clip_gradients(model: nn.Module, max_norm: float | None) -> float:
    """Scale all gradients down to ``max_norm``; return their norm before."""
    bound = math.inf if max_norm is None else max_norm
    return float(nn.utils.clip_grad_norm_(model.parameters(), bound))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _require(valid: bool, name: str, expected: str, got: object) -> None:
    if not valid:
        raise InputError(f"{name} must be {expected}, got {got}")
