"""Query, key and value heads of linear attention from one row of projections."""

from __future__ import annotations

from torch import Tensor

from harts.errors import InputError
from harts.ops.compilation import why_no_kernel
from harts.ops.heads.fused import MOST_HEAD_NUMBERS, normalised_heads_fused
from harts.ops.heads.reference import HeadSizes, l2_normalise, split_heads

__all__ = ["l2_normalise", "normalised_heads"]


def normalised_heads(
    mixed: Tensor, *, heads: int, key_dim: int, groups: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into heads; queries and keys become x / sqrt(sum x^2 + 1e-6) over their dim.

    On a GPU, heads of up to 256 numbers in bfloat16, float16 and float32 run as one compiled pass
    each way, every run alike bit for bit; everything else runs the PyTorch form.

    Args:
        mixed: [R, 2 H K + G V] rows: H queries, H keys, G values.
        heads: H.
        key_dim: K.
        groups: G.
        value_dim: V.

    Returns:
        Query [R, H, K], key [R, H, K] and value [R, G, V], contiguous, in the dtype of `mixed`.
        Norms are computed in float32 (float64 for float64) and rounded once.

    Raises:
        InputError: shapes do not fit.
    """
    sizes = HeadSizes(heads=heads, key_dim=key_dim, groups=groups, value_dim=value_dim)
    if mixed.dim() != 2 or mixed.shape[1] != sizes.columns:
        raise InputError(
            f"normalised_heads: mixed must be [R, 2 H K + G V] = [R, {sizes.columns}] for H = "
            f"{heads}, K = {key_dim}, G = {groups}, V = {value_dim}; got {tuple(mixed.shape)}. "
            "Join queries, keys and values over the last dim, heads flattened."
        )
    wide = max(key_dim, value_dim) > MOST_HEAD_NUMBERS
    form = split_heads if wide or why_no_kernel(mixed) else normalised_heads_fused
    return form(mixed, sizes)
