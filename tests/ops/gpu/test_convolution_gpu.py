"""The compiled tree convolution against float64 on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.ops.convolution import tree_causal_convolution
from harts.ops.convolution.fused import why_not_fused
from harts.ops.convolution.reference import convolve_tree
from harts.ops.tree_index import TreeIndex
from tests.forests import batch_of, lay_out, random_batch
from tests.ops.small_trees import TREES, small_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(index: TreeIndex) -> TreeIndex:
    fields = ("sequence_offsets", "ancestor_rows", "ancestor_offsets")
    return replace(index, **{name: getattr(index, name).cuda() for name in fields})


def relative(got: Tensor, want: Tensor) -> float:
    return float(
        (got.detach().double().cpu() - want.detach()).norm() / want.detach().norm().clamp(min=1e-30)
    )


def check(index, channels, width, *, silu=True, biased=True, dtype=torch.bfloat16, bound=5e-3):
    torch.manual_seed(channels)
    x = torch.randn(index.rows, channels).to(dtype)
    x[index.compact_rows :] = torch.nan
    leaves = [x, torch.randn(channels, width).to(dtype)]
    if biased:
        leaves.append(torch.randn(channels).to(dtype))
    grad = torch.randn(index.rows, channels).to(dtype)
    grad[index.compact_rows :] = torch.nan
    activation = "silu" if silu else None
    exact = [t.double().requires_grad_() for t in leaves]
    bias = exact[2] if biased else None
    want = convolve_tree(exact[0], exact[1], bias, index, activation)
    wanted = torch.autograd.grad(want, exact, grad.double())
    mine = [t.cuda().requires_grad_() for t in leaves]
    there = on_gpu(index)
    runs = []
    for _ in range(2):
        bias = mine[2] if biased else None
        got = tree_causal_convolution(mine[0], mine[1], bias, index=there, activation=activation)
        runs.append((got, *torch.autograd.grad(got, mine, grad.cuda())))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for got, exactly in zip(runs[0], (want, *wanted), strict=True):
        assert got.dtype == dtype
        assert relative(got, exactly) < bound
    rows = index.compact_rows
    assert (runs[0][0][rows:] == 0).all()
    assert (runs[0][1][rows:] == 0).all()


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_small_trees(name, silu, width):
    check(small_tree(name).index, 5, width, silu=silu)


@pytest.mark.parametrize("channels", [1, 3, 33, 128, 513, 2048])
def test_any_channel_count(channels):
    check(small_tree("interleaved subtrees").index, channels, 4)


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_over_several_runs_of_rows(seed):
    batch = random_batch(np.random.default_rng(seed), trajectories=40, max_length=200)
    check(TreeIndex.from_layout(lay_out(batch, row_multiple=16)[2]), 40, 4, biased=seed % 2 == 0)


def test_one_row():
    check(TreeIndex.from_layout(lay_out(batch_of([[1]]))[2]), 8, 4)


def test_rows_at_the_very_end_that_another_sequence_reads():
    chain = [[0] * 17 + list(range(1, n)) for n in range(2, 6)]
    branches = [[*path, 9] for path in chain]
    check(TreeIndex.from_layout(lay_out(batch_of([*chain, *branches]))[2]), 7, 4)


def test_many_branches_from_one_row():
    paths = [[1, 2, 3, 4, 100 + i] for i in range(500)]
    check(
        TreeIndex.from_layout(lay_out(batch_of(paths))[2]), 16, 4, dtype=torch.float32, bound=1e-5
    )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-4), (torch.float32, 1e-6)])
def test_other_dtypes(dtype, bound):
    check(small_tree("nested forks").index, 64, 4, dtype=dtype, bound=bound)


def test_other_widths_run_the_plain_form():
    x = torch.zeros(2, 3, device="cuda")
    assert "width is 5" in why_not_fused(x, torch.zeros(3, 5, device="cuda"))
    check(small_tree("nested forks").index, 3, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_shared_row_is_the_row_of_each_trajectory_bit_for_bit(dtype, biased):
    batch = random_batch(np.random.default_rng(1), trajectories=40, max_length=200)
    channels = 300
    outputs = []
    for share in (True, False):
        layout = lay_out(batch, share=share)[2]
        drawn = torch.randn(int(batch.tokens.max()) + 1, 200, channels, generator=seeded(0))
        # A row is a function of its token and position, so copies of a prefix have equal rows.
        x = (0.02 * drawn[layout.tokens, layout.positions % 200]).to(dtype).cuda()
        weight, bias = (torch.randn(channels, n, generator=seeded(1)).to(dtype) for n in (4, 1))
        out = tree_causal_convolution(
            x,
            weight.cuda(),
            bias[:, 0].cuda() if biased else None,
            index=TreeIndex.from_layout(layout, "cuda"),
            activation="silu",
        )
        outputs.append(out[torch.from_numpy(layout.member_rows).cuda()])
    assert torch.equal(*outputs)


def seeded(seed):
    return torch.Generator().manual_seed(seed)
