"""Mapped log-probs in tiles of rows and tokens: no logits, and gradients of bounded memory.

Shapes: R physical rows · T rows that some position reads, ascending · P positions · D model width ·
A vocabulary.

Forward reduces every row of logits to its sums (`shards.vocabulary_partial`); backward makes the
logits' gradient tile by tile and multiplies it away (`shards.vocabulary_gradients`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.logprobs.records import Projection
from harts.ops.logprobs.shards import (
    BLOCK_ROWS,
    active_rows,
    vocabulary_gradients,
    vocabulary_partial,
)

_CAPABILITY = (9, 0)
_DEPTH_MULTIPLE = 8
"""The tensor memory accelerator wants rows of a multiple of 16 bytes."""


def why_not_streamed(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the compiled form cannot run, as a clause; None when it can."""
    if not hidden.is_cuda:
        return f"hidden is on {hidden.device}, not on a GPU"
    if not hidden.dtype == weight.dtype == torch.bfloat16:
        return f"hidden is {hidden.dtype} and weight {weight.dtype}, not both bfloat16"
    if hidden.shape[1] % _DEPTH_MULTIPLE:
        return f"D = {hidden.shape[1]} is no multiple of {_DEPTH_MULTIPLE}"
    if torch.cuda.get_device_capability(hidden.device) < _CAPABILITY:
        return "the GPU is older than compute capability 9.0"
    return "triton is not installed" if find_spec("triton") is None else None


def map_logprobs_streamed(
    hidden: Tensor,
    weight: Tensor,
    target_rows: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    block_rows: int | None,
    return_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """`mapped_logprobs` after its checks; entropies are zeros when not asked for."""
    logprobs, entropy = _StreamedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight.contiguous(),
        bias,
        target_rows.long(),
        targets.long(),
        1.0 / temperature,
        block_rows or BLOCK_ROWS,
        return_entropy,
    )
    return logprobs, entropy


class _StreamedLogprobs(torch.autograd.Function):
    """hidden [R, D], weight [A, D], bias [A] or None -> log-probs [P], entropies [P]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_rows: Tensor,
        targets: Tensor,
        scale: float,
        block_rows: int,
        has_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, number = torch.unique(target_rows, return_inverse=True)
        partial = vocabulary_partial(
            hidden,
            Projection(weight, bias, scale),
            rows,
            target_rows,
            targets,
            entropy=has_entropy,
            block_rows=block_rows,
        )
        log_partition = partial.log_partition()
        logprobs = partial.target_logits - log_partition[number]
        row_entropy = partial.entropy() if has_entropy else torch.zeros_like(log_partition)
        entropy = row_entropy[number]
        ctx.save_for_backward(
            hidden, weight, bias, target_rows, targets, logprobs, rows, log_partition, row_entropy
        )
        ctx.scale, ctx.block_rows, ctx.has_entropy = scale, block_rows, has_entropy
        if not has_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_rows, targets, logprobs, rows, partition, entropy = (
            ctx.saved_tensors
        )
        active = active_rows(
            target_rows,
            targets,
            logprobs,
            grad,
            rows,
            partition,
            ctx.scale,
            (entropy, grad_entropy) if ctx.has_entropy else None,
        )
        by_row, grad_weight, grad_bias = vocabulary_gradients(
            hidden,
            Projection(weight, bias, ctx.scale),
            active,
            block_rows=ctx.block_rows,
            needs=tuple(ctx.needs_input_grad[:3]),
        )
        grad_hidden = None
        if by_row is not None:
            grad_hidden = torch.zeros_like(hidden)
            step = ctx.block_rows
            for a in range(0, len(active.rows), step):
                block = by_row[a : a + step].to(hidden.dtype)
                grad_hidden.index_copy_(0, active.rows[a : a + step], block)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 5
