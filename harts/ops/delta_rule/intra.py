"""Work inside one chunk of the delta rule, for all chunks at once; no state enters here.

Decays are only ever exponentials of sums over consecutive steps, summed where they are used:
never of differences of long cumulative sums, so no exponent is positive and none loses digits to
cancellation behind a strong decay, whatever the gates.

Shapes: Z chunks · X = Z * G · G value heads · H query/key heads · B chunk length · K key dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Sum of all entries up to each along a dim, in a new tensor, added in one order anywhere.

    On a GPU PyTorch has no cumsum of floats that it calls deterministic. There sums over twice as
    many entries are added, again and again.
    """
    if not x.is_cuda:
        return x.cumsum(dim)
    size, width, total = x.shape[dim], 1, x.clone()
    while width < size:
        later = total.narrow(dim, width, size - width) + total.narrow(dim, 0, size - width)
        total = torch.cat((total.narrow(dim, 0, width), later), dim)
        width *= 2
    return total


class ChunkScores(NamedTuple):
    """Scores within chunks and the decays that connect a row with its chunk's two ends."""

    query_key: Tensor
    """[Z, G, B, B] q_i . (decay from j to i) k_j for j <= i, else 0."""

    key_key: Tensor
    """[Z, G, B, B] k_i . (decay from j to i) k_j for j < i, else 0."""

    decay_in: Tensor
    """[Z, G, B, K or 1] decay from the chunk's start through row i."""

    decay_out: Tensor
    """[Z, G, B, K or 1] decay after row i to the chunk's end."""


class _ChannelScores(torch.autograd.Function):
    """A function of its own: it keeps its inputs only and makes each level's factors again.

    Interleaved rows [X, B, 2, K] (query, key) meet keys [X, B, K]; scores are [X, B, 2, B].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, log_decay: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, log_decay)
        blocks, size, _ = query.shape
        rows = torch.stack((query, key), dim=2)
        scores = query.new_zeros((blocks, size, 2, size))
        scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((query * key).sum(-1))
        for width in _widths(size):
            level = _halves(rows, key, log_decay, width)
            block = torch.bmm(level.right, level.left.mT)
            target = _lower_blocks(scores, width)
            target.copy_(block.view(target.shape))
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, log_decay = ctx.saved_tensors
        size, channels = query.shape[1:]
        rows = torch.stack((query, key), dim=2)
        diagonal = grad_scores[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
        grad_rows = torch.stack((diagonal * key, torch.zeros_like(key)), dim=2)
        grad_key = diagonal * query
        grad_decay = torch.zeros_like(log_decay)
        for width in _widths(size):
            level = _halves(rows, key, log_decay, width)
            grad_block = _lower_blocks(grad_scores, width).reshape(-1, 2 * width, width)
            grad_right = torch.bmm(grad_block, level.left)
            grad_left = torch.bmm(grad_block.mT, level.right)
            shape = (-1, 2, width, channels)
            by_row = (-1, width, 2, channels)
            grad_rows.view(-1, 2, width, 2, channels)[:, 1].addcmul_(
                grad_right.view(by_row), level.decay_right.unsqueeze(2)
            )
            grad_key.view(shape)[:, 0].addcmul_(grad_left, level.decay_left)
            decay_left, decay_right = grad_decay.view(shape).unbind(1)
            decay_right += _suffix_sum(grad_right.mul_(level.right).view(by_row).sum(2))
            decay_left[:, 1:] += running_sum(grad_left.mul_(level.left), 1)[:, :-1]
        return grad_rows[:, :, 0], grad_key + grad_rows[:, :, 1], grad_decay


class _Halves(NamedTuple):
    """Factors of all blocks of one width w: scores of a block are right @ left^T."""

    right: Tensor
    """[blocks, 2w, K] interleaved rows of right halves, decayed from the middle."""

    left: Tensor
    """[blocks, w, K] keys of left halves, decayed to the middle."""

    decay_right: Tensor
    """[blocks, w, K]."""

    decay_left: Tensor
    """[blocks, w, K]."""


def _widths(size: int) -> list[int]:
    """1, 2, 4, ... below a power of two."""
    return [1 << power for power in range(size.bit_length() - 1)]


def _halves(rows: Tensor, key: Tensor, log_decay: Tensor, width: int) -> _Halves:
    channels = key.shape[-1]
    log_left, log_right = log_decay.view(-1, 2, width, channels).unbind(1)
    decay_right = running_sum(log_right, 1).exp_()
    decay_left = _decay_to_end(log_left)
    right = rows.view(-1, 2, width, 2, channels)[:, 1] * decay_right.unsqueeze(2)
    left = key.view(-1, 2, width, channels)[:, 0] * decay_left
    return _Halves(right.view(-1, 2 * width, channels), left, decay_right, decay_left)


def _lower_blocks(scores: Tensor, width: int) -> Tensor:
    """View [X, B, 2, B] as blocks [X, B / 2w, w, 2, w]: right-half rows, left-half columns."""
    blocks, size = scores.shape[:2]
    pairs = size // (2 * width)
    view = scores.view(blocks, pairs, 2, width, 2, pairs, 2, width)
    return view.diagonal(dim1=1, dim2=5)[:, 1, :, :, 0].permute(0, 4, 1, 2, 3)


def _suffix_sum(x: Tensor) -> Tensor:
    """Sum over rows t >= i of [X, w, K]."""
    return running_sum(x.flip(1), 1).flip(1)


def _decay_to_end(log_decay: Tensor) -> Tensor:
    """Decay over rows t > i of [X, w, K]: 1 at the last row."""
    end = torch.zeros_like(log_decay)
    end[:, :-1] = _suffix_sum(log_decay[:, 1:])
    return end.exp()


def channel_scores(query: Tensor, key: Tensor, log_decay: Tensor) -> ChunkScores:
    """KDA: all three [Z, G, B, K], B a power of two.

    The chunk is halved again and again. Rows of a right half see columns of its left half through
    the middle: row factors decay from the middle to the row, column factors from the column to
    the middle, and the block is one matrix product.
    """
    query, key, log_decay = (x.contiguous() for x in (query, key, log_decay))
    shape = query.shape
    chunks, groups, size, _ = shape
    q, k, g = (x.flatten(0, 1) for x in (query, key, log_decay))
    scores: Tensor = _ChannelScores.apply(q, k, g)  # type: ignore[no-untyped-call]
    query_key, key_key = scores.view(chunks, groups, size, 2, size).unbind(3)
    return ChunkScores(
        query_key, key_key, running_sum(g, 1).exp().view(shape), _decay_to_end(g).view(shape)
    )


def scalar_scores(query: Tensor, key: Tensor, log_decay: Tensor) -> ChunkScores:
    """Gated DeltaNet: query and key [Z, H, B, K], log_decay [Z, G, B]."""
    size, share = log_decay.shape[-1], log_decay.shape[1] // query.shape[1]
    # Entry (i, j) sums steps j+1..i only; a difference of cumulative sums would lose digits.
    steps = running_sum(log_decay.unsqueeze(-1).expand(*log_decay.shape, size).tril(-1), -2)
    decay = steps.exp().tril()
    query_key = (query @ key.mT).repeat_interleave(share, dim=1) * decay
    key_key = (key @ key.mT).repeat_interleave(share, dim=1) * decay.tril(-1)
    begin = running_sum(log_decay, -1).exp().unsqueeze(-1)
    end = steps[..., -1, :].exp().unsqueeze(-1)
    return ChunkScores(query_key, key_key, begin, end)
