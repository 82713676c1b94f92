"""Short causal convolution over a compact tree of rows."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from harts.errors import InputError
from harts.ops.convolution.fused import convolve_tree_fused, why_not_fused
from harts.ops.convolution.reference import convolve_tree
from harts.ops.tree_index import TreeIndex

__all__ = ["tree_causal_convolution"]


def tree_causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    index: TreeIndex,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """Depthwise causal convolution whose context is the true ancestors of each row (section 4.2).

    Each row is convolved once and sees the W-1 tokens before it in its trajectories, through as
    many segments as that takes; before the first token there are zeros. Neighbours in the pack
    and replay rows are never context.

    On a GPU, widths 2 to 4 in bfloat16, float16 and float32 run as one compiled pass each way,
    every run alike bit for bit; everything else runs the PyTorch form.

    Args:
        x: [R, C_in] rows; C_in channels. Padding rows may hold anything.
        weight: [C_in, W]; the last tap multiplies the row itself. W >= 1.
        bias: [C_in] or None.
        index: the tree of rows.
        activation: "silu", or None for the plain convolution.

    Returns:
        [R, C_in] in the dtype of `x`, computed in float32 (float64 for float64); padding rows are
        zero and get zero gradient.

    Raises:
        InputError: shapes do not fit, or the activation is unknown.
    """
    if x.dim() != 2 or x.shape[0] != index.rows:
        raise InputError(
            f"tree_causal_convolution: x must be [R, C_in] with R = {index.rows} rows of the "
            f"index; got {tuple(x.shape)}. Flatten heads into channels first."
        )
    channels = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise InputError(
            f"tree_causal_convolution: weight must be [C_in, W] with C_in = {channels} and W >= 1; "
            f"got {tuple(weight.shape)}. A torch Conv1d weight [C_in, 1, W] needs squeeze(1)."
        )
    if bias is not None and bias.shape != (channels,):
        raise InputError(
            f"tree_causal_convolution: bias must be [{channels}] or None; got {tuple(bias.shape)}."
        )
    if activation not in (None, "silu"):
        raise InputError(
            f"tree_causal_convolution: activation must be 'silu' or None; got {activation!r}."
        )
    form = convolve_tree if why_not_fused(x, weight) else convolve_tree_fused
    return form(x, weight, bias, index, activation)
