"""Heads of linear attention against a plain loop, and where the compiled form runs."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harts.errors import InputError
from harts.ops import compilation, heads
from harts.ops.heads import normalised_heads
from harts.ops.heads.reference import HeadSizes
from tests.ops.rounding import units_off

SIZES = {"heads": 2, "key_dim": 3, "groups": 4, "value_dim": 5}
COLUMNS = 2 * 2 * 3 + 4 * 5


def one_by_one(mixed: Tensor) -> list[list[list[float]]]:
    """Queries, keys and values, every number on its own."""
    found: list[list[list[float]]] = [[], [], []]
    for row in mixed.tolist():
        for kind, (first, dim, count) in enumerate(((0, 3, 2), (6, 3, 2), (12, 5, 4))):
            for head in range(count):
                x = row[first + head * dim : first + (head + 1) * dim]
                norm = (sum(a * a for a in x) + 1e-6) ** 0.5
                found[kind].append([a / norm if kind < 2 else a for a in x])
    return found


def test_heads_equal_a_plain_loop() -> None:
    torch.manual_seed(0)
    mixed = torch.randn(7, COLUMNS, dtype=torch.float64)
    mixed[3] = 0
    for got, want in zip(normalised_heads(mixed, **SIZES), one_by_one(mixed), strict=True):
        assert got.is_contiguous()
        expected = torch.tensor(want, dtype=torch.float64).view(got.shape)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    mixed = torch.randn(3, COLUMNS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: normalised_heads(x, **SIZES), mixed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(50, COLUMNS).to(dtype).requires_grad_()
    exact = mixed.detach().double().requires_grad_()
    got, want = (normalised_heads(x, **SIZES) for x in (mixed, exact))
    grads = [torch.randn(x.shape).to(dtype) for x in got]
    found = (*got, *torch.autograd.grad(got, mixed, grads))
    truth = (*want, *torch.autograd.grad(want, exact, [g.double() for g in grads]))
    for ours, theirs in zip(found, truth, strict=True):
        assert ours.dtype == dtype
        assert units_off(ours.detach(), theirs.detach()) < 0.501


def test_no_rows_have_no_heads() -> None:
    mixed = torch.zeros(0, COLUMNS, requires_grad=True)
    found = normalised_heads(mixed, **SIZES)
    assert [x.shape for x in found] == [(0, 2, 3), (0, 2, 3), (0, 4, 5)]
    (grad,) = torch.autograd.grad(sum(x.sum() for x in found), mixed)
    assert grad.shape == mixed.shape


def test_columns_that_are_no_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"\[R, 32\].*got \(4, 31\)"):
        normalised_heads(torch.zeros(4, COLUMNS - 1), **SIZES)


@pytest.mark.parametrize(
    ("device", "dtype", "key_dim", "installed", "fused"),
    [
        ("cuda", torch.bfloat16, 3, True, True),
        ("cuda", torch.float16, 3, True, True),
        ("cuda", torch.float32, 256, True, True),
        ("cuda", torch.float32, 257, True, False),
        ("cuda", torch.float64, 3, True, False),
        ("cuda", torch.bfloat16, 3, False, False),
        ("cpu", torch.bfloat16, 3, True, False),
    ],
)
def test_the_kernel_runs_where_it_can(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    key_dim: int,
    installed: bool,
    fused: bool,
) -> None:
    used = []
    monkeypatch.setattr(heads, "normalised_heads_fused", lambda *_: used.append("kernel"))
    monkeypatch.setattr(heads, "split_heads", lambda *_: used.append("plain"))
    monkeypatch.setattr(compilation, "find_spec", lambda _: object() if installed else None)
    sizes = {**SIZES, "key_dim": key_dim}
    with FakeTensorMode():
        mixed = torch.empty(5, HeadSizes(**sizes).columns, dtype=dtype, device=device)
        normalised_heads(mixed, **sizes)
    assert used == ["kernel" if fused else "plain"]
