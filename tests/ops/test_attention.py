"""Tree attention against one trajectory at a time, every gradient included."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.errors import InputError
from harts.ops.attention import tree_attention
from harts.ops.attention.cascade import attend_tree_cascade
from harts.ops.attention.reference import attend_tree

from .small_trees import (
    TREES,
    SmallTree,
    poisoned,
    relative_error,
    small_tree,
    with_pack_neighbours,
)

FORMS = {"reference": attend_tree, "cascade": attend_tree_cascade}
HEADS = {"MHA": (2, 2, 4, 4), "V < K": (2, 2, 5, 3), "V > K": (2, 2, 3, 5), "GQA": (4, 2, 4, 3)}
"""H, Hkv, K, V."""


def inputs(tree: SmallTree, heads: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """query, key, value with NaN padding."""
    torch.manual_seed(3)
    h, kv, k, v = HEADS[heads]
    shapes = ((h, k), (kv, k), (kv, v))
    return [
        poisoned(torch.randn(tree.index.rows, *shape, dtype=dtype), tree.index.compact_rows)
        for shape in shapes
    ]


def oracle(tree: SmallTree, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]

    def alone(path: Tensor) -> Tensor:
        rows = []
        for t in range(len(path)):
            seen = path[: t + 1]
            heads = [
                torch.softmax(k[seen, h // group] @ q[path[t], h] * scale, 0) @ v[seen, h // group]
                for h in range(q.shape[1])
            ]
            rows.append(torch.stack(heads))
        return torch.stack(rows)

    return tree.per_trajectory(alone)


def cotangent(tree: SmallTree, out: Tensor) -> Tensor:
    """Random, NaN where the output is padding."""
    torch.manual_seed(7)
    g = torch.randn(out.shape, dtype=out.dtype)
    g[tree.index.compact_rows :] = torch.nan
    return g


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", TREES)
def test_rows_and_every_gradient_equal_one_trajectory_at_a_time(name, heads, form):
    tree = small_tree(name)
    leaves = inputs(tree, heads)
    out = FORMS[form](*leaves, tree.index, 0.7)
    want = oracle(tree, *leaves, 0.7)
    assert out.dtype == torch.float64
    assert relative_error(out, want) < 1e-12
    g = cotangent(tree, out)
    rows = tree.index.compact_rows
    for got, wanted in zip(
        torch.autograd.grad(out, leaves, g), torch.autograd.grad(want, leaves, g), strict=True
    ):
        assert relative_error(got[:rows], wanted[:rows]) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_padded_tail_is_written_and_gets_no_gradient(form):
    tree = small_tree("interleaved subtrees", padding=5)
    leaves = inputs(tree, "GQA")
    out = FORMS[form](*leaves, tree.index, 0.5)
    rows = tree.index.compact_rows
    assert (out[rows:] == 0).all()
    for grad in torch.autograd.grad(out, leaves, cotangent(tree, out)):
        assert (grad[rows:] == 0).all()
        assert grad.isfinite().all()


def test_dispatch_scales_by_the_key_dim():
    tree = small_tree("nested forks")
    leaves = inputs(tree, "V < K")
    got = tree_attention(*leaves, index=tree.index)
    assert relative_error(got, oracle(tree, *leaves, 5**-0.5)) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_keys_of_a_packed_neighbour_are_caught(form):
    tree = small_tree("nested forks")
    leaves = inputs(tree, "MHA")
    want = oracle(tree, *leaves, 0.5)
    assert relative_error(FORMS[form](*leaves, with_pack_neighbours(tree), 0.5), want) > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_branches_see_neither_siblings_nor_later_rows(form):
    # A multi-level mask P -> {A, B} -> R: "nested forks" has it twice.
    tree = small_tree("nested forks")
    leaves = inputs(tree, "MHA")
    out = FORMS[form](*leaves, tree.index, 0.5)
    for path, own in zip(tree.paths, map(tree.own, range(len(tree.paths))), strict=True):
        for t in range(len(path) - own, len(path)):
            (grad,) = torch.autograd.grad(out[path[t]].sum(), leaves[2], retain_graph=True)
            reached = set(grad.abs().sum((1, 2)).nonzero()[:, 0].tolist())
            assert reached == set(path[: t + 1].tolist())


@pytest.mark.parametrize("form", FORMS)
def test_long_branches_in_several_blocks_equal_naive_attention(form):
    tree = long_tree()
    leaves = [torch.randn(tree.index.rows, 2, d, dtype=torch.float64) for d in (4, 4, 3)]
    for leaf in leaves:
        leaf.requires_grad_()

    def alone(path: Tensor) -> Tensor:
        q, k, v = (t[path].transpose(0, 1) for t in leaves)
        future = torch.ones(len(path), len(path)).triu(1).bool()
        scores = (q @ k.transpose(1, 2) * 0.5).masked_fill(future, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)

    out = FORMS[form](*leaves, tree.index, 0.5)
    want = tree.per_trajectory(alone)
    g = torch.randn(out.shape, dtype=out.dtype)
    assert relative_error(out, want) < 1e-12
    for got, wanted in zip(
        torch.autograd.grad(out, leaves, g), torch.autograd.grad(want, leaves, g), strict=True
    ):
        assert relative_error(got, wanted) < 1e-12


def long_tree() -> SmallTree:
    """700 rows; 600 below row 300 of them; 5 below row 850 of that path."""
    tree = small_tree("nested forks")
    trunk = torch.arange(700)
    branch = torch.cat([trunk[:300], torch.arange(700, 1300)])
    leaf = torch.cat([branch[:850], torch.arange(1300, 1305)])
    index = replace(
        tree.index,
        rows=1305,
        compact_rows=1305,
        sequence_offsets=torch.tensor([0, 700, 1300, 1305]),
        ancestor_rows=torch.cat([branch[:300], leaf[:850]]),
        ancestor_offsets=torch.tensor([0, 0, 300, 1150]),
    )
    return SmallTree(index, [trunk, branch, leaf])


@pytest.mark.parametrize("form", FORMS)
def test_checkpoint_recomputes_the_same_gradients(form):
    tree = small_tree("interleaved subtrees")
    leaves = inputs(tree, "GQA")

    def run(*qkv: Tensor) -> Tensor:
        return FORMS[form](*qkv, tree.index, 0.5)

    plain = torch.autograd.grad(run(*leaves).sum(), leaves)
    again = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", ["GQA", "V > K"])
def test_gradcheck(form, heads):
    tree = small_tree("fan-out in a short trunk", padding=1)
    leaves = [t.detach().nan_to_num(0.5).requires_grad_() for t in inputs(tree, heads)]
    op: Callable[..., Tensor] = FORMS[form]
    assert torch.autograd.gradcheck(lambda *qkv: op(*qkv, tree.index, 0.5), leaves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_low_precision_inputs_keep_their_dtype(form, dtype, bound):
    tree = small_tree("nested forks")
    leaves = inputs(tree, "V < K", dtype)
    out = FORMS[form](*leaves, tree.index, 0.5)
    assert out.dtype == dtype
    assert relative_error(out.double(), oracle(tree, *(t.double() for t in leaves), 0.5)) < bound
    assert all(g.dtype == dtype for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("form", FORMS)
def test_huge_scores_of_an_ancestor_run_stay_finite(form):
    tree = small_tree("fan-out in a short trunk")
    q, k, v = (t.detach() for t in inputs(tree, "MHA", torch.float32))
    k[0] *= 1e4
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = FORMS[form](*leaves, tree.index, 1.0)
    want = oracle(tree, *(t.double() for t in leaves), 1.0)
    assert relative_error(out.double(), want) < 1e-3
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize(
    ("query", "key", "value", "said"),
    [
        ((9, 2, 4), (20, 2, 4), (20, 2, 4), "R = 20"),
        ((20, 2, 4), (20, 2, 5), (20, 2, 4), "share K"),
        ((20, 3, 4), (20, 2, 4), (20, 2, 4), "multiple"),
    ],
)
def test_wrong_shapes_are_refused_in_a_sentence(query, key, value, said):
    tree = small_tree("nested forks", padding=0)
    with pytest.raises(InputError, match=said):
        tree_attention(torch.zeros(query), torch.zeros(key), torch.zeros(value), index=tree.index)
