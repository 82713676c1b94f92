"""Weighted router statistics against the same sums over every token occurrence."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.errors import InputError
from harts.ops.router import (
    RouterStatistics,
    load_balancing_loss,
    router_statistics,
    updated_expert_bias,
    z_loss,
)

from .small_trees import TREES, SmallTree, poisoned, relative_error, small_tree

EXPERTS, TOP_K = 5, 2


def inputs(tree: SmallTree, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits with NaN padding, and the experts selected; -1 at padding."""
    torch.manual_seed(4)
    logits = torch.randn(tree.index.rows, EXPERTS, dtype=dtype)
    selected = logits.topk(TOP_K).indices
    selected[tree.index.compact_rows :] = -1
    return poisoned(logits, tree.index.compact_rows), selected


def oracle(tree: SmallTree, logits: Tensor, selected: Tensor, score: str) -> dict[str, Tensor]:
    """One token occurrence at a time, trajectory by trajectory."""
    mass, z_sum, tokens = torch.zeros(EXPERTS).double(), torch.zeros(()).double(), 0
    counts = torch.zeros(EXPERTS, dtype=torch.float64)
    for path in tree.paths:
        for row in path:
            s = logits[row].softmax(0) if score == "softmax" else logits[row].sigmoid()
            mass = mass + s / s.sum()
            z_sum = z_sum + logits[row].exp().sum().log() ** 2
            counts[selected[row]] += 1
            tokens += 1
    return {"mass": mass, "z_sum": z_sum, "counts": counts, "tokens": torch.tensor(tokens).double()}


def losses(s: RouterStatistics) -> Tensor:
    return 0.3 * z_loss(s) + 0.7 * load_balancing_loss(s, TOP_K)


def losses_by_hand(s: dict[str, Tensor]) -> Tensor:
    share = s["counts"] / (s["tokens"] * TOP_K)
    balance = EXPERTS * sum(share[e] * s["mass"][e] / s["tokens"] for e in range(EXPERTS))
    return 0.3 * s["z_sum"] / s["tokens"] + 0.7 * balance


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_statistics_losses_and_gradient_equal_one_token_occurrence_at_a_time(name, score):
    tree = small_tree(name)
    logits, selected = inputs(tree)
    got = router_statistics(logits, selected, tree.index.multiplicity, score)
    want = oracle(tree, logits, selected, score)
    for field in ("mass", "z_sum", "tokens"):
        assert getattr(got, field).dtype == torch.float64
        assert relative_error(getattr(got, field), want[field]) < 1e-12
    assert torch.equal(got.counts, want["counts"])
    assert not got.counts.requires_grad
    assert relative_error(losses(got), losses_by_hand(want)) < 1e-12
    (mine,) = torch.autograd.grad(losses(got), logits)
    (theirs,) = torch.autograd.grad(losses_by_hand(want), logits)
    assert relative_error(mine, theirs) < 1e-12


def test_multiplicity_ignored_is_caught():
    tree = small_tree("nested forks")
    logits, selected = inputs(tree)
    want = losses_by_hand(oracle(tree, logits, selected, "softmax"))
    flat = router_statistics(logits, selected, tree.index.multiplicity.clamp(max=1))
    assert relative_error(losses(flat), want) > 1e-3


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_padding_counts_in_no_auxiliary_loss_and_for_no_expert(poison, score):
    tree = small_tree("fan-out in a short trunk", padding=4)
    rows = tree.index.compact_rows
    logits, selected = inputs(tree)
    logits = logits.detach()
    logits[rows:] = poison
    logits.requires_grad_()
    got = router_statistics(logits, selected, tree.index.multiplicity, score)
    bare = router_statistics(logits[:rows], selected[:rows], tree.index.multiplicity[:rows], score)
    for field in ("mass", "counts", "z_sum", "tokens"):
        assert relative_error(getattr(got, field), getattr(bare, field)) < 1e-14
    (grad,) = torch.autograd.grad(losses(got), logits)
    assert grad.isfinite().all()
    assert (grad[rows:] == 0).all()


