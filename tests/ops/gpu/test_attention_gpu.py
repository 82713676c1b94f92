"""Tree attention in packed calls against float64 on the CPU."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.ops.attention import choose_backend, tree_attention
from harts.ops.attention.cascade import attend_tree_cascade
from harts.ops.attention.flash4 import FLASH4, HEAD_DIMS, why_not_installed
from harts.ops.attention.mask import MIN_DIM, attend_tree_mask
from harts.ops.attention.pieces import Ancestors
from harts.ops.attention.varlen import attend_tree_varlen
from harts.ops.tree_index import TreeIndex
from tests.forests import batch_of, lay_out, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

HEADS = {
    "MLA": (4, 4, 192, 128),
    "GQA 128": (8, 2, 128, 128),
    "MHA 64": (2, 2, 64, 64),
    "MHA 256": (2, 2, 256, 256),
    "odd dims": (2, 1, 20, 12),
    "one head": (1, 1, 64, 64),
}


FORMS = {
    "varlen": attend_tree_varlen,
    "flash-attn-4": partial(attend_tree_varlen, kernel=FLASH4),
    "mask": attend_tree_mask,
}


@pytest.fixture(params=FORMS)
def form(request):
    if request.param == "flash-attn-4" and why_not_installed() is not None:
        pytest.skip(why_not_installed())
    return request.param


def skip_untested_dims(form, heads):
    if form == "flash-attn-4" and HEADS[heads][2:] not in HEAD_DIMS:
        pytest.skip("flash-attn-4 is not offered for these head dims")


def on_gpu(index: TreeIndex) -> TreeIndex:
    fields = ("sequence_offsets", "ancestor_rows", "ancestor_offsets")
    return replace(index, **{name: getattr(index, name).cuda() for name in fields})


def relative(got: Tensor, want: Tensor) -> float:
    return float(
        (got.detach().double().cpu() - want.detach()).norm() / want.detach().norm().clamp(min=1e-3)
    )


def inputs(index, heads, dtype=torch.bfloat16):
    torch.manual_seed(0)
    h, kv, k, v = HEADS[heads]
    leaves = [torch.randn(index.rows, *shape).to(dtype) for shape in ((h, k), (kv, k), (kv, v))]
    grad = torch.randn(index.rows, h, v).to(dtype)
    for t in (*leaves, grad):
        t[index.compact_rows :] = torch.nan
    return leaves, grad


def exact(index, leaves, grad):
    leaves = [t.double().nan_to_num(0.0).requires_grad_() for t in leaves]
    out = attend_tree_cascade(*leaves, index, leaves[0].shape[2] ** -0.5)
    return out, *torch.autograd.grad(out, leaves, grad.double().nan_to_num(0.0))


def errors(index, leaves, grad, want, form, *, by_head=False, **options):
    mine = [t.cuda() for t in leaves]
    if by_head:  # as models give them: whole heads, one after the other
        mine = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in mine]
    mine = [t.requires_grad_() for t in mine]
    out = FORMS[form](*mine, on_gpu(index), leaves[0].shape[2] ** -0.5, **options)
    got = (out, *torch.autograd.grad(out, mine, grad.cuda()))
    rows = index.compact_rows
    assert all((t[rows:] == 0).all() for t in got)
    return [relative(a, b) for a, b in zip(got, want, strict=True)]


def some_tree(seed=0, trajectories=30, longest=300):
    batch = random_batch(
        np.random.default_rng(seed), trajectories=trajectories, max_length=longest, chunk_size=64
    )
    return TreeIndex.from_layout(lay_out(batch, chunk_size=64, row_multiple=64)[2])


@pytest.fixture(params=["by cost", "all views", "all shared"])
def mode(request, monkeypatch):
    if request.param != "by cost":
        shared = request.param == "all shared"
        monkeypatch.setattr(
            Ancestors,
            "shared_runs",
            lambda a, *_: (np.bincount(a.run, minlength=len(a.run_starts)) > 0) & shared,
        )


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("workspace_bytes", [2**20, 2**30])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("packed", ["varlen", "flash-attn-4"])
def test_packed_calls_against_float64(heads, workspace_bytes, packed):
    skip_untested_dims(packed, heads)
    if packed == "flash-attn-4" and why_not_installed() is not None:
        pytest.skip(why_not_installed())
    index = some_tree()
    leaves, grad = inputs(index, heads)
    want = exact(index, leaves, grad)
    got = errors(index, leaves, grad, want, packed, workspace_bytes=workspace_bytes)
    assert max(got) < 4e-3, got


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("heads", ["MLA", "GQA 128", "MHA 64"])
def test_rows_of_whole_heads_are_read_in_place(heads, form):
    index = some_tree()
    leaves, grad = inputs(index, heads)
    want = exact(index, leaves, grad)
    got = errors(index, leaves, grad, want, form, by_head=True)
    assert max(got) < 4e-3, got


@pytest.mark.parametrize("heads", HEADS)
def test_the_mask_against_float64(heads):
    if min(HEADS[heads][2:]) < MIN_DIM:
        pytest.skip("the mask is not offered for these head dims")
    for seed in range(3):
        index = some_tree(seed)
        leaves, grad = inputs(index, heads)
        want = exact(index, leaves, grad)
        got = errors(index, leaves, grad, want, "mask")
        assert max(got) < 4e-3, got


@pytest.mark.parametrize("seed", range(3))
def test_errors_are_like_those_of_each_trajectory_alone(seed, form):
    index = some_tree(seed)
    leaves, grad = inputs(index, "MLA")
    want = exact(index, leaves, grad)
    ours = errors(index, leaves, grad, want, form)
    # The plain backend: every sequence as its own call on its ancestors and own rows.
    theirs = errors(index, leaves, grad, want, "varlen", workspace_bytes=1)
    for a, b in zip(ours, theirs, strict=True):
        assert a <= 1.2 * b


@pytest.mark.parametrize(
    "lists", [[[1]], [[1], [1, 2]], [[1] * 700], [[1, 2, i] for i in range(9)]]
)
def test_trees_at_the_edge_of_sizes(lists, form):
    index = TreeIndex.from_layout(lay_out(batch_of(lists))[2])
    leaves, grad = inputs(index, "MHA 64")
    # Few elements: one rounding weighs more than on average.
    assert max(errors(index, leaves, grad, exact(index, leaves, grad), form)) < 1e-2


def test_many_short_branches_on_a_long_trunk(form):
    paths = [[0] * 3000 + [1 + i] * 5 for i in range(300)]
    index = TreeIndex.from_layout(lay_out(batch_of(paths), chunk_size=64)[2])
    leaves, grad = inputs(index, "MHA 64")
    assert max(errors(index, leaves, grad, exact(index, leaves, grad), form)) < 4.5e-3


@pytest.mark.parametrize("heads", ["GQA 128", "MLA"])
def test_two_runs_are_bit_identical_in_the_deterministic_mode(form, heads):
    index = some_tree()
    leaves, grad = inputs(index, heads)
    mine = [t.cuda().requires_grad_() for t in leaves]
    there = on_gpu(index)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            out = tree_attention(*mine, index=there, backend=form)
            runs.append((out, *torch.autograd.grad(out, mine, grad.cuda())))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_float16_is_supported(form):
    index = some_tree()
    leaves, grad = inputs(index, "MHA 64", torch.float16)
    assert choose_backend(*(t.cuda() for t in leaves), index=index) in FORMS
    assert max(errors(index, leaves, grad, exact(index, leaves, grad), form)) < 6e-4


def test_float32_runs_the_plain_form():
    index = some_tree(trajectories=5, longest=50)
    leaves, grad = inputs(index, "MHA 64", torch.float32)
    mine = [t.cuda() for t in leaves]
    assert choose_backend(*mine, index=index) == "reference"
    got = tree_attention(*mine, index=on_gpu(index))
    assert relative(got, exact(index, leaves, grad)[0]) < 1e-5
