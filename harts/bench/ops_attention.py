"""The attention part of ``harts bench ops``.

The yardstick is the paper's way through the same kernels: every sequence's ancestors copied.

Shapes: C compact rows · R physical rows · H query heads · Hkv key/value heads · K key dim ·
V value dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harts.bench.gpu_trees import TREES, index_of
from harts.bench.measure import Result
from harts.bench.ops import Progress, Report, median_ms, peak_gib
from harts.bench.ops_delta_rule import rollout_tree
from harts.errors import HartsError
from harts.ops.attention import tree_attention
from harts.ops.attention.reference import attend_tree
from harts.ops.tree_index import TreeIndex

HEADS = {
    "MLA 192/128": (16, 16, 192, 128),
    "GQA 128": (16, 4, 128, 128),
    "MHA 64": (8, 8, 64, 64),
    "MHA 256": (4, 4, 256, 256),
}
"""H, Hkv, K, V."""
MAIN = "MLA 192/128"
BOUND_MS = 77.0
PEAK_GIB = 8.0
ERROR_BOUND = 3.5e-3
"""Rounding of inputs' products and outputs to bfloat16, forward and backward."""


def measure(progress: Progress) -> Report:
    """Gate, then every tree forward and backward; the cost of the deterministic mode.

    Raises:
        HartsError: the gate failed; nothing was measured.
    """
    progress("attention: gate against float64")
    figures: dict[str, Any] = {name: gate(heads) for name, heads in HEADS.items()}
    results: list[Result] = []
    for name, tokens in TREES.items():
        progress(f"attention: {name}")
        index = index_of(tokens(), "cuda")
        leaves = _inputs(index, HEADS[MAIN])
        heads, _, _, value_dim = HEADS[MAIN]
        shape = (index.rows, heads, value_dim)
        grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        both = partial(_both, leaves, index, grad)
        forward = partial(tree_attention, *(t.detach() for t in leaves), index=index)
        figures[f"{name}: forward_ms"] = median_ms(forward)
        figures[f"{name}: both_ms"] = both_ms = median_ms(both)
        figures[f"{name}: peak_gib"] = gib = peak_gib(both)
        if not results:
            detail = f"{name}, {MAIN}, H=16, bfloat16, forward and backward"
            results = [
                Result(name="attention", value=both_ms, unit="ms", bound=BOUND_MS, detail=detail),
                Result(
                    name="attention, peak memory, inputs and gradients included",
                    value=gib,
                    unit="GiB",
                    bound=PEAK_GIB,
                    detail=detail,
                ),
            ]
            figures["deterministic_both_ms"] = _deterministic_ms(both)
    return Report(results=results, figures=figures)


def gate(heads: tuple[int, int, int, int]) -> dict[str, float]:
    """Relative errors of output and gradients against float64.

    Raises:
        HartsError: one is past its bound.
    """
    index = index_of(rollout_tree(rows=3_000), "cuda")
    leaves = _inputs(index, heads)
    grad = torch.randn(index.rows, heads[0], heads[3], device="cuda", dtype=torch.bfloat16)
    grad[index.compact_rows :] = 0
    exact = [t.detach().double().requires_grad_() for t in leaves]
    query, key, value = exact
    want = attend_tree(query, key, value, index, heads[2] ** -0.5)
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]
    out = tree_attention(*leaves, index=index)
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    names = ("output", "query", "key", "value")
    errors = {
        name: float((a - b).detach().norm() / b.detach().norm())
        for name, a, b in zip(names, got, wanted, strict=True)
    }
    if not max(errors.values()) <= ERROR_BOUND:
        raise HartsError(f"attention gate: errors {errors} for {heads}, bound {ERROR_BOUND}.")
    return errors


def _both(leaves: list[Tensor], index: TreeIndex, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(tree_attention(*leaves, index=index), leaves, grad)


def _deterministic_ms(both: Callable[[], tuple[Tensor, ...]]) -> float:
    torch.use_deterministic_algorithms(True)
    try:
        if not all(torch.equal(a, b) for a, b in zip(both(), both(), strict=True)):
            raise HartsError("attention: two deterministic runs differ; expected equal bits.")
        return median_ms(both)
    finally:
        torch.use_deterministic_algorithms(False)


def _inputs(index: TreeIndex, heads: tuple[int, int, int, int]) -> list[Tensor]:
    torch.manual_seed(0)
    h, kv, k, v = heads
    shapes = ((h, k), (kv, k), (kv, v))
    return [
        torch.randn(index.rows, *shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
