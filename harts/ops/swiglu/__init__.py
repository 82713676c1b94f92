"""The gated activation between the two products of an expert."""

from __future__ import annotations

from torch import Tensor

from harts.errors import InputError
from harts.ops.compilation import compiled, why_no_kernel
from harts.ops.swiglu.fused import weighted_swiglu_fused
from harts.ops.swiglu.reference import weighted_swiglu_plain

__all__ = ["weighted_swiglu"]


def weighted_swiglu(projected: Tensor, weights: Tensor, backend: str | None = None) -> Tensor:
    """Weight * silu(gate) * up, the weight one number a row.

    On a GPU, bfloat16, float16 and float32 run as one compiled pass each way, every run alike bit
    for bit; everything else runs the PyTorch form.

    Args:
        projected: [M, 2 I] gate and up projections side by side.
        weights: [M, 1].
        backend: of ``torch.compile`` for the PyTorch form; None to run it as it is.

    Returns:
        [M, I] in the dtype of `projected`, computed in float32 (float64 for float64) and rounded
        once.

    Raises:
        InputError: shapes do not fit.
    """
    if projected.dim() != 2 or projected.shape[1] % 2:
        raise InputError(
            "weighted_swiglu: projected must be [M, 2 I], gate and up projections side by side; "
            f"got {tuple(projected.shape)}."
        )
    if weights.shape != (projected.shape[0], 1):
        raise InputError(
            f"weighted_swiglu: weights must be [M, 1] with M = {projected.shape[0]}; got "
            f"{tuple(weights.shape)}. Weights [M] need [:, None]."
        )
    if why_no_kernel(projected, weights) is None:
        return weighted_swiglu_fused(projected, weights)
    form = weighted_swiglu_plain if backend is None else compiled(weighted_swiglu_plain, backend)
    out: Tensor = form(projected, weights)
    return out
