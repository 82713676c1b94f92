"""Tree attention in packed calls, on the CPU in float64, and the choice of form."""

import logging

import numpy as np
import pytest
import torch

from harts.errors import UnsupportedError
from harts.ops.attention import choose_backend, dispatch, tree_attention
from harts.ops.attention.pieces import _Ancestors, plan_attention
from harts.ops.attention.varlen import attend_tree_varlen

from .small_trees import TREES, relative_error, small_tree, with_pack_neighbours
from .test_attention import HEADS, cotangent, inputs, long_tree, oracle

MODES = {
    "chosen by cost": _Ancestors.shared_runs,
    "all views": lambda a, *_: np.zeros(len(a.run_starts), bool),
    "all shared": lambda a, *_: np.bincount(a.run, minlength=len(a.run_starts)) > 0,
    "mixed": lambda a, *_: (
        (np.bincount(a.run, minlength=len(a.run_starts)) > 0) & (np.arange(len(a.run_starts)) % 2)
    ).astype(bool),
}


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    monkeypatch.setattr(_Ancestors, "shared_runs", MODES[request.param])


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("workspace", [1, 10**9])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", TREES)
def test_rows_and_every_gradient_equal_one_trajectory_at_a_time(name, heads, workspace):
    tree = small_tree(name)
    leaves = inputs(tree, heads)
    out = attend_tree_varlen(*leaves, tree.index, 0.7, workspace)
    want = oracle(tree, *leaves, 0.7)
    assert relative_error(out, want) < 1e-12
    g = cotangent(tree, out)
    rows = tree.index.compact_rows
    got = torch.autograd.grad(out, leaves, g)
    assert (out[rows:] == 0).all()
    for a, b in zip(got, torch.autograd.grad(want, leaves, g), strict=True):
        assert relative_error(a[:rows], b[:rows]) < 1e-12
        assert (a[rows:] == 0).all()


@pytest.mark.usefixtures("mode")
def test_keys_of_a_packed_neighbour_are_caught():
    tree = small_tree("nested forks")
    leaves = inputs(tree, "MHA")
    want = oracle(tree, *leaves, 0.5)
    got = attend_tree_varlen(*leaves, with_pack_neighbours(tree), 0.5)
    assert relative_error(got, want) > 1e-2


@pytest.mark.parametrize("budget", [1, 700, 1700, 10**6])
def test_calls_stay_within_the_budget_or_hold_one_sequence(budget):
    index = long_tree().index
    plan = plan_attention(index, 1, 1, budget, budget)
    for call in plan.views:
        assert len(call.packed.key_rows) <= budget or len(call.packed.cu_keys) == 2
    covered = [r for c in plan.views for r in range(c.own.start, c.own.stop)]
    assert covered == list(range(index.compact_rows))


def comb(trunk, branches, length):
    """Branches that leave one trunk at its end."""
    index = small_tree("nested forks").index
    total = trunk + branches * length
    ends = trunk + length * np.arange(branches + 1)
    return type(index)(
        **{
            **{n: getattr(index, n) for n in index.__slots__},
            "rows": total,
            "compact_rows": total,
            "sequence_offsets": torch.tensor([0, *ends]),
            "ancestor_rows": torch.arange(trunk).repeat(branches),
            "ancestor_offsets": torch.tensor([0, *(trunk * np.arange(branches + 1))]),
        }
    )


def test_short_branches_share_a_long_trunk_and_long_ones_copy_it():
    assert plan_attention(comb(4096, 64, 16), 16, 16, 10**9, 10**9).shared
    assert not plan_attention(comb(64, 4, 4096), 16, 16, 10**9, 10**9).shared


def test_the_cpu_runs_the_cascade_and_says_so_once(caplog):
    dispatch._log_once.cache_clear()
    tree = small_tree("nested forks")
    leaves = inputs(tree, "MHA")
    with caplog.at_level(logging.INFO, logger="harts.ops.attention"):
        tree_attention(*leaves, index=tree.index)
        tree_attention(*leaves, index=tree.index)
    (record,) = caplog.records
    assert "cascade" in record.message
    assert "not on a GPU" in record.message


def test_a_form_can_be_asked_for():
    tree = small_tree("nested forks")
    leaves = inputs(tree, "MHA")
    got = tree_attention(*leaves, index=tree.index, scale=0.5, backend="reference")
    assert relative_error(got, oracle(tree, *leaves, 0.5)) < 1e-12


@pytest.mark.parametrize(
    ("backend", "said"), [("varlen", "not on a GPU"), ("fastest", "must be one of")]
)
def test_a_form_that_cannot_run_is_refused_in_a_sentence(backend, said):
    x = torch.zeros(2, 1, 8)
    with pytest.raises(UnsupportedError, match=said):
        choose_backend(x, x, backend=backend)
