"""What recomputation takes from forward: the same numbers, fewer calls, nothing stale."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.ops.kept_outputs import keep_outputs, kept

CALLS: list[str] = []


class Square(torch.autograd.Function):
    """x * x, which saves its output as well, as attention does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        def compute() -> tuple[Tensor]:
            CALLS.append("square")
            return (x * x,)

        (out,) = kept(compute)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        assert torch.equal(out, x * x)
        return 2 * x * grads[0]


def region(x: Tensor) -> Tensor:
    """Two kept calls; the second's input depends on the first's output."""
    return torch.sin(Square.apply(torch.cos(Square.apply(x))))


def run(x: Tensor, contexts: Any) -> Tensor:
    return checkpoint(region, x, use_reentrant=False, context_fn=contexts)


@pytest.fixture
def x() -> Tensor:
    CALLS.clear()
    return torch.linspace(0.1, 1, 5, dtype=torch.float64).requires_grad_()


def test_recomputation_takes_outputs_and_gives_the_same_gradient(x: Tensor) -> None:
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    CALLS.clear()
    (found,) = torch.autograd.grad(run(x, keep_outputs).sum(), x)
    assert torch.equal(found, plain)
    assert len(CALLS) == 2
    torch.autograd.grad(run(x, lambda: (nullcontext(), nullcontext())).sum(), x)
    assert len(CALLS) == 2 + 4


def test_two_backwards_through_one_graph(x: Tensor) -> None:
    loss = run(x, keep_outputs).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert len(CALLS) == 2


def test_regions_do_not_mix(x: Tensor) -> None:
    y = run(run(x, keep_outputs), keep_outputs)
    (found,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(region(region(x)).sum(), x)
    assert torch.equal(found, plain)


def test_an_output_that_was_written_over_is_computed_again(x: Tensor) -> None:
    def writes_over(x: Tensor) -> Tensor:
        y = Square.apply(x).clone()
        out = Square.apply(y)
        with torch.no_grad():
            out.detach().mul_(1)
        return torch.sin(out)

    (plain,) = torch.autograd.grad(torch.sin((x * x) ** 2).sum(), x)
    y = checkpoint(writes_over, x, use_reentrant=False, context_fn=keep_outputs)
    CALLS.clear()
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, plain)
    assert len(CALLS) == 1


@pytest.mark.parametrize("backward", [True, False])
def test_outputs_go_with_their_graph(x: Tensor, backward: bool) -> None:
    held: list[weakref.ref[Any]] = []

    def watched() -> tuple[Any, Any]:
        forward, recomputation = keep_outputs()
        held.append(weakref.ref(recomputation))
        return forward, recomputation

    gc.disable()
    try:
        loss = run(x, watched).sum()
        assert held[0]() is not None
        if backward:
            loss.backward()
        del loss
        assert held[0]() is None, "the outputs hold the graph that holds them"
    finally:
        gc.enable()


def test_without_a_region_nothing_is_kept(x: Tensor) -> None:
    Square.apply(x).sum().backward()
    assert len(CALLS) == 1
