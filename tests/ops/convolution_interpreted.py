"""The convolution's Triton kernels in Triton's interpreter against plain PyTorch; prints errors."""

import json
from itertools import product

import numpy as np
import torch

from harts.ops.convolution import triton_kernels
from harts.ops.convolution.reference import convolve_tree
from harts.ops.convolution.tables import convolution_tables
from harts.ops.tree_index import TreeIndex
from tests.forests import lay_out, random_batch
from tests.ops import interpreter
from tests.ops.small_trees import TREES, relative_error, small_tree


def errors(
    index: TreeIndex, channels: int, width: int, silu: bool, biased: bool
) -> dict[str, float]:
    """Relative errors of output and gradients in float32 against float64."""
    torch.manual_seed(channels)
    leaves = [torch.randn(index.rows, channels), torch.randn(channels, width)]
    leaves[0][index.compact_rows :] = torch.nan
    grad = torch.randn(index.rows, channels)
    grad[index.compact_rows :] = torch.nan
    if biased:
        leaves.append(torch.randn(channels))
    exact = [t.double().requires_grad_() for t in leaves]
    bias = exact[2] if biased else None
    want = convolve_tree(exact[0], exact[1], bias, index, "silu" if silu else None)
    wanted = torch.autograd.grad(want, exact, grad.double())
    x, weight, bias = leaves if biased else (*leaves, None)
    tables = convolution_tables(index, width)
    out = triton_kernels.forward(x, weight, bias, tables, silu)
    got = triton_kernels.backward(grad, x, weight, bias, tables, silu)
    assert (got[2] is None) == (not biased)
    names = ("output", "x", "weight", "bias")
    return {
        name: relative_error(a.double(), b)
        for name, a, b in zip(names, (out, *got), (want, *wanted), strict=False)
    }


def measure() -> dict[str, dict[str, float]]:
    found = {}
    # Short runs of rows, so that small trees have several.
    triton_kernels._SHORTEST_RUN = 4
    for name, width, silu in product(TREES, (2, 3, 4), (False, True)):
        for launch in ("_FORWARD", "_BACKWARD"):
            setattr(triton_kernels, launch, getattr(triton_kernels, launch)._replace(programs=3))
        found[f"{name}, {width}, {silu}"] = errors(small_tree(name).index, 3, width, silu, silu)
    batch = random_batch(np.random.default_rng(0), trajectories=12, max_length=30)
    index = TreeIndex.from_layout(lay_out(batch, row_multiple=16)[2])
    found["a random tree"] = errors(index, 9, 4, True, False)
    return found


if __name__ == "__main__":
    interpreter.accept_new_numpy()
    print(json.dumps(measure()))
