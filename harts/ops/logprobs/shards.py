"""Mapped log-probs of one shard of the vocabulary, for engines that split the LM head.

Shapes: R physical rows · T rows that some position reads, ascending · P positions · D model width ·
A vocabulary of the shard · U distinct (row, target) entries · r rows and v tokens of one tile.

A tensor-parallel rank calls `vocabulary_partial` on its shard, reduces the scalars over ranks as
`combine_partials` does (maximum; then sums), and has exact log-probs. In backward each rank calls
`vocabulary_gradients`; gradients of the weight are its own, those of hidden are summed over ranks.
No logit leaves its tile, and no rank sees another's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from harts.ops.logprobs.records import (
    Entries,
    Projection,
    RowGradient,
    RowSums,
    compute_dtype,
)
from harts.ops.logprobs.tiles import (
    add_product,
    fill_gradient_tile,
    merge_row_sums,
    overwrite_entries,
    row_sums,
    target_logits,
)

BLOCK_ROWS = 16_384
"""Rows of a tile. Balanced with `_TILE_ELEMENTS`: both running sums are then reread 10 times."""
_TILE_ELEMENTS = 2**28
_ALIGNMENT = 64
"""Tokens by which the width of a tile is divisible, where it is cut."""


class VocabularyPartial(NamedTuple):
    """What one shard of the vocabulary adds to every log-prob."""

    sums: RowSums
    """[T] maximum and sum of exponentials of each row over the shard's tokens."""
    target_logits: Tensor
    """[P] logit of each target after temperature; 0 where another shard holds it."""

    def log_partition(self) -> Tensor:
        """[T] log of the sum of exponentials."""
        return self.sums.maximum + self.sums.sum_exp.log()

    def entropy(self) -> Tensor:
        """[T] entropy of each row in nats; only of partials made with ``entropy=True``."""
        assert self.sums.weighted is not None
        return self.log_partition() - self.sums.weighted / self.sums.sum_exp


def vocabulary_partial(
    hidden: Tensor,
    projection: Projection,
    rows: Tensor,
    target_rows: Tensor,
    targets: Tensor,
    *,
    entropy: bool = False,
    block_rows: int = BLOCK_ROWS,
) -> VocabularyPartial:
    """Row maximum, sum of exponentials and target logits over one shard (section 3.5).

    Args:
        hidden: [R, D].
        projection: the shard, with the token id of its first row.
        rows: [T] rows of hidden to reduce.
        target_rows: [P] row of hidden that predicts each position.
        targets: [P] next tokens, ids of the whole vocabulary.
        entropy: keep what the entropy needs.
        block_rows: rows reduced at once.

    Returns:
        float32 sums (float64 for float64 hidden).
    """
    sums = hidden.new_empty(3, len(rows), dtype=compute_dtype(hidden.dtype))
    for a in range(0, len(rows), block_rows):
        block = rows[a : a + block_rows]
        reduced = row_sums(hidden.index_select(0, block), projection, entropy)
        for to, values in zip(sums, reduced, strict=True):
            if values is not None:
                to[a : a + len(block)] = values
    maximum, sum_exp, weighted = sums
    return VocabularyPartial(
        RowSums(maximum, sum_exp, weighted if entropy else None),
        target_logits(hidden, projection, target_rows, targets),
    )


def combine_partials(partials: Sequence[VocabularyPartial]) -> VocabularyPartial:
    """The partial of several shards together; what a reduction over ranks must do."""
    return VocabularyPartial(
        reduce(merge_row_sums, (p.sums for p in partials)),
        reduce(torch.add, (p.target_logits for p in partials)),
    )


class ActiveRows(NamedTuple):
    """Rows and entries of the logits' gradient that are not zero."""

    rows: Tensor
    """[T] rows of hidden, ascending."""
    gradient: RowGradient
    entries: Entries


