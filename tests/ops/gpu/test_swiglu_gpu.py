"""The compiled weighted gated activation against float64, at its limits, and run again."""

import pytest
import torch
from torch import Tensor

from harts.ops.compilation import why_no_kernel
from harts.ops.experts import routed_experts
from harts.ops.swiglu import weighted_swiglu
from harts.ops.swiglu.reference import weighted_swiglu_plain
from tests.ops.rounding import neighbours, units_off
from tests.ops.small_trees import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def both_ways(projected: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (projected, weights)]
    out = weighted_swiglu(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def drawn(
    rows: int, width: int, dtype: torch.dtype, of_weights: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + width)
    projected = 3 * torch.randn(rows, 2 * width, device="cuda")
    projected[:, :width:7] *= 40  # out to where the exponential overflows
    weights = torch.rand(rows, 1, device="cuda").to(of_weights)
    return projected.to(dtype), weights, torch.randn(rows, width, device="cuda").to(dtype)


@pytest.mark.parametrize(
    ("dtype", "of_weights"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 37, 5000])
@pytest.mark.parametrize("width", [5, 64, 512, 1408])
def test_outputs_and_gradients(
    rows: int, width: int, dtype: torch.dtype, of_weights: torch.dtype
) -> None:
    projected, weights, grad = drawn(rows, width, dtype, of_weights)
    assert why_no_kernel(projected, weights) is None
    runs = [both_ways(projected, weights, grad) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    exact = [x.double().requires_grad_() for x in (projected, weights)]
    want = weighted_swiglu_plain(*exact)
    truth = (want, *torch.autograd.grad(want, exact, grad.double()))
    assert [x.dtype for x in runs[0]] == [dtype, dtype, of_weights]
    terms = weighted_swiglu_plain(exact[0], torch.ones_like(exact[1])) * grad.double()
    # The terms of a weight's gradient cancel; float32 rounds each of them.
    sizes = (*truth[:2], terms.abs().sum(-1))
    for got, exactly, size in zip(runs[0], truth, sizes, strict=True):
        if got.dtype == torch.float32:
            assert (got.double() - exactly).norm() <= 1e-6 * size.norm()
        else:
            assert units_off(got, exactly.detach()) < 0.52
    if dtype == torch.bfloat16:
        assert neighbours(runs[0][0], weighted_swiglu_plain(projected, weights))


def test_a_row_is_the_same_among_any_others() -> None:
    whole = drawn(1000, 512, torch.bfloat16, torch.float32)
    found = both_ways(*whole)
    part = both_ways(*(x[123:456] for x in whole))
    assert all(torch.equal(a[123:456], b) for a, b in zip(found, part, strict=True))


def test_more_numbers_than_32_bits_count() -> None:
    rows, width = 2**31 // 1024 + 1000, 512
    tail = drawn(500, width, torch.bfloat16, torch.float32)
    whole = [x.new_zeros(rows, x.shape[1]) for x in tail]
    for x, end in zip(whole, tail, strict=True):
        x[-500:] = end
    for got, want in zip(both_ways(*whole), both_ways(*tail), strict=True):
        assert torch.equal(got[-500:], want)
        assert not got[:-500].any()


def test_experts_with_the_kernel_are_as_close_to_float64_as_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(300, 64, device="cuda").bfloat16()
    weights, experts = torch.rand(300, 8, device="cuda").topk(3)
    gate_up = (torch.randn(8, 2 * 64, 64, device="cuda") / 8).bfloat16()
    down = (torch.randn(8, 64, 64, device="cuda") / 8).bfloat16()

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        rows, weights, gate_up, down = (x.detach().requires_grad_() for x in leaves)
        out = routed_experts(rows, experts, weights, gate_up, down)
        grads = torch.autograd.grad(out.float().square().sum(), [rows, weights, gate_up, down])
        return (out, *grads)

    leaves = (rows, weights.bfloat16(), gate_up, down)
    exact = run(*(x.double() for x in leaves))
    fused = run(*leaves)
    monkeypatch.setattr(
        "harts.ops.experts.weighted_swiglu", lambda p, w, _: weighted_swiglu_plain(p, w)
    )
    plain = run(*leaves)
    for ours, theirs, truth in zip(fused, plain, exact, strict=True):
        assert relative_error(ours.double(), truth) < 1.1 * relative_error(theirs.double(), truth)
