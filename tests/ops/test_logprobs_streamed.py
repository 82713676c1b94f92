"""Log-probs in tiles and by shards of the vocabulary, on the CPU in float64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from harts.ops.logprobs import shards
from harts.ops.logprobs.records import Projection
from harts.ops.logprobs.shards import (
    active_rows,
    combine_partials,
    vocabulary_gradients,
    vocabulary_partial,
)
from harts.ops.logprobs.streamed import map_logprobs_streamed, why_not_streamed

from .small_trees import TREES, relative_error, small_tree
from .test_logprobs import VOCABULARY, inputs, oracle, targets_of


@pytest.fixture(params=[1, 12, 2**28])
def _tiles(request, monkeypatch):
    """Tiles of one token, of a few, and of the whole vocabulary."""
    monkeypatch.setattr(shards, "_TILE_ELEMENTS", request.param)
    monkeypatch.setattr(shards, "_ALIGNMENT", 1)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("block_rows", [None, 3])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("temperature", "biased"), [(1.0, False), (0.7, True)])
def test_logprobs_and_every_gradient_equal_one_trajectory_at_a_time(
    name, block_rows, entropy, temperature, biased
):
    tree = small_tree(name)
    hidden, weight, bias = leaves = inputs(tree)
    leaves = leaves if biased else leaves[:2]
    bias = bias if biased else None
    rows, targets = targets_of(tree)
    got = map_logprobs_streamed(
        hidden, weight, rows, targets, bias, temperature, block_rows, entropy
    )
    want = oracle(tree, hidden, weight, bias, temperature)
    got, want = (got, want) if entropy else (got[:1], want[:1])
    torch.manual_seed(1)
    # Some positions without a gradient, as a loss mask leaves them.
    g = [torch.randn(len(rows), dtype=torch.float64) * (torch.rand(len(rows)) > 0.3) for _ in got]
    mine, theirs = torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g)
    compact = tree.index.compact_rows
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-12
    assert (mine[0][compact:] == 0).all()
    assert relative_error(mine[0][:compact], theirs[0][:compact]) < 1e-12
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        assert relative_error(a, b) < 1e-12


def test_no_positions_and_no_gradients_give_zero_gradients():
    hidden = torch.randn(2, 4, requires_grad=True)
    weight = torch.randn(VOCABULARY, 4, requires_grad=True)
    for count in (0, 3):
        at = torch.zeros(count, dtype=torch.int64)
        got, _ = map_logprobs_streamed(hidden, weight, at, at, None, 1.0, None, False)
        grads = torch.autograd.grad((got * 0).sum(), (hidden, weight))
        assert got.shape == (count,)
        assert all((g == 0).all() for g in grads)


def test_gradcheck():
    tree = small_tree("fan-out in a short trunk", padding=1)
    hidden, weight, bias = inputs(tree)
    hidden = hidden.detach().nan_to_num(0.5).requires_grad_()
    rows, targets = targets_of(tree)
    assert torch.autograd.gradcheck(
        lambda h, w, b: map_logprobs_streamed(h, w, rows, targets, b, 1.3, 2, True),
        (hidden, weight, bias),
    )


def sharded(cuts: list[int], weight: Tensor, bias: Tensor, scale: float) -> list[Projection]:
    return [Projection(weight[a:b], bias[a:b], scale, a) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("cuts", [[0, VOCABULARY], [0, 4, VOCABULARY], [0, 1, 9, VOCABULARY]])
def test_shards_of_the_vocabulary_combine_to_the_exact_result(cuts):
    tree = small_tree("nested forks")
    hidden, weight, bias = leaves = inputs(tree)
    target_rows, targets = targets_of(tree)
    scale = 1 / 0.7
    want, want_entropy = oracle(tree, hidden, weight, bias, 0.7)
    rows, number = torch.unique(target_rows, return_inverse=True)
    projections = sharded(cuts, weight.detach(), bias.detach(), scale)
    plain = hidden.detach()
    whole = combine_partials(
        [
            vocabulary_partial(plain, p, rows, target_rows, targets, entropy=True, block_rows=2)
            for p in projections
        ]
    )
    partition = whole.log_partition()
    logprobs = whole.target_logits - partition[number]
    assert relative_error(logprobs, want) < 1e-12
    assert relative_error(whole.entropy()[number], want_entropy) < 1e-12

    torch.manual_seed(1)
    g, h = (torch.randn(len(want), dtype=torch.float64) for _ in range(2))
    wanted = torch.autograd.grad((want, want_entropy), leaves, (g, h))
    active = active_rows(
        target_rows, targets, logprobs, g, rows, partition, scale, (whole.entropy(), h)
    )
    parts = [vocabulary_gradients(plain, p, active, block_rows=3) for p in projections]
    summed = torch.zeros_like(plain).index_add_(0, active.rows, sum(p[0] for p in parts))
    compact = tree.index.compact_rows
    assert relative_error(summed[:compact], wanted[0][:compact]) < 1e-12
    assert relative_error(torch.cat([p[1] for p in parts]), wanted[1]) < 1e-12
    assert relative_error(torch.cat([p[2] for p in parts]), wanted[2]) < 1e-12


def test_a_shard_without_the_targets_adds_only_its_partition():
    hidden = torch.ones(1, 2, dtype=torch.float64)
    weight = torch.eye(2, dtype=torch.float64)
    at = torch.zeros(1, dtype=torch.int64)
    part = vocabulary_partial(hidden, Projection(weight, None, 1.0, 5), at, at, at + 3)
    assert part.target_logits.tolist() == [0.0]
    assert part.log_partition().item() == pytest.approx(1 + torch.tensor(2.0).log().item())


def test_the_cpu_runs_the_plain_form():
    assert "not on a GPU" in why_not_streamed(torch.zeros(2, 8), torch.zeros(3, 8))