def active_rows(
    target_rows: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    grad: Tensor,
    rows: Tensor,
    log_partition: Tensor,
    scale: float,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> ActiveRows:
    """Sum the gradients of positions that share a row, and of those that share its target too.

    Args:
        target_rows: [P] row behind each position.
        targets: [P] next tokens.
        logprobs: [P] log-probs.
        grad: [P] gradient of the log-probs.
        rows: [T] ascending; each of target_rows is one of them.
        log_partition: [T].
        scale: inverse temperature.
        entropy: entropies [T] of the rows and gradient [P] of the positions' entropies.
    """
    nonzero = grad != 0 if entropy is None else (grad != 0) | (entropy[1] != 0)
    at = nonzero.nonzero()[:, 0]
    # Sorted by row, then target; stable sorts, so that sums have one order.
    at = at[torch.sort(targets[at], stable=True).indices]
    at = at[torch.sort(target_rows[at], stable=True).indices]
    starts = _run_starts(target_rows[at], targets[at])
    counts = torch.diff(starts, append=starts.new_tensor([len(at)]))
    first = at[starts]
    kept, row_counts = torch.unique_consecutive(target_rows[first], return_counts=True)
    number = torch.repeat_interleave(row_counts)
    of_row = torch.searchsorted(rows, kept)
    logp = logprobs[first]
    entry_grad = _segment_sum(grad[at], counts)
    by_row = _segment_sum(entry_grad, row_counts)
    values = entry_grad - logp.exp() * by_row[number]
    h = by_entropy = None
    if entropy is not None:
        h = entropy[0][of_row]
        by_entropy = _segment_sum(_segment_sum(entropy[1][at], counts), row_counts)
        values -= logp.exp() * (logp + h[number]) * by_entropy[number]
    return ActiveRows(
        kept,
        RowGradient(log_partition[of_row], by_row, h, by_entropy),
        Entries(number, targets[first], values * scale),
    )


def vocabulary_gradients(
    hidden: Tensor,
    projection: Projection,
    active: ActiveRows,
    *,
    block_rows: int = BLOCK_ROWS,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, of the shard's weight and of its bias, in fixed order of addition.

    One tile of the logits' gradient exists at a time, in the dtype of hidden, at most 512 MiB in
    bfloat16. Products accumulate in float32.

    Returns:
        [T, D] gradient of ``active.rows`` in float32 (float64 for float64), [A, D] in the weight's
        dtype, [A] in the bias's dtype; None where not needed.
    """
    dtype = compute_dtype(hidden.dtype)
    weight, bias = projection.weight, projection.bias
    block_rows = min(block_rows, max(1, len(active.rows)))
    # Rows of a tile start aligned: matrix products run at a third of their speed otherwise.
    aligned = _TILE_ELEMENTS // block_rows // _ALIGNMENT * _ALIGNMENT
    block_tokens = min(len(weight), max(aligned, _ALIGNMENT))
    grad_hidden = (
        hidden.new_zeros(len(active.rows), hidden.shape[1], dtype=dtype) if needs[0] else None
    )
    grad_weight = torch.empty_like(weight) if needs[1] else None
    grad_bias = torch.empty_like(bias) if needs[2] and bias is not None else None
    buffer = hidden.new_empty(block_rows * block_tokens)
    for start in range(0, len(weight), block_tokens):
        part = projection.part(start, start + block_tokens)
        by_token = hidden.new_zeros(part.weight.shape, dtype=dtype) if needs[1] else None
        by_bias = hidden.new_zeros(len(part.weight), dtype=dtype)
        for first in range(0, len(active.rows), block_rows):
            rows = active.rows[first : first + block_rows]
            h = hidden.index_select(0, rows)
            tile = buffer[: len(rows) * len(part.weight)].view(len(rows), len(part.weight))
            fill_gradient_tile(tile, h, part, active.gradient.block(first, first + len(rows)))
            overwrite_entries(tile, active.entries, first, part.first)
            if grad_hidden is not None:
                add_product(grad_hidden[first : first + len(rows)], tile, part.weight)
            if by_token is not None:
                add_product(by_token, tile.t(), h)
            if grad_bias is not None:
                by_bias += tile.sum(0, dtype=dtype)
        for whole, block in ((grad_weight, by_token), (grad_bias, by_bias)):
            if whole is not None and block is not None:
                whole[start : start + len(block)] = block
    return grad_hidden, grad_weight, grad_bias


def _segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive runs, each in one fixed order."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def _run_starts(*columns: Tensor) -> Tensor:
    """Where consecutive equal rows of the columns begin."""
    new = torch.ones_like(columns[0], dtype=torch.bool)
    new[1:] = torch.stack([c[1:] != c[:-1] for c in columns]).any(0)
    return new.nonzero()[:, 0]
