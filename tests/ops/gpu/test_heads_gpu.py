"""The compiled split into normalised heads against float64, at its limits, and run again."""

import pytest
import torch
from torch import Tensor

from harts.ops.compilation import why_no_kernel
from harts.ops.heads import normalised_heads
from harts.ops.heads.reference import HeadSizes, split_heads
from tests.ops.rounding import neighbours, units_off
from tests.ops.small_trees import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SHAPES = [(16, 128, 16, 128), (16, 128, 32, 128), (4, 64, 4, 64), (3, 24, 5, 40), (2, 256, 2, 17)]


def sizes_of(shape: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("heads", "key_dim", "groups", "value_dim"), shape, strict=True))


def both_ways(mixed: Tensor, sizes: dict[str, int], grads: list[Tensor]) -> tuple[Tensor, ...]:
    mixed = mixed.detach().requires_grad_()
    outputs = normalised_heads(mixed, **sizes)
    assert all(x.is_contiguous() for x in outputs)
    return (*(x.detach() for x in outputs), *torch.autograd.grad(outputs, mixed, grads))


def drawn(rows: int, sizes: dict[str, int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(rows)
    heads = HeadSizes(**sizes)
    mixed = torch.randn(rows, heads.columns, device="cuda").to(dtype)
    mixed[rows // 2 :: 7] = 0
    grads = [torch.randn_like(x) for x in split_heads(mixed, heads)]
    return mixed, grads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 37, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradient(shape: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    sizes = sizes_of(shape)
    mixed, grads = drawn(rows, sizes, dtype)
    assert why_no_kernel(mixed) is None
    runs = [both_ways(mixed, sizes, grads) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    exact = mixed.double().requires_grad_()
    want = split_heads(exact, HeadSizes(**sizes))
    truth = (*want, *torch.autograd.grad(want, exact, [g.double() for g in grads]))
    for got, exactly in zip(runs[0], truth, strict=True):
        assert got.dtype == dtype
        if dtype == torch.float32:
            assert relative_error(got.double(), exactly.detach()) < 3e-7
        else:
            assert units_off(got, exactly.detach()) < 0.51
    if dtype == torch.bfloat16:
        plain = split_heads(mixed, HeadSizes(**sizes))
        assert all(neighbours(a, b) for a, b in zip(runs[0], plain, strict=False))


def test_a_row_is_the_same_among_any_others() -> None:
    sizes = sizes_of(SHAPES[0])
    mixed, grads = drawn(1000, sizes, torch.bfloat16)
    whole = both_ways(mixed, sizes, grads)
    part = both_ways(mixed[123:456], sizes, [g[123:456] for g in grads])
    assert all(torch.equal(a[123:456], b) for a, b in zip(whole, part, strict=True))


def test_more_numbers_than_32_bits_count() -> None:
    sizes = sizes_of((16, 128, 16, 128))
    rows = 2**31 // HeadSizes(**sizes).columns + 1000
    mixed = torch.zeros(rows, HeadSizes(**sizes).columns, device="cuda", dtype=torch.bfloat16)
    tail, grads = drawn(500, sizes, torch.bfloat16)
    mixed[-500:] = tail
    want = both_ways(tail, sizes, grads)
    # Rows before have zeros for gradients; expanded, they take no memory until made contiguous.
    whole = [torch.cat([g[:1].expand(rows - 500, *g.shape[1:]) * 0, g]) for g in grads]
    got = both_ways(mixed, sizes, whole)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[-500:], b)
        assert not a[:-500].any()


def test_outputs_that_nothing_reads_have_gradients_of_zeros() -> None:
    sizes = sizes_of((3, 24, 5, 40))
    mixed, _ = drawn(50, sizes, torch.bfloat16)
    mixed.requires_grad_()
    _, key, _ = normalised_heads(mixed, **sizes)
    (grad,) = torch.autograd.grad(key.float().sum(), mixed)
    assert not grad[:, :72].any()
    assert not grad[:, 144:].any()
    assert grad[:, 72:144].any()
