"""PyTorch form of the split into normalised heads.

Shapes: R physical rows · H query/key heads · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

L2_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """How a row of projections falls into heads: H queries of K, H keys of K, G values of V."""

    heads: int
    key_dim: int
    groups: int
    value_dim: int

    @property
    def columns(self) -> int:
        """2 H K + G V."""
        return 2 * self.heads * self.key_dim + self.groups * self.value_dim


def l2_normalise(x: Tensor) -> Tensor:
    """Scale to x / sqrt(sum x^2 + 1e-6) over the last dim; float32 or wider inside."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide / torch.sqrt((wide * wide).sum(dim=-1, keepdim=True) + L2_NORM_EPSILON)
    return scaled.to(x.dtype)


def split_heads(mixed: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
    """`normalised_heads` after its checks."""
    keys = (mixed.shape[0], sizes.heads, sizes.key_dim)
    values = (mixed.shape[0], sizes.groups, sizes.value_dim)
    width = sizes.heads * sizes.key_dim
    query, key, value = torch.split(mixed, [width, width, sizes.columns - 2 * width], dim=-1)
    return (
        l2_normalise(query.reshape(keys)),
        l2_normalise(key.reshape(keys)),
        value.reshape(values).contiguous(),
    )
