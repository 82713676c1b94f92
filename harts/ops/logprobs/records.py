"""What the parts of mapped log-probs hand each other.

Shapes: T rows that some position reads · U distinct (row, target) entries · D model width ·
A vocabulary, or a shard of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Projection(NamedTuple):
    """An output projection, or the shard of one that holds some of the vocabulary."""

    weight: Tensor
    """[A, D]"""
    bias: Tensor | None
    """[A] or None"""
    scale: float
    """Inverse temperature."""
    first: int = 0
    """Token id of the shard's first row."""

    def part(self, start: int, stop: int) -> Projection:
        """Rows start to stop of this shard."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Projection(self.weight[start:stop], bias, self.scale, self.first + start)


class RowSums(NamedTuple):
    """[T] what a softmax needs of each row of logits z."""

    maximum: Tensor
    sum_exp: Tensor
    """Sum of exp(z - maximum)."""
    weighted: Tensor | None
    """Sum of z exp(z - maximum), for the entropy; None if not asked for."""


class RowGradient(NamedTuple):
    """[T] what the gradient of a row of logits needs besides the logits."""

    log_partition: Tensor
    by_row: Tensor
    """Sum of the gradients of the row's log-probs."""
    entropy: Tensor | None
    """Entropy of the row and sum of the gradients of its entropies; None without entropy."""
    by_entropy: Tensor | None

    def block(self, start: int, stop: int) -> RowGradient:
        """Rows start to stop."""
        part = slice(start, stop)
        return RowGradient(
            self.log_partition[part],
            self.by_row[part],
            None if self.entropy is None else self.entropy[part],
            None if self.by_entropy is None else self.by_entropy[part],
        )


class Entries(NamedTuple):
    """[U] distinct (row, target) entries of the logits' gradient; they replace what is there."""

    rows: Tensor
    """Number of the row among the T."""
    tokens: Tensor
    """Token id in the whole vocabulary."""
    values: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
