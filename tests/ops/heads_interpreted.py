"""The kernels of normalised heads in Triton's interpreter against float64; prints errors.

Units in the last place for narrow types, relative errors for float32.
"""

import json

import torch
from torch import Tensor

from harts.ops.heads.fused import normalised_heads_fused
from harts.ops.heads.reference import HeadSizes, split_heads
from tests.ops import interpreter
from tests.ops.rounding import neighbours, units_off
from tests.ops.small_trees import relative_error

NAMES = ("query", "key", "value")
# (R, H, K, G, V): every block full; none of them; one row; one number a head; no rows.
SIZES = (
    (9, 2, 64, 2, 64),
    (37, 3, 24, 5, 40),
    (21, 4, 96, 2, 17),
    (1, 1, 16, 1, 256),
    (5, 2, 1, 1, 1),
    (0, 2, 16, 2, 16),
)


def error(got: Tensor, exact: Tensor) -> float:
    assert got.is_contiguous()
    return (
        relative_error(got.double(), exact) if got.dtype == torch.float32 else units_off(got, exact)
    )


def drawn(rows: int, sizes: HeadSizes, dtype: torch.dtype) -> Tensor:
    mixed = torch.randn(rows, sizes.columns, generator=torch.Generator().manual_seed(rows))
    # Heads of zeros, which padding rows have, and heads whose norm epsilon changes.
    mixed[rows // 2 :: 7] = 0
    mixed[rows // 3 :: 5] *= 1e-3
    return mixed.to(dtype)


def errors(
    rows: int, sizes: HeadSizes, dtype: torch.dtype, read: tuple[str, ...] = NAMES
) -> dict[str, float]:
    """Errors of the outputs, and of the gradient where only some outputs are read."""
    mixed = drawn(rows, sizes, dtype).requires_grad_()
    exact = mixed.detach().double().requires_grad_()
    got = dict(zip(NAMES, normalised_heads_fused(mixed, sizes), strict=True))
    want = dict(zip(NAMES, split_heads(exact, sizes), strict=True))
    plain = dict(zip(NAMES, split_heads(mixed.detach(), sizes), strict=True))
    if dtype == torch.bfloat16:
        assert all(neighbours(got[name].detach(), plain[name]) for name in NAMES)
    # Gradients as a transposition leaves them.
    grads = {name: torch.randn(got[name].shape[::-1]).to(dtype).permute(2, 1, 0) for name in read}
    (found,) = torch.autograd.grad([got[n] for n in read], mixed, [grads[n] for n in read])
    (truth,) = torch.autograd.grad(
        [want[n] for n in read], exact, [grads[n].double() for n in read]
    )
    assert found.dtype == dtype
    return {name: error(got[name].detach(), want[name].detach()) for name in NAMES} | {
        "mixed": error(found, truth)
    }


def measure() -> dict[str, dict[str, float]]:
    # What is not written stays NaN.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    found = {}
    for rows, heads, key_dim, groups, value_dim in SIZES:
        sizes = HeadSizes(heads=heads, key_dim=key_dim, groups=groups, value_dim=value_dim)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found[f"{rows}, {sizes}, {dtype}"] = errors(rows, sizes, dtype)
    for read in (*((name,) for name in NAMES), ("query", "value")):
        found[f"only {read}, {torch.float16}"] = errors(11, sizes, torch.float16, read)
    return found


if __name__ == "__main__":
    interpreter.accept_new_numpy()
    print(json.dumps(measure()))
