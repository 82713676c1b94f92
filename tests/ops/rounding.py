"""How far results of a narrow type are from exact ones, in units in the last place."""

import torch
from torch import Tensor

_CANCELLED = 1e-3
"""Below this part of the largest number, float32 has cancelled: a unit is that of this part."""


def units_off(got: Tensor, exact: Tensor) -> float:
    """Largest distance from float64, in units of ``got``'s type; 0.5 is what rounding once does."""
    if not got.numel():
        return 0.0
    size = exact.abs().clamp(min=max(_CANCELLED * float(exact.abs().max()), 1e-30))
    unit = torch.exp2(size.log2().floor()) * torch.finfo(got.dtype).eps
    return float(((got.double() - exact).abs() / unit).max())


def neighbours(a: Tensor, b: Tensor) -> bool:
    """Whether two bfloat16 tensors differ by at most one unit in the last place everywhere."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return bool(((ordered(a) - ordered(b)).abs() <= 1).all())
