"""PyTorch form of the mapped log-probs: a stream over blocks of compact rows.

Shapes: R physical rows · D model width · A vocabulary · P semantic positions · T rows that some
position reads, ascending · b rows of one block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_BYTES = 64 * 2**20
"""Logits of one block; backward holds two such buffers."""


def map_logprobs(
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
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if block_rows is None:
        block_rows = max(1, _BLOCK_BYTES // (weight.shape[0] * dtype.itemsize))
    offset = None if bias is None else bias.to(dtype)
    logprobs, entropy = _MappedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.to(dtype),
        weight.to(dtype),
        offset,
        target_rows.long(),
        targets.long(),
        _Settings(1.0 / temperature, block_rows, return_entropy),
    )
    return logprobs, entropy


class _Settings(NamedTuple):
    scale: float
    block_rows: int
    entropy: bool


class _Block(NamedTuple):
    """Some compact rows and all positions that read them."""

    rows: Tensor
    """[b] compact rows."""
    positions: Tensor
    """Positions that read them, in order of row."""
    local: Tensor
    """Number within the block of each position's row."""


def _blocks(target_rows: Tensor, block_rows: int) -> Iterator[_Block]:
    """Sort the positions by row once, and cut between rows."""
    ordered, order = torch.sort(target_rows, stable=True)
    rows, number = torch.unique_consecutive(ordered, return_inverse=True)
    bounds = torch.arange(0, len(rows) + block_rows, block_rows, device=rows.device)
    cuts = torch.searchsorted(number, bounds).tolist()
    for i, (lo, hi) in enumerate(itertools.pairwise(cuts)):
        first = i * block_rows
        yield _Block(rows[first : first + block_rows], order[lo:hi], number[lo:hi] - first)


class _MappedLogprobs(torch.autograd.Function):
    """hidden [R, D], weight [A, D], bias [A] or None -> log-probs [P], entropies [P]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_rows: Tensor,
        targets: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_zeros(target_rows.shape)
        log_partition, entropy = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        for block in _blocks(target_rows, settings.block_rows):
            logits = _logits(hidden, weight, bias, block.rows, settings.scale)
            chosen = logits[block.local, targets[block.positions]]
            top = logits.amax(-1, keepdim=True)
            # In place throughout: a second block of logits would double the memory.
            partition = logits.sub_(top).exp_().sum(-1)
            z = top[:, 0] + partition.log()
            logprobs[block.positions] = chosen - z[block.local]
            log_partition[block.positions] = z[block.local]
            if settings.entropy:
                logp = _logits(hidden, weight, bias, block.rows, settings.scale).sub_(z[:, None])
                entropy[block.positions] = _entropy(logp, logits, partition)[block.local]
        ctx.save_for_backward(hidden, weight, bias, target_rows, targets, log_partition, entropy)
        ctx.settings = settings
        if not settings.entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_rows, targets, log_partition, entropy = ctx.saved_tensors
        scale, block_rows, has_entropy = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        active = grad != 0
        if has_entropy:
            active |= grad_entropy != 0
        at = active.nonzero()[:, 0]
        saved = _Positions(*(t[at] for t in (targets, grad, log_partition, entropy, grad_entropy)))
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        for block in _blocks(target_rows[at], block_rows):
            logits = _logits(hidden, weight, bias, block.rows, scale)
            dlogits = _dlogits(logits, block, saved, has_entropy).mul_(scale)
            if grad_hidden is not None:
                grad_hidden[block.rows] = dlogits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(dlogits.t(), hidden[block.rows])
            if grad_bias is not None:
                grad_bias += dlogits.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _Positions(NamedTuple):
    """[P'] what backward needs of the positions that have a gradient."""

    targets: Tensor
    grad: Tensor
    log_partition: Tensor
    entropy: Tensor
    grad_entropy: Tensor


def _dlogits(logits: Tensor, block: _Block, saved: _Positions, has_entropy: bool) -> Tensor:
    """[b, A] gradient of the block's logits after temperature (Eq. 19); overwrites `logits`."""
    local = block.local
    targets, grad, log_partition, entropy, grad_entropy = (t[block.positions] for t in saved)
    zeros = logits.new_zeros(len(logits))
    logp = logits.sub_(zeros.index_copy(0, local, log_partition)[:, None])
    by_row = zeros.index_add(0, local, grad)[:, None]
    if has_entropy:
        # dH/dz = -p * (log p + H), summed over the positions that share the row.
        h = zeros.index_copy(0, local, entropy)[:, None]
        factor = (logp + h).mul_(-zeros.index_add(0, local, grad_entropy)[:, None]).sub_(by_row)
        dlogits = logp.exp_().mul_(factor)
    else:
        dlogits = logp.exp_().mul_(-by_row)
    return dlogits.index_put_((local, targets), grad, accumulate=True)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, scale: float
) -> Tensor:
    """[b, A] logits of some rows, divided by the temperature."""
    logits = hidden[rows] @ weight.t()
    if bias is not None:
        logits += bias
    return logits.mul_(scale) if scale != 1.0 else logits


def _entropy(logp: Tensor, exponentials: Tensor, partition: Tensor) -> Tensor:
    """[b] -sum p log p; overwrites both [b, A] buffers."""
    return -logp.mul_(exponentials).sum(-1) / partition
