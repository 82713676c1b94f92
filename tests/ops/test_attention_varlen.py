"""Tree attention in packed calls, on the CPU in float64, and the choice of form."""

import dataclasses
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from harts.errors import UnsupportedError
from harts.ops.attention import choose_backend, dispatch, flash4, pieces, tree_attention, varlen
from harts.ops.attention.flash4 import FLASH4
from harts.ops.attention.mask import _block_mask, attend_tree_mask, sees, tree_mask
from harts.ops.attention.packed import TORCH
from harts.ops.attention.pieces import TILE, Ancestors, plan_attention
from harts.ops.attention.varlen import attend_tree_varlen, estimate_varlen
from harts.ops.kept_outputs import keep_outputs
from harts.ops.tree_index import TreeIndex
from tests.forests import lay_out, random_batch

from .gpu.small_cases import branching_index
from .small_trees import TREES, relative_error, small_tree, with_pack_neighbours
from .test_attention import HEADS, cotangent, inputs, long_tree, oracle

MODES = {
    "chosen by cost": Ancestors.shared_runs,
    "all views": lambda a, *_: np.zeros(len(a.run_starts), bool),
    "all shared": lambda a, *_: np.bincount(a.run, minlength=len(a.run_starts)) > 0,
    "mixed": lambda a, *_: (
        (np.bincount(a.run, minlength=len(a.run_starts)) > 0) & (np.arange(len(a.run_starts)) % 2)
    ).astype(bool),
}


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    monkeypatch.setattr(Ancestors, "shared_runs", MODES[request.param])


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("kernel", [TORCH, FLASH4], ids=lambda k: k.name)
@pytest.mark.parametrize("workspace", [1, 10**9])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", TREES)
def test_rows_and_every_gradient_equal_one_trajectory_at_a_time(name, heads, workspace, kernel):
    tree = small_tree(name)
    leaves = inputs(tree, heads)
    out = attend_tree_varlen(*leaves, tree.index, 0.7, workspace, kernel)
    want = oracle(tree, *leaves, 0.7)
    assert relative_error(out, want) < 1e-12
    g = cotangent(tree, out)
    rows = tree.index.compact_rows
    got = torch.autograd.grad(out, leaves, g)
    assert (out[rows:] == 0).all()
    for a, b in zip(got, torch.autograd.grad(want, leaves, g), strict=True):
        assert relative_error(a[:rows], b[:rows]) < 1e-12
        assert (a[rows:] == 0).all()


def test_recomputation_does_not_attend_again():
    tree = small_tree("nested forks")
    leaves = inputs(tree, next(iter(HEADS)))
    calls = []

    def counted(*arguments):
        calls.append(1)
        return TORCH.attend(*arguments)

    kernel = dataclasses.replace(TORCH, attend=counted)

    def region(*rows):
        return attend_tree_varlen(*rows, tree.index, 0.7, 10**9, kernel).sin()

    out = region(*leaves)
    alone = len(calls)
    g = cotangent(tree, out)
    want = torch.autograd.grad(out, leaves, g)
    again = checkpoint(region, *leaves, use_reentrant=False, context_fn=keep_outputs)
    assert len(calls) == 2 * alone
    for a, b in zip(torch.autograd.grad(again, leaves, g), want, strict=True):
        assert torch.equal(a, b)
    assert len(calls) == 2 * alone


def test_rows_are_read_where_they_lie_only_if_kernels_can():
    by_head = torch.randn(2, 40, 8).transpose(0, 1)
    at = slice(3, 9)
    assert varlen._rows(by_head, at, 8).data_ptr() == by_head[at].data_ptr()
    flat = torch.randn(40 * 2 * 8 + 4)
    for rows in (
        torch.randn(40, 8, 2).transpose(1, 2),  # columns apart
        torch.randn(8).expand(40, 2, 8),  # rows and heads at one place
        flat[4:].view(40, 2, 8),  # not where 16 bytes begin
        torch.randn(40, 2, 12)[..., :8],  # nor do heads
    ):
        read = varlen._rows(rows, at, 8)
        assert read.is_contiguous()
        assert torch.equal(read, rows[at])
        assert read.data_ptr() != rows[at].data_ptr()


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
    plan = plan_attention(index, 1, 1, budget, budget, TORCH.speeds)
    for call in plan.views:
        assert len(call.packed.key_rows) <= budget or len(call.packed.cu_keys) == 2
    covered = [r for c in plan.views for r in range(c.own.start, c.own.stop)]
    assert covered == list(range(index.compact_rows))


