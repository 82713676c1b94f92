"""Sizes at the ends of what users bring: one row, a quarter million, 4,096 leaves, 1 to 64 heads.

Small cases against float64; large ones against every trajectory alone through the same kernels,
and against a second form.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.bench.gpu_trees import comb, index_of
from harts.bench.ops_delta_rule import (
    Shape,
    both_ways,
    check_tree,
    make_inputs,
    rollout_tree,
    tree_on_gpu,
    tree_run,
)
from harts.errors import UnsupportedError
from harts.ops.convolution import tree_causal_convolution
from harts.ops.convolution.fused import why_not_fused
from harts.ops.convolution.reference import convolve_tree
from harts.ops.delta_rule.dispatch import _fla_version, choose_backend
from harts.ops.logprobs import mapped_logprobs
from harts.ops.logprobs.reference import map_logprobs
from harts.ops.logprobs.streamed import why_not_streamed
from harts.ops.tree_index import TreeIndex

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NEEDS_FLA = pytest.mark.skipif(_fla_version() is None, reason="needs fla-core")
LARGEST = 262_144
DECAY = 4
"""Place of the log decay's gradient among output, query, key, value, log decay and beta."""
BOTH_RULES = pytest.mark.parametrize("by_channel", [True, False], ids=["KDA", "GDN"])


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    assert got.isfinite().all()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def rule(heads: int, groups: int, dim: int, by_channel: bool) -> Shape:
    return Shape(heads=heads, groups=groups, dim=dim, by_channel=by_channel)


def check_against_float64(shape: Shape, index: TreeIndex, dtype: torch.dtype, bound: float) -> None:
    inputs = make_inputs(shape, index.rows)
    for place in (0, 1, 2, 4):
        inputs[place] = inputs[place].detach().to(dtype).requires_grad_()
    # Sums of squares: with a single row, sums that cancel would show any rounding enlarged.
    upstream = inputs[2].detach().clone()
    upstream[index.compact_rows :] = 0
    results = []
    for leaves, backend in (
        (inputs, "split"),
        ([x.detach().double().requires_grad_() for x in inputs], "reference"),
    ):
        out = tree_run(index, backend)(leaves)
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))])
    for place, (got, want) in enumerate(zip(*results, strict=True)):
        if place == DECAY and not want.any():
            # One row has nothing to decay: query times its gradient, less key times its own.
            term = inputs[0].double() * results[1][1]
            assert got.norm() < bound * term.norm()
        else:
            assert relative(got, want) < bound


@NEEDS_FLA
@BOTH_RULES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_delta_rule_of_one_row(dim, dtype, by_channel):
    # Nearly nothing is summed: one rounding of a product weighs as much as it can.
    check_against_float64(
        rule(1, 1, dim, by_channel), index_of([np.zeros(1, np.int32)], "cuda"), dtype, 0.02
    )


@NEEDS_FLA
@BOTH_RULES
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [1, 64])
def test_delta_rule_of_1_and_64_heads(heads, dim, by_channel):
    index = index_of(rollout_tree(rows=700, leaves=7), "cuda")
    check_against_float64(rule(heads, heads, dim, by_channel), index, torch.bfloat16, 0.02)


@NEEDS_FLA
@BOTH_RULES
def test_delta_rule_of_a_quarter_million_rows(by_channel):
    index, paths = tree_on_gpu(rollout_tree(rows=LARGEST, leaves=12))
    shape = rule(2, 2, 128, by_channel)
    assert index.compact_rows == LARGEST
    assert check_tree(shape, index, paths) == (1.0, 12)
    inputs = make_inputs(shape, index.rows)
    results = []
    for backend in ("split", "rounds"):
        torch.manual_seed(0)
        results.append(both_ways(tree_run(index, backend), inputs)())
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < 0.01


@NEEDS_FLA
@BOTH_RULES
def test_delta_rule_of_4096_leaves(by_channel):
    index, paths = tree_on_gpu(comb(100, 4096, 8))
    assert len(paths) == 4096
    assert check_tree(rule(1, 2, 64, by_channel), index, paths) == (1.0, 12)


@NEEDS_FLA
@BOTH_RULES
def test_delta_rule_refuses_float32_by_name_and_runs_its_reference_unasked(by_channel):
    inputs = [x.detach().float() for x in make_inputs(rule(1, 1, 64, by_channel), 8)]
    chosen = (inputs[0], inputs[2], inputs[3])
    assert choose_backend(*chosen, chunk_size=64) == "reference"
    with pytest.raises(UnsupportedError, match="float32"):
        choose_backend(*chosen, chunk_size=64, backend="split")


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 6e-4), (torch.float32, 2e-6)]
)
@pytest.mark.parametrize(
    ("tokens", "channels"),
    [
        (lambda: [np.zeros(1, np.int32)], 1),
        (lambda: [np.zeros(1, np.int32)], 24_576),
        (lambda: rollout_tree(rows=LARGEST, leaves=1), 64),
        (lambda: rollout_tree(rows=LARGEST, leaves=50), 96),
        (lambda: comb(3, 4096, 8), 72),
        (lambda: comb(1000, 4096, 1), 130),
    ],
)
def test_convolution(tokens, channels, dtype, bound):
    index = index_of(tokens(), "cuda")
    torch.manual_seed(0)
    leaves = [
        torch.randn(shape, device="cuda").to(dtype).requires_grad_()
        for shape in ((index.rows, channels), (channels, 4), (channels,))
    ]
    assert why_not_fused(leaves[0], leaves[1]) is None
    grad = torch.randn(index.rows, channels, device="cuda").to(dtype)
    grad[index.compact_rows :] = 0
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = convolve_tree(*exact, index, "silu")
    got = tree_causal_convolution(*leaves, index=index, activation="silu")
    pairs = (
        (got, *torch.autograd.grad(got, leaves, grad)),
        (want, *torch.autograd.grad(want, exact, grad.double())),
    )
    for a, b in zip(*pairs, strict=True):
        assert relative(a, b) < bound


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize(
    ("rows", "positions", "vocabulary"),
    [(1, 1, 2), (1, 4096, 300), (LARGEST, LARGEST, 300), (300, 1_000_000, 151_851)],
)
def test_log_probs(rows, positions, vocabulary, dtype, bound):
    torch.manual_seed(0)
    hidden = torch.randn(rows, 64, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 64, device="cuda") / 8).to(dtype).requires_grad_()
    assert (why_not_streamed(hidden, weight) is None) == (dtype == torch.bfloat16)
    at = torch.randint(rows, (positions,), device="cuda")
    targets = torch.randint(vocabulary, (positions,), device="cuda")
    grad = torch.randn(positions, device="cuda")
    got = mapped_logprobs(hidden, weight, at, targets)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want, _ = map_logprobs(*exact, at, targets, None, 1.0, None, False)
    assert relative(got, want) < 1e-5
    pairs = (
        torch.autograd.grad(got, (hidden, weight), grad),
        torch.autograd.grad(want, exact, grad.double()),
    )
    for a, b in zip(*pairs, strict=True):
        assert relative(a, b) < bound
