"""The kernels of the weighted gated activation in Triton's interpreter; prints errors to float64.

Units in the last place for narrow types, relative errors for float32.
"""

import json
from itertools import product

import torch
from torch import Tensor

from harts.ops.swiglu.fused import weighted_swiglu_fused
from harts.ops.swiglu.reference import weighted_swiglu_plain
from tests.ops import interpreter
from tests.ops.rounding import neighbours, units_off
from tests.ops.small_trees import relative_error

# (M, I): tiles that fit, that do not, several tiles a row, one number, no rows.
SHAPES = ((8, 32), (37, 24), (3, 1100), (19, 5), (1, 1), (0, 8))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def error(got: Tensor, exact: Tensor) -> float:
    assert got.is_contiguous()
    return (
        relative_error(got.double(), exact) if got.dtype == torch.float32 else units_off(got, exact)
    )


def errors(rows: int, width: int, dtype: torch.dtype, of_weights: torch.dtype) -> dict[str, float]:
    # Gates out to where the exponential overflows; weights and gradients that are not contiguous.
    projected = 3 * torch.randn(rows, 2 * width)
    projected[:, :width:7] *= 40
    leaves = [projected.to(dtype), torch.rand(rows, 2).to(of_weights)[:, 1:]]
    grad = torch.randn(width, rows).to(dtype).t()
    mine = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in leaves]
    exact = [x.double().requires_grad_() for x in leaves]
    out, want = weighted_swiglu_fused(*mine), weighted_swiglu_plain(*exact)
    if dtype == torch.bfloat16:
        assert neighbours(out.detach(), weighted_swiglu_plain(*leaves))
    found = (out.detach(), *torch.autograd.grad(out, mine, grad))
    truth = (want.detach(), *torch.autograd.grad(want, exact, grad.double()))
    assert [x.dtype for x in found] == [dtype, dtype, of_weights]
    names = ("output", "projected", "weights")
    return {name: error(*pair) for name, *pair in zip(names, found, truth, strict=True)}


def measure() -> dict[str, dict[str, float]]:
    # What is not written stays NaN.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    return {
        f"{rows}, {width}, {dtype}, weights {of_weights}": errors(rows, width, dtype, of_weights)
        for (rows, width), dtype, of_weights in product(SHAPES, DTYPES, DTYPES)
        if of_weights in (dtype, torch.float32)
    }


if __name__ == "__main__":
    interpreter.accept_new_numpy()
    print(json.dumps(measure()))