@pytest.mark.parametrize("lengths", [[3000] + [8] * 400, [8] * 400, [3000] * 3])
def test_a_call_launches_few_empty_tiles(lengths, monkeypatch):
    monkeypatch.setattr(pieces, "_FEW_TILES", 100)
    index = forest(lengths)
    plan = plan_attention(index, 1, 1, 10**9, 10**9, TORCH.speeds)
    assert len(plan.views) == (2 if len(set(lengths)) > 1 else 1)


def forest(lengths):
    """Sequences that share nothing."""
    index = comb(0, len(lengths), 1)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return replace(
        index,
        rows=int(offsets[-1]),
        compact_rows=int(offsets[-1]),
        sequence_offsets=offsets,
        ancestor_offsets=torch.zeros_like(offsets),
    )


def comb(trunk, branches, length):
    """Branches that leave one trunk at its end."""
    index = small_tree("nested forks").index
    total = trunk + branches * length
    ends = trunk + length * np.arange(branches + 1)
    return replace(
        index,
        rows=total,
        compact_rows=total,
        sequence_offsets=torch.tensor([0, *ends]),
        ancestor_rows=torch.arange(trunk).repeat(branches),
        ancestor_offsets=torch.tensor([0, *(trunk * np.arange(branches + 1))]),
    )


def test_short_branches_share_a_long_trunk_and_long_ones_copy_it():
    for speeds in (TORCH.speeds, FLASH4.speeds):
        assert plan_attention(comb(4096, 64, 16), 16, 16, 10**9, 10**9, speeds).shared
        assert not plan_attention(comb(64, 4, 4096), 16, 16, 10**9, 10**9, speeds).shared


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
    ("backend", "said"),
    [
        ("varlen", "not on a GPU"),
        ("flash-attn-4", "not on a GPU"),
        ("mask", "not on a GPU"),
        ("fastest", "must be one of"),
    ],
)
def test_a_form_that_cannot_run_is_refused_in_a_sentence(backend, said):
    tree = small_tree("nested forks")
    leaves = inputs(tree, "MHA")
    with pytest.raises(UnsupportedError, match=said):
        choose_backend(*leaves, index=tree.index, backend=backend)


@pytest.mark.parametrize("name", TREES)
def test_the_mask_computes_rows_and_every_gradient(name):
    tree = small_tree(name)
    for heads in HEADS:
        leaves = inputs(tree, heads)
        out = attend_tree_mask(*leaves, tree.index, 0.7)
        want = oracle(tree, *leaves, 0.7)
        assert relative_error(out, want) < 1e-12
        g = cotangent(tree, out)
        rows = tree.index.compact_rows
        got = torch.autograd.grad(out, leaves, g)
        assert (out[rows:] == 0).all()
        for a, b in zip(got, torch.autograd.grad(want, leaves, g), strict=True):
            assert relative_error(a[:rows], b[:rows]) < 1e-12
            assert (a[rows:] == 0).all()


