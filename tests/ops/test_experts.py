"""Grouped experts against the plain sum over each row's experts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.ops import experts
from harts.ops.experts import grouped_product, routed_experts
from harts.ops.kept_outputs import keep_outputs

D, INNER, E = 12, 5, 6


def one_by_one(
    rows: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    out = []
    for row, chosen, shares in zip(rows, experts, weights, strict=True):
        total = torch.zeros_like(row)
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            total = total + share * (down[expert] @ (F.silu(gate) * up))
        out.append(total)
    return torch.stack(out)


def drawn(rows: int, k: int, *, only: int | None = None) -> tuple[Tensor, ...]:
    torch.manual_seed(rows + k)
    scores = torch.rand(rows, E)
    experts = scores.topk(k).indices if only is None else torch.full((rows, 1), only)
    real = {"dtype": torch.float64, "requires_grad": True}
    return (
        torch.randn(rows, D, **real),
        experts,
        torch.rand(rows, experts.shape[1], **real),
        torch.randn(E, 2 * INNER, D, **real),
        torch.randn(E, D, INNER, **real),
    )


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("rows", "k", "only"), [(1, 1, None), (7, 2, None), (40, 6, None), (9, 1, 3)]
)
def test_experts_equal_the_plain_sum_with_every_gradient(
    rows: int, k: int, only: int | None, backend: str | None
) -> None:
    arguments = drawn(rows, k, only=only)
    wanted = [x for x in arguments if x.requires_grad]
    weight = torch.randn(rows, D, dtype=torch.float64)
    truth = one_by_one(*arguments)
    expected = torch.autograd.grad((truth * weight).sum(), wanted)
    output = routed_experts(*arguments, backend)
    found = torch.autograd.grad((output * weight).sum(), wanted)
    torch.testing.assert_close(output, truth, rtol=0, atol=1e-12)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_recomputation_leaves_out_the_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = drawn(40, 6)
    leaves = [x for x in arguments if x.requires_grad]
    products: list[int] = []

    def counted(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        products.append(weight.shape[1])
        return grouped_product(x, weight, ends)

    monkeypatch.setattr(experts, "grouped_product", counted)

    def region(rows: Tensor) -> Tensor:
        return routed_experts(rows, *arguments[1:]).sin()

    want = torch.autograd.grad(region(arguments[0]).sum(), leaves)
    products.clear()
    out = checkpoint(region, arguments[0], use_reentrant=False, context_fn=keep_outputs)
    found = torch.autograd.grad(out.sum(), leaves)
    assert products == [2 * INNER, D, 2 * INNER]
    for ours, theirs in zip(found, want, strict=True):
        assert torch.equal(ours, theirs)


def test_bfloat16_is_as_close_to_float64_as_the_plain_sum_is() -> None:
    arguments = drawn(200, 3)
    narrow = [x.bfloat16() if x.is_floating_point() else x for x in arguments]
    truth = one_by_one(*(x.double() if x.is_floating_point() else x for x in narrow))
    ours, plain = (f(*narrow).double() - truth for f in (routed_experts, one_by_one))
    assert routed_experts(*narrow).dtype == torch.bfloat16
    assert ours.norm() <= 1.2 * plain.norm()


def test_an_expert_without_rows_takes_none_of_its_neighbours() -> None:
    x, weight = torch.randn(4, 3), torch.randn(3, 2, 3)
    found = grouped_product(x, weight, torch.tensor([3, 3, 4], dtype=torch.int32))
    torch.testing.assert_close(found, torch.cat([x[:3] @ weight[0].T, x[3:] @ weight[2].T]))
