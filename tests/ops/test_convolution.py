"""The tree convolution against one trajectory at a time, every gradient included."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.errors import InputError
from harts.ops.convolution import tree_causal_convolution
from harts.ops.tree_index import TreeIndex
from tests.forests import batch_of, lay_out

from .small_trees import (
    TREES,
    SmallTree,
    poisoned,
    relative_error,
    small_tree,
    with_pack_neighbours,
)

CHANNELS = 3


def inputs(tree: SmallTree, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x with NaN padding, weight, bias."""
    torch.manual_seed(width)
    x = torch.randn(tree.index.rows, CHANNELS, dtype=dtype)
    weight = torch.randn(CHANNELS, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(CHANNELS, dtype=dtype, requires_grad=True)
    return [poisoned(x, tree.index.compact_rows), weight, bias]


def oracle(tree: SmallTree, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    def alone(path: Tensor) -> Tensor:
        out = []
        for t in range(len(path)):
            y = torch.zeros(CHANNELS, dtype=x.dtype) if bias is None else bias
            for back in range(min(weight.shape[1], t + 1)):
                y = y + x[path[t - back]] * weight[:, -1 - back]
            out.append(F.silu(y) if silu else y)
        return torch.stack(out)

    return tree.per_trajectory(alone)


def cotangent(tree: SmallTree, out: Tensor) -> Tensor:
    """Random, NaN where the output is padding."""
    torch.manual_seed(7)
    g = torch.randn(out.shape, dtype=out.dtype)
    g[tree.index.compact_rows :] = torch.nan
    return g


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("silu", [False, True])
def test_rows_and_every_gradient_equal_one_trajectory_at_a_time(name, width, silu):
    tree = small_tree(name)
    x, weight, bias = leaves = inputs(tree, width)
    out = tree_causal_convolution(
        x, weight, bias, index=tree.index, activation="silu" if silu else None
    )
    want = oracle(tree, x, weight, bias, silu)
    assert relative_error(out, want) < 1e-12
    g = cotangent(tree, out)
    got = torch.autograd.grad(out, leaves, g)
    wanted = torch.autograd.grad(want, leaves, g)
    rows = tree.index.compact_rows
    assert relative_error(got[0][:rows], wanted[0][:rows]) < 1e-12
    assert relative_error(got[1], wanted[1]) < 1e-12
    assert relative_error(got[2], wanted[2]) < 1e-12


def test_padded_tail_is_written_and_gets_no_gradient():
    tree = small_tree("nested forks", padding=5)
    x, weight, bias = leaves = inputs(tree, 4)
    out = tree_causal_convolution(x, weight, bias, index=tree.index, activation="silu")
    rows = tree.index.compact_rows
    assert torch.equal(out[rows:], torch.zeros(5, CHANNELS, dtype=out.dtype))
    grads = torch.autograd.grad(out, leaves, cotangent(tree, out))
    assert torch.equal(grads[0][rows:], torch.zeros(5, CHANNELS, dtype=out.dtype))
    assert all(g.isfinite().all() for g in grads)


def test_convolution_across_a_packed_boundary_is_caught():
    tree = small_tree("nested forks")
    x, weight, _ = inputs(tree, 4)
    want = oracle(tree, x, weight, None, False)
    leaking = tree_causal_convolution(x, weight, index=with_pack_neighbours(tree))
    assert relative_error(leaking, want) > 1e-2
    # A root has no ancestors: a change of the rows packed before it cannot reach it.
    roots = small_tree("forks at 0 and several roots")
    x, weight, _ = inputs(roots, 4)
    changed = x.detach().clone()
    changed[:4] += 1.0
    before = tree_causal_convolution(x, weight, index=roots.index)
    after = tree_causal_convolution(changed, weight, index=roots.index)
    assert torch.equal(before[4:], after[4:])


def test_gradient_of_a_branch_shorter_than_the_convolution_state():
    tree = small_tree("chain of one-row branches")
    x, weight, _ = inputs(tree, 4)
    out = tree_causal_convolution(x, weight, index=tree.index)
    # The last branch's first row, path position 4, reads positions 1..4 through three branches.
    (grad,) = torch.autograd.grad(out[4].sum(), x)
    expected = torch.zeros_like(grad)
    expected[1:5] = weight.detach().t()
    assert torch.allclose(grad, expected, rtol=0, atol=1e-15)


def test_rows_past_one_block_are_right():
    tree = small_tree("forks at 0 and several roots")
    index = replace(
        tree.index,
        rows=700,
        compact_rows=700,
        sequence_offsets=torch.tensor([0, 600, 700]),
        ancestor_rows=torch.arange(255),
        ancestor_offsets=torch.tensor([0, 0, 255]),
    )
    long = SmallTree(
        index, [torch.arange(600), torch.cat([torch.arange(255), torch.arange(600, 700)])]
    )
    x, weight, bias = leaves = inputs(long, 4)
    out = tree_causal_convolution(x, weight, bias, index=index)
    want = oracle(long, x, weight, bias, False)
    g = cotangent(long, out)
    assert relative_error(out, want) < 1e-12
    for got, wanted in zip(
        torch.autograd.grad(out, leaves, g), torch.autograd.grad(want, leaves, g), strict=True
    ):
        assert relative_error(got, wanted) < 1e-12


def test_checkpoint_recomputes_the_same_gradients():
    tree = small_tree("nested forks")
    leaves = inputs(tree, 4)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return tree_causal_convolution(x, weight, bias, index=tree.index, activation="silu")

    plain = torch.autograd.grad(run(*leaves).sum(), leaves)
    again = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("name", ["chain of one-row branches", "fan-out in a short trunk"])
def test_gradcheck(name):
    tree = small_tree(name, padding=1)
    x, weight, bias = inputs(tree, 3)
    x = x.detach().nan_to_num(0.5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w, b: tree_causal_convolution(x, w, b, index=tree.index), (x, weight, bias)
    )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_low_precision_inputs_keep_their_dtype(dtype, bound):
    tree = small_tree("nested forks")
    x, weight, bias = inputs(tree, 4, dtype)
    out = tree_causal_convolution(x, weight, bias, index=tree.index, activation="silu")
    want = oracle(tree, x.double(), weight.double(), bias.double(), True)
    assert out.dtype == dtype
    assert relative_error(out.double(), want) < bound
    assert torch.autograd.grad(out.sum(), x)[0].dtype == dtype


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        ((4, CHANNELS), (CHANNELS, 4), "R = 26"),
        ((26, CHANNELS), (CHANNELS, 1, 4), "squeeze"),
        ((26, CHANNELS), (CHANNELS, 0), "W >= 1"),
    ],
)
def test_wrong_shapes_are_refused_in_a_sentence(x, weight, said):
    tree = small_tree("nested forks", padding=6)
    with pytest.raises(InputError, match=said):
        tree_causal_convolution(torch.zeros(x), torch.zeros(weight), index=tree.index)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_the_width_and_a_longer_padding(rows):
    batch = batch_of([list(range(rows))])
    index = TreeIndex.from_layout(lay_out(batch, row_multiple=16)[2])
    x = poisoned(torch.randn(16, 2, dtype=torch.float64), rows)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    out = tree_causal_convolution(x, weight, index=index)
    plain = x.detach()[:rows].clone().requires_grad_()
    want = F.conv1d(F.pad(plain.t()[None], (3, 0)), weight[:, None], groups=2)[0].t()
    assert relative_error(out[:rows], want) < 1e-12
    got = torch.autograd.grad(out[:rows].sum(), (x, weight))
    wanted = torch.autograd.grad(want.sum(), (plain, weight))
    assert relative_error(got[0][:rows], wanted[0]) < 1e-12
    assert relative_error(got[1], wanted[1]) < 1e-12
    assert (out[rows:] == 0).all()
    assert (got[0][rows:] == 0).all()