def dense(index):
    """[C, C] which rows see which, a sequence at a time."""
    seen = torch.zeros(index.compact_rows, index.compact_rows, dtype=torch.bool)
    own, above = index.sequence_offsets.tolist(), index.ancestor_offsets.tolist()
    for i in range(len(own) - 1):
        for row in range(own[i], own[i + 1]):
            seen[row, index.ancestor_rows[above[i] : above[i + 1]]] = True
            seen[row, own[i] : row + 1] = True
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_the_mask_are_those_of_the_dense_mask(seed):
    batch = random_batch(
        np.random.default_rng(seed), trajectories=12, max_length=200, chunk_size=64
    )
    index = TreeIndex.from_layout(lay_out(batch, chunk_size=64, row_multiple=64)[2])
    want = dense(index)
    mask = tree_mask(index)
    assert torch.equal(sees(mask.enter[:, None], mask.leave, mask.enter), want)
    blocks = -(-len(want) // TILE)
    missing = blocks * TILE - len(want)
    tiles = torch.nn.functional.pad(want, (0, missing, 0, missing))
    tiles = tiles.view(blocks, TILE, blocks, TILE)
    assert torch.equal(mask.full, tiles.all(3).all(1))
    assert not (mask.partial & mask.full).any()
    assert (mask.partial | mask.full)[tiles.any(3).any(1)].all()
    assert sum(mask.met) >= int(tiles.any(3).any(1).sum())


def test_block_lists_name_each_pair_of_blocks_once():
    index = comb(300, 3, 200)
    mask, made = tree_mask(index), _block_mask(index)
    for pairs, counts, order in (
        (mask.partial, made.kv_num_blocks, made.kv_indices),
        (mask.full, made.full_kv_num_blocks, made.full_kv_indices),
    ):
        for block, (count, listed) in enumerate(
            zip(counts[0, 0].tolist(), order[0, 0].tolist(), strict=True)
        ):
            assert sorted(listed[:count]) == pairs[block].nonzero()[:, 0].tolist()


def choice(index, monkeypatch, *, flash4=None, flash=None):
    """What would run on a GPU where the two FlashAttentions cannot for these reasons."""
    monkeypatch.setattr(dispatch, "_why_not_flash", lambda *_: flash)
    monkeypatch.setattr(dispatch, "_why_not_flash4", lambda *_: flash4)
    x = torch.empty(index.rows, 16, 128, dtype=torch.bfloat16, device="meta")
    return choose_backend(x, x, x, index=index)


def test_the_cheapest_form_by_estimate_runs(monkeypatch):
    long_branches = comb(64, 4, 4096)
    assert choice(long_branches, monkeypatch) == "flash-attn-4"
    assert choice(long_branches, monkeypatch, flash4="not installed") == "varlen"
    long_trunk = comb(4096, 64, 64)
    assert choice(long_trunk, monkeypatch) == "flash-attn-4"
    assert choice(long_trunk, monkeypatch, flash4="not installed") == "mask"
    assert choice(long_branches, monkeypatch, flash4="none", flash="none") == "reference"


def test_a_path_beyond_the_workspace_runs_under_the_mask(monkeypatch):
    index = comb(16, 2, 4096)
    assert choice(index, monkeypatch, flash4="not installed") == "varlen"
    monkeypatch.setattr(dispatch, "WORKSPACE_BYTES", 2**20)
    assert choice(index, monkeypatch, flash4="not installed") == "mask"


def test_the_deterministic_mode_has_estimates_of_its_own():
    index = comb(64, 4, 4096)
    usual = estimate_varlen(index, 16, 16, TORCH)
    torch.use_deterministic_algorithms(True)
    try:
        assert estimate_varlen(index, 16, 16, TORCH) > 1.5 * usual
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_version_of_flash_attn_4_is_refused(monkeypatch):
    flash4.why_not_installed.cache_clear()
    monkeypatch.setattr(flash4, "version", lambda _: "4.0.0")
    assert "must be 4.0.0b" in flash4.why_not_installed()
    flash4.why_not_installed.cache_clear()


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_memory_checker_s_tree_reaches_every_row_kernel(kv_heads):
    plan = plan_attention(branching_index("cpu"), 4, kv_heads, 10**6, 10**6, TORCH.speeds)
    assert plan.views
    assert plan.shared, "nothing is merged"
    assert plan.slots, "no sum is carried from one call to the next"
