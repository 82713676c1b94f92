"""Float32 products in parts against float64, beside PyTorch's own float32 product."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harts.ops import wide_product as module
from harts.ops.wide_product import product_in_parts, wide_product


def drawn(rows: int, width: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, width).bfloat16()
    weight = torch.randn(outputs, width) * torch.logspace(-3, 3, width)
    return hidden, weight, torch.randn(rows, outputs) * torch.logspace(-4, 2, outputs)


def with_gradients(product, hidden: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    out = product(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((f.double() - t).norm() / t.norm()) for f, t in zip(found, truth, strict=True)]


def errors_beside_float32(
    product, hidden: Tensor, weight: Tensor, grad: Tensor
) -> list[tuple[float, float]]:
    """Errors of the output and both gradients, each with that of PyTorch's float32 product."""
    truth = with_gradients(F.linear, hidden.double(), weight.double(), grad)
    plain = with_gradients(lambda x, w: F.linear(x.float(), w), hidden, weight, grad)
    found = with_gradients(product, hidden, weight, grad)
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16, torch.float32]
    return list(zip(errors(found, truth), errors(plain, truth), strict=True))


@pytest.mark.parametrize(("rows", "width", "outputs"), [(9000, 96, 24), (1, 8, 3), (70, 1536, 128)])
def test_parts_are_as_near_to_float64_as_float32_is(rows: int, width: int, outputs: int) -> None:
    for ours, theirs in errors_beside_float32(product_in_parts, *drawn(rows, width, outputs)):
        assert ours < 1.5 * theirs + 1e-7


@pytest.mark.parametrize("part", range(3))
def test_no_part_is_idle(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of the parts the result is worse than float32's."""
    hidden, weight, grad = drawn(70, 1536, 128)
    truth = with_gradients(F.linear, hidden.double(), weight.double(), grad)
    whole = module._split

    def less(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(p) if i == part else p for i, p in enumerate(whole(x)))

    monkeypatch.setattr(module, "_split", less)
    output, *_ = errors(with_gradients(product_in_parts, hidden, weight, grad), truth)
    assert output > 1e-6


def test_a_number_is_the_sum_of_its_parts() -> None:
    x = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    high, middle, low = (p.double() for p in module._split(x))
    assert torch.equal(high + middle + low, x.double())


def test_other_dtypes_and_the_cpu_take_the_plain_product() -> None:
    hidden, weight, _ = drawn(20, 16, 4)
    assert torch.equal(wide_product(hidden, weight), F.linear(hidden.float(), weight))
    assert wide_product(hidden.float(), weight.bfloat16()).dtype == torch.float32