def test_statistics_of_two_halves_add_up():
    tree = small_tree("nested forks")
    logits, selected = inputs(tree)
    q = tree.index.multiplicity
    whole = router_statistics(logits, selected, q)
    halves = router_statistics(logits[:9], selected[:9], q[:9]) + router_statistics(
        logits[9:], selected[9:], q[9:]
    )
    for field in ("mass", "counts", "z_sum", "tokens"):
        assert relative_error(getattr(halves, field), getattr(whole, field)) < 1e-14


def test_only_padding_gives_zero_losses():
    none = torch.zeros(3, dtype=torch.int64)
    logits = torch.full((3, EXPERTS), torch.nan, requires_grad=True)
    stats = router_statistics(logits, torch.full((3, TOP_K), -1), none)
    assert losses(stats).item() == 0
    assert (torch.autograd.grad(losses(stats), logits)[0] == 0).all()


def test_uniform_router_has_balancing_loss_one():
    selected = torch.stack([torch.arange(5), (torch.arange(5) + 1) % 5], 1)
    stats = router_statistics(torch.zeros(5, EXPERTS), selected, torch.full((5,), 3))
    assert load_balancing_loss(stats, TOP_K).item() == pytest.approx(1.0)


def test_expert_bias_moves_by_the_rate_towards_experts_in_need():
    bias = torch.tensor([0.5, 0.0, -0.5])
    counts = torch.tensor([9.0, 4.0, 5.0], dtype=torch.float64)
    assert updated_expert_bias(bias, counts, 0.1).tolist() == pytest.approx([0.4, 0.1, -0.4])
    level = updated_expert_bias(bias, torch.full((3,), 6.0), 0.1)
    assert torch.equal(level, bias)
    # Counts without multiplicity would move the bias the other way.
    tree = small_tree("fan-out in a short trunk", padding=0)
    selected = torch.ones(tree.index.rows, 1, dtype=torch.int64)
    selected[:3] = 0
    logits = torch.zeros(tree.index.rows, 2, dtype=torch.float64)
    weighted = router_statistics(logits, selected, tree.index.multiplicity).counts
    flat = router_statistics(logits, selected, tree.index.multiplicity.clamp(max=1)).counts
    zero = torch.zeros(2)
    assert updated_expert_bias(zero, weighted, 1.0).tolist() == [-1.0, 1.0]
    assert updated_expert_bias(zero, flat, 1.0).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradcheck(score):
    tree = small_tree("nested forks", padding=0)
    logits, selected = inputs(tree)
    assert torch.autograd.gradcheck(
        lambda x: losses(router_statistics(x, selected, tree.index.multiplicity, score)), logits
    )


def test_checkpoint_recomputes_the_same_gradient():
    tree = small_tree("nested forks")
    logits, selected = inputs(tree)

    def run(x: Tensor) -> Tensor:
        return losses(router_statistics(x, selected, tree.index.multiplicity, "sigmoid"))

    (plain,) = torch.autograd.grad(run(logits), logits)
    (again,) = torch.autograd.grad(checkpoint(run, logits, use_reentrant=False), logits)
    assert torch.equal(plain, again)


def test_bfloat16_logits_are_summed_in_float32():
    tree = small_tree("nested forks")
    logits, selected = inputs(tree, torch.bfloat16)
    got = router_statistics(logits, selected, tree.index.multiplicity)
    want = oracle(tree, logits.double(), selected, "softmax")
    assert got.mass.dtype == got.z_sum.dtype == losses(got).dtype == torch.float32
    assert relative_error(got.mass.double(), want["mass"]) < 1e-6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"selected": torch.full((3, 2), EXPERTS)}, r"must lie in \[0, 5\); got 5"),
        ({"selected": torch.zeros(2, 2, dtype=torch.int64)}, r"selected \[R, k\]"),
        ({"multiplicity": torch.ones(3)}, "integers"),
        ({"score": "tanh"}, "'tanh'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(change, said):
    arguments = {
        "logits": torch.zeros(3, EXPERTS),
        "selected": torch.zeros(3, 2, dtype=torch.int64),
        "multiplicity": torch.ones(3, dtype=torch.int64),
        "score": "softmax",
    }
    with pytest.raises(InputError, match=said):
        router_statistics(**{**arguments, **change})
