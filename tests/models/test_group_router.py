"""The compiled choice of experts against the library's router, ties and all."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import BailingHybridConfig

from harts.models.bailing_hybrid import TreeBailingHybridTopkRouter

EXPERTS, WIDTH = 24, 10


def router(
    groups: int, kept: int, k: int, *, normalised: bool = True
) -> TreeBailingHybridTopkRouter:
    config = BailingHybridConfig(
        hidden_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_token=k,
        num_expert_group=groups,
        topk_group=kept,
        norm_topk_prob=normalised,
    )
    torch.manual_seed(groups + k)
    made = TreeBailingHybridTopkRouter(config)
    with torch.no_grad():
        made.weight.normal_()
        made.e_score_correction_bias.normal_(std=0.1)
    return made


def in_order(weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The library does not sort what it chooses."""
    chosen, order = chosen.sort(-1)
    return weights.gather(1, order), chosen


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("groups", "kept", "k"), [(1, 1, 5), (4, 2, 3), (8, 4, 8), (6, 6, 24)])
def test_choices_weights_and_gradients_are_the_library_s(
    groups: int, kept: int, k: int, normalised: bool
) -> None:
    plain = router(groups, kept, k, normalised=normalised)
    fused = copy.deepcopy(plain)
    fused.backend = "aot_eager"
    hidden = torch.randn(300, WIDTH)
    results = []
    for made in (plain, fused):
        logits, weights, chosen = made(hidden)
        weights, chosen = in_order(weights, chosen)
        loss = (weights * torch.arange(k)).sum() + logits.square().sum()
        results.append((logits, weights, chosen, *torch.autograd.grad(loss, made.weight)))
    (logits, weights, chosen, grad), (fused_logits, fused_weights, fused_chosen, fused_grad) = (
        results
    )
    assert torch.equal(fused_chosen, chosen)
    assert torch.equal(fused_logits, logits)
    torch.testing.assert_close(fused_weights, weights, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(fused_grad, grad, rtol=1e-5, atol=1e-4)


def test_ties_choose_different_experts_and_the_first_ones() -> None:
    made = router(4, 2, 3)
    with torch.no_grad():
        made.weight.zero_()
        made.e_score_correction_bias.zero_()
    made.backend = "aot_eager"
    _, weights, chosen = made(torch.randn(5, WIDTH))
    assert chosen.tolist() == [[0, 1, 2]] * 5
    assert (weights == weights[0, 0]).all()
