"""PyTorch form of the weighted gated activation.

Shapes: M rows · I width of the gate and of the up projection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from harts.ops.compilation import only_rows_vary


def weighted_swiglu_plain(projected: Tensor, weights: Tensor) -> Tensor:
    """`weighted_swiglu` after its checks: [M, 2 I] and [M, 1] to [M, I]."""
    only_rows_vary(projected)
    wide = projected.dtype if projected.dtype == torch.float64 else torch.float32
    gate, up = projected.to(wide).chunk(2, dim=-1)
    return (F.silu(gate) * up * weights).to(projected.dtype)
