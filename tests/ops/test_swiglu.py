"""The weighted gated activation against a plain loop, and where the compiled form runs."""

from collections.abc import Callable
from math import exp

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harts.errors import InputError
from harts.ops import compilation, swiglu
from harts.ops.swiglu import weighted_swiglu
from tests.ops.rounding import units_off


def drawn(rows: int, width: int, dtype: torch.dtype, of_weights: torch.dtype) -> list[Tensor]:
    torch.manual_seed(rows)
    shapes = ((rows, 2 * width), (rows, 1))
    drawn = [torch.randn(shape).to(t) for shape, t in zip(shapes, (dtype, of_weights), strict=True)]
    return [x.requires_grad_() for x in drawn]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_rows_equal_a_plain_loop(backend: str | None) -> None:
    projected, weights = drawn(6, 3, torch.float64, torch.float64)
    expected = [
        [w * gate / (1 + exp(-gate)) * up for gate, up in zip(row[:3], row[3:], strict=True)]
        for row, (w,) in zip(projected.tolist(), weights.tolist(), strict=True)
    ]
    found = weighted_swiglu(projected, weights, backend)
    torch.testing.assert_close(
        found.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14
    )


def test_gradients_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(
        weighted_swiglu, tuple(drawn(4, 3, torch.float64, torch.float64))
    )


@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
def test_bfloat16_is_rounded_once(of_weights: torch.dtype) -> None:
    leaves = drawn(40, 24, torch.bfloat16, of_weights)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got, want = weighted_swiglu(*leaves), weighted_swiglu(*exact)
    grad = torch.randn(got.shape).bfloat16()
    found = (got, *torch.autograd.grad(got, leaves, grad))
    truth = (want, *torch.autograd.grad(want, exact, grad.double()))
    assert [x.dtype for x in found] == [torch.bfloat16, torch.bfloat16, of_weights]
    for ours, theirs in zip(found[: 2 + (of_weights == torch.bfloat16)], truth, strict=False):
        assert units_off(ours.detach(), theirs.detach()) < 0.51


def test_no_rows_have_no_activations() -> None:
    leaves = drawn(0, 3, torch.float32, torch.float32)
    out = weighted_swiglu(*leaves)
    assert out.shape == (0, 3)
    assert [g.shape for g in torch.autograd.grad(out.sum(), leaves)] == [(0, 6), (0, 1)]


@pytest.mark.parametrize(("columns", "shape"), [(5, (4, 1)), (6, (4,)), (6, (3, 1)), (6, (4, 3))])
def test_shapes_that_do_not_fit_are_refused(columns: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"weighted_swiglu: .* must be"):
        weighted_swiglu(torch.zeros(4, columns), torch.zeros(shape))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("device", "dtype", "of_weights", "installed", "fused"),
    [
        ("cuda", torch.bfloat16, torch.float32, True, True),
        ("cuda", torch.float16, torch.float16, True, True),
        ("cuda", torch.float32, torch.bfloat16, True, True),
        ("cuda", torch.bfloat16, torch.float64, True, False),
        ("cuda", torch.float64, torch.float64, True, False),
        ("cuda", torch.bfloat16, torch.bfloat16, False, False),
        ("cpu", torch.bfloat16, torch.bfloat16, True, False),
    ],
)
def test_the_kernel_runs_where_it_can_whatever_the_backend(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    of_weights: torch.dtype,
    installed: bool,
    fused: bool,
    backend: str | None,
) -> None:
    used = []

    def compiled(_form: object, name: str) -> Callable[..., None]:
        return lambda *_: used.append(name)

    monkeypatch.setattr(swiglu, "weighted_swiglu_fused", lambda *_: used.append("kernel"))
    monkeypatch.setattr(swiglu, "weighted_swiglu_plain", lambda *_: used.append("plain"))
    monkeypatch.setattr(swiglu, "compiled", compiled)
    monkeypatch.setattr(compilation, "find_spec", lambda _: object() if installed else None)
    with FakeTensorMode():
        projected = torch.empty(5, 8, dtype=dtype, device=device)
        weighted_swiglu(projected, torch.empty(5, 1, dtype=of_weights, device=device), backend)
    assert used == ["kernel" if fused else backend or "plain"]
