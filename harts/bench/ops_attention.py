"""The attention part of ``harts bench ops``.

Every form that can run is measured on every tree, beside the form that is chosen. The yardstick of
the errors is the paper's way: each sequence alone against a copy of its ancestors.

Shapes: C compact rows · R physical rows · H query heads · Hkv key/value heads · K key dim ·
V value dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harts.bench.gpu_trees import TREES, bushy, comb, index_of
from harts.bench.measure import Result
from harts.bench.ops import Progress, Report, Trees, median_ms, peak_gib
from harts.bench.ops_delta_rule import rollout_tree
from harts.errors import HartsError, UnsupportedError
from harts.ops.attention import Backend, choose_backend, tree_attention
from harts.ops.attention.dispatch import why_mask
from harts.ops.attention.flash4 import why_not_installed
from harts.ops.attention.reference import attend_tree
from harts.ops.attention.varlen import attend_tree_varlen
from harts.ops.tree_index import TreeIndex

HEADS = {
    "MLA 192/128": (16, 16, 192, 128),
    "GQA 128": (16, 4, 128, 128),
    "MHA 64": (8, 8, 64, 64),
    "MHA 256": (4, 4, 256, 256),
}
"""H, Hkv, K, V."""
MAIN = "MLA 192/128"
FORMS: tuple[Backend, ...] = ("flash-attn-4", "varlen", "mask")
ATTENTION_TREES = TREES | {
    "trunk of 32,768 with 4,096 branches of 8": lambda: comb(32_768, 4_096, 8),
    "forks in two every 64 rows, 512 leaves": lambda: bushy(10, 64),
    "forks in two every 16 rows, 2,048 leaves": lambda: bushy(12, 16),
}
BOUND_MS = {"flash-attn-4": 37.0, "varlen": 77.0}
PEAK_GIB = 8.0
CHOICE_BOUND = 1.1
"""Time of the chosen form over that of the fastest."""
ERROR_RATIO = 1.2
"""Error over that of each sequence alone."""
ERROR_BOUND = 3.5e-3
"""Rounding of inputs' products and outputs to bfloat16, forward and backward."""

Both = Callable[[], tuple[Tensor, ...]]


def measure(progress: Progress, trees: Trees | None = None) -> Report:
    """Gate, then every tree forward and backward; the cost of the deterministic mode.

    Raises:
        HartsError: the gate failed; nothing was measured.
    """
    progress("attention: gate against float64")
    gates = {name: gate(heads) for name, heads in HEADS.items()}
    ratio = max(
        max(form["over each sequence alone"] for form in g.values()) for g in gates.values()
    )
    results: list[Result] = []
    figures: dict[str, Any] = dict(gates)
    choices = {}
    for number, (name, tokens) in enumerate((trees or ATTENTION_TREES).items()):
        index = index_of(tokens(), "cuda")
        leaves = _inputs(index, HEADS[MAIN])
        measured: dict[str, dict[str, float]] = {}
        for form in _usable(leaves, index):
            progress(f"attention: {name}, {form}")
            measured[form] = _measure(leaves, index, form, deterministic=number == 0)
        figures[name] = {**measured}
        for present in ("with", "without"):
            ratio_of_choice = _choice(leaves, index, measured, present == "with")
            choices[f"{name}, {present} flash-attn-4"] = ratio_of_choice
            figures[name][f"choice_{present}_flash_attn_4_ratio"] = ratio_of_choice
        if number == 0 or trees:
            results += _main_results(name, measured)
    worst = max(choices, key=lambda name: choices[name])
    return Report(
        results=[
            *results,
            Result(
                name="attention, chosen form over the fastest",
                value=choices[worst],
                unit="x",
                bound=CHOICE_BOUND,
                detail=f"the worst of {len(choices)} choices: {worst}",
            ),
            Result(
                name="attention, error over that of each sequence alone",
                value=ratio,
                unit="x",
                bound=ERROR_RATIO,
                detail="the worst of all forms and head shapes: output and every gradient",
            ),
        ],
        figures=figures,
    )


