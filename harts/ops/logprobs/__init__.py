"""Log-probs of every trajectory position from the compact rows that predict them."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from harts.errors import InputError
from harts.ops.logprobs.reference import map_logprobs
from harts.ops.logprobs.streamed import map_logprobs_streamed, why_not_streamed

__all__ = ["mapped_logprobs"]


@overload
def mapped_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_rows: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    block_rows: int | None = ...,
    return_entropy: Literal[False] = ...,
) -> Tensor: ...


@overload
def mapped_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_rows: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    block_rows: int | None = ...,
    return_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def mapped_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_rows: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    block_rows: int | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each target under the logits of its row (paper Eq. 17 and 19).

    The log-partition is taken once per compact row, however many positions read it, and logits
    exist for one block of rows at a time, in forward and in backward. Rows that no position reads
    are skipped, and rows whose positions all have zero gradient are skipped in backward.

    On a GPU of compute capability 9.0, bfloat16 runs compiled: products in bfloat16 with float32
    sums, logits that never leave the chip, a bfloat16 tile of their gradient. Everything else
    (float16 and float32 too) runs the PyTorch form in float32. `shards` has the same for a part of
    the vocabulary.

    Args:
        hidden: [R, D] final hidden rows; rows without a target may hold anything.
        weight: [A, D] output projection.
        target_rows: [P] row that predicts each position, in any order, repeats allowed.
        targets: [P] next token at each position.
        bias: [A] or None, added to the logits.
        temperature: logits are divided by this.
        block_rows: rows of logits held at once; by default as many as fit in 64 MiB, or
            16,384 rows of a tile of their gradient in the compiled form.
        return_entropy: also return the entropy of each position's distribution, in nats.

    Returns:
        [P] log-probs, or ([P] log-probs, [P] entropies), both differentiable; float32, or float64
        for float64 `hidden`. Exactly P: the last token of a trajectory predicts nothing.

    Raises:
        InputError: shapes do not fit, or a row, a target, the temperature or `block_rows` is out
            of range.
    """
    _check_shapes(hidden, weight, target_rows, targets, bias)
    _check_range("target_rows", target_rows, hidden.shape[0])
    _check_range("targets", targets, weight.shape[0])
    if not temperature > 0:
        raise InputError(f"mapped_logprobs: temperature must be positive; got {temperature}.")
    if block_rows is not None and block_rows < 1:
        raise InputError(f"mapped_logprobs: block_rows must be at least 1; got {block_rows}.")
    form = map_logprobs if why_not_streamed(hidden, weight) else map_logprobs_streamed
    logprobs, entropy = form(
        hidden, weight, target_rows, targets, bias, temperature, block_rows, return_entropy
    )
    return (logprobs, entropy) if return_entropy else logprobs


def _check_shapes(
    hidden: Tensor, weight: Tensor, target_rows: Tensor, targets: Tensor, bias: Tensor | None
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise InputError(
            f"mapped_logprobs: hidden must be [R, D] and weight [A, D]; got {tuple(hidden.shape)} "
            f"and {tuple(weight.shape)}."
        )
    if target_rows.dim() != 1 or target_rows.shape != targets.shape:
        raise InputError(
            f"mapped_logprobs: target_rows and targets must both be [P]; got "
            f"{tuple(target_rows.shape)} and {tuple(targets.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"mapped_logprobs: bias must be [{weight.shape[0]}] or None; got {tuple(bias.shape)}."
        )


def _check_range(name: str, values: Tensor, bound: int) -> None:
    if values.dtype not in (torch.int32, torch.int64):
        raise InputError(f"mapped_logprobs: {name} must be int32 or int64; got {values.dtype}.")
    bad = (values < 0) | (values >= bound)
    if bad.any():
        where = int(bad.nonzero()[0])
        raise InputError(
            f"mapped_logprobs: {name} must lie in [0, {bound}); got {int(values[where])} at "
            f"position {where}. Drop positions without a next token instead of marking them."
        )
