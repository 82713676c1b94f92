"""Routed experts on compact rows: rows go to their experts, through gated MLPs, and back.

Rows in the order of their experts make each matrix product one call over all experts. A row's
copies come back by gathering, in backward too: nothing is scattered, so every run repeats.

Shapes: R rows · k experts a row · M = R k slots, sorted by expert · E experts · D model width ·
I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.compilation import compiled, only_rows_vary
from harts.ops.kept_outputs import kept
from harts.ops.swiglu import weighted_swiglu

_ALIGNMENT = 8
"""Numbers by which the grouped product of PyTorch wants widths divisible in bfloat16."""


def sum_of_slots(values: Tensor, slots: Tensor) -> Tensor:
    """[M, D] and [R, k] to [R, D]: the sum of each row's slots, in float32 or wider."""
    only_rows_vary(values)
    wide = values.dtype if values.dtype == torch.float64 else torch.float32
    total = values[slots[:, 0]].to(wide)
    for choice in range(1, slots.shape[1]):
        total = total + values[slots[:, choice]]
    return total.to(values.dtype)


def routed_experts(
    rows: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Sum over each row's experts of weight * down(silu(gate(row)) * up(row)).

    The weight is applied before the last product, on I numbers a slot instead of D.

    Args:
        rows: [R, D].
        experts: [R, k] integer, below E.
        weights: [R, k] of the experts.
        gate_up: [E, 2 I, D].
        down: [E, D, I].
        backend: of ``torch.compile`` for what runs between the products; None for plain PyTorch.

    Returns:
        [R, D] in the dtype of ``rows``.
    """
    by_expert, order = torch.sort(experts.flatten(), stable=True)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(order.numel(), device=order.device)
    count = torch.arange(gate_up.shape[0], device=order.device)
    ends = torch.searchsorted(by_expert, count, right=True).int()
    to_slots, to_rows = order // experts.shape[1], slots.view(experts.shape)
    sent = _Spread.apply(rows, to_slots, to_rows, backend)  # type: ignore[no-untyped-call]
    each = _Spread.apply(  # type: ignore[no-untyped-call]
        weights.reshape(-1, 1), order, slots.unsqueeze(1), None
    )
    hidden = weighted_swiglu(grouped_product(sent, gate_up, ends), each, backend)
    out: Tensor = _ProductOfSlots.apply(  # type: ignore[no-untyped-call]
        hidden, down, ends, to_slots, to_rows, backend
    )
    return out


def _form(function: Callable[..., Tensor], backend: str | None) -> Callable[..., Tensor]:
    return function if backend is None else compiled(function, backend)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[M, D] by [E, D_out, D] to [M, D_out]: the rows up to ``ends`` [E] int32, expert by expert.

    One call in bfloat16 on a GPU; one product after the other elsewhere.
    """
    if _one_call(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = torch.split(x, _counts(ends))
    return torch.cat([F.linear(part, w) for part, w in zip(parts, weight, strict=True)])


def _product_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_product`: of x [M, D] and weight [E, D_out, D], for grad [M, D_out]."""
    if _one_call(x, weight):
        return F.grouped_mm(grad, weight, offs=ends), F.grouped_mm(grad.t(), x, offs=ends)
    counts = _counts(ends)
    pairs = list(zip(torch.split(grad, counts), torch.split(x, counts), strict=True))
    return (
        torch.cat([g @ w for (g, _), w in zip(pairs, weight, strict=True)]),
        torch.stack([g.t() @ part for g, part in pairs]),
    )


def _one_call(x: Tensor, weight: Tensor) -> bool:
    aligned = not any(n % _ALIGNMENT for n in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


def _counts(ends: Tensor) -> list[int]:
    counts: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return counts


class _Spread(torch.autograd.Function):
    """Copies rows to their slots; the gradient of a row is the sum of its slots'."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, to_slots: Tensor, to_rows: Tensor, backend: str | None
    ) -> Tensor:
        ctx.save_for_backward(to_rows)
        ctx.backend = backend
        return rows.index_select(0, to_slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (to_rows,) = ctx.saved_tensors
        return _form(sum_of_slots, ctx.backend)(grads[0], to_rows), None, None, None


class _ProductOfSlots(torch.autograd.Function):
    """`grouped_product` of hidden [M, I] and down [E, D, I], then the sum of each row's slots.

    One function, so that recomputation can leave both out.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        down: Tensor,
        ends: Tensor,
        to_slots: Tensor,
        to_rows: Tensor,
        backend: str | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, down, ends, to_slots)
        (out,) = kept(
            lambda: (_form(sum_of_slots, backend)(grouped_product(hidden, down, ends), to_rows),)
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, down, ends, to_slots = ctx.saved_tensors
        of_slots = grads[0].index_select(0, to_slots)
        return (*_product_gradients(of_slots, hidden, down, ends), None, None, None, None)