def gate(heads: tuple[int, int, int, int]) -> dict[str, dict[str, float]]:
    """Relative errors of output and gradients against float64, form by form.

    Raises:
        HartsError: one is past its bound.
    """
    index = index_of(rollout_tree(rows=3_000), "cuda")
    leaves = _inputs(index, heads)
    grad = torch.randn(index.rows, heads[0], heads[3], device="cuda", dtype=torch.bfloat16)
    grad[index.compact_rows :] = 0
    scale = heads[2] ** -0.5
    query, key, value = exact = [t.detach().double().requires_grad_() for t in leaves]
    want = attend_tree(query, key, value, index, scale)
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]

    def errors(out: Tensor) -> dict[str, float]:
        got = [out, *torch.autograd.grad(out, leaves, grad)]
        return {
            name: float((a - b).detach().norm() / b.detach().norm())
            for name, a, b in zip(("output", "query", "key", "value"), got, wanted, strict=True)
        }

    query, key, value = leaves
    alone = errors(attend_tree_varlen(query, key, value, index, scale, workspace_bytes=1))
    found: dict[str, dict[str, float]] = {}
    for form in _usable(leaves, index):
        found[form] = errors(tree_attention(query, key, value, index=index, backend=form))
        if not max(found[form].values()) <= ERROR_BOUND:
            raise HartsError(
                f"attention gate: errors {found[form]} of {form} for {heads}, bound {ERROR_BOUND}."
            )
        found[form]["over each sequence alone"] = max(found[form][n] / alone[n] for n in alone)
    return found


def _usable(leaves: list[Tensor], index: TreeIndex) -> list[Backend]:
    found: list[Backend] = []
    for form in FORMS:
        try:
            found.append(choose_backend(*leaves, index=index, backend=form))
        except UnsupportedError:
            if form != "flash-attn-4" or why_not_installed() is None:
                raise
    return found


def _choice(
    leaves: list[Tensor],
    index: TreeIndex,
    measured: dict[str, dict[str, float]],
    has_flash4: bool,
) -> float:
    """Time of the form that would be chosen over that of the fastest that could be."""
    query, key, value = leaves
    usual = "flash-attn-4" if has_flash4 and "flash-attn-4" in measured else "varlen"
    because = why_mask(query, key, value, index, usual == "flash-attn-4")
    chosen = usual if because is None else "mask"
    return measured[chosen]["both_ms"] / min(measured[form]["both_ms"] for form in (usual, "mask"))


def _measure(
    leaves: list[Tensor], index: TreeIndex, form: Backend, deterministic: bool
) -> dict[str, float]:
    heads, _, _, value_dim = HEADS[MAIN]
    grad = torch.randn(index.rows, heads, value_dim, device="cuda", dtype=torch.bfloat16)
    both = partial(_both, leaves, index, grad, form)
    query, key, value = (t.detach() for t in leaves)
    forward = partial(tree_attention, query, key, value, index=index, backend=form)
    figures = {
        "forward_ms": median_ms(forward, repeats=9),
        "both_ms": median_ms(both, repeats=9),
        "peak_gib": peak_gib(both),
    }
    if deterministic:
        figures["deterministic_both_ms"] = _deterministic_ms(both)
    return figures


def _main_results(name: str, measured: dict[str, dict[str, float]]) -> list[Result]:
    detail = f"{name}, {MAIN}, H=16, bfloat16, forward and backward"
    found = []
    for form, bound in BOUND_MS.items():
        if form in measured:
            found += [
                Result(
                    name=f"attention, {form}",
                    value=measured[form]["both_ms"],
                    unit="ms",
                    bound=bound,
                    detail=detail,
                ),
                Result(
                    name=f"attention, {form}, peak memory, inputs and gradients included",
                    value=measured[form]["peak_gib"],
                    unit="GiB",
                    bound=PEAK_GIB,
                    detail=detail,
                ),
            ]
    return found


def _both(
    leaves: list[Tensor], index: TreeIndex, grad: Tensor, form: Backend
) -> tuple[Tensor, ...]:
    query, key, value = leaves
    out = tree_attention(query, key, value, index=index, backend=form)
    return torch.autograd.grad(out, leaves, grad)


def _deterministic_ms(both: Both) -> float:
    torch.use_deterministic_algorithms(True)
    try:
        if not all(torch.equal(a, b) for a, b in zip(both(), both(), strict=True)):
            raise HartsError("attention: two deterministic runs differ; expected equal bits.")
        return median_ms(both, repeats=9)
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
