"""PyTorch form of the tree convolution: shifted multiply-adds, then the head of each sequence.

Shapes: R physical rows · C compact rows · C_in channels · W convolution width · Q sequences ·
E rows in the heads of sequences, at most Q * (W-1).

The paper prepends W-1 ancestor rows to every sequence. Own rows of a sequence are contiguous, so
that strip differs from the rows themselves only in the first W-1 rows of each sequence, its head.
Everything else is convolved in place; heads are then done again from a table of their sources.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.tree_index import TreeIndex

_BLOCK_ROWS = 256
"""Rows for which x, its gradients and the output stay in a core's cache over the W taps."""


def convolve_tree(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: TreeIndex, activation: str | None
) -> Tensor:
    """`tree_causal_convolution` after its checks."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Row d of `taps` multiplies the row d tokens back.
    taps = weight.to(dtype).flip(1).t().contiguous()
    heads, sources = head_sources(index, weight.shape[1])
    offset = None if bias is None else bias.to(dtype)
    out: Tensor = _TreeConvolution.apply(  # type: ignore[no-untyped-call]
        x.to(dtype), taps, offset, heads, sources, index.compact_rows
    )
    if activation == "silu":
        out = F.silu(out)
    return out.to(x.dtype)


def head_sources(index: TreeIndex, width: int) -> tuple[Tensor, Tensor]:
    """The first W-1 rows of each sequence, and the rows that they read.

    Returns:
        heads [E] physical rows; sources [W, E] physical row d tokens before each, -1 where the
        trajectory has not begun.
    """
    starts = index.sequence_offsets[:-1]
    lengths = (index.sequence_offsets[1:] - starts).clamp(max=width - 1)
    sequence = torch.repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    depth = torch.arange(len(sequence), device=starts.device) - first[sequence]
    back = depth - torch.arange(width, device=starts.device)[:, None]
    ancestors_end = index.ancestor_offsets[1:][sequence]
    missing = ancestors_end + back < index.ancestor_offsets[:-1][sequence]
    # A root sequence has no ancestors, and the list may be empty: both are masked below.
    padded = F.pad(index.ancestor_rows, (0, 1), value=-1)
    above = padded[(ancestors_end + back).clamp(0, len(padded) - 1)]
    own = starts[sequence] + back
    sources = torch.where(back >= 0, own, above.masked_fill(missing, -1))
    return starts[sequence] + depth, sources


class _TreeConvolution(torch.autograd.Function):
    """x [R, C_in], taps [W, C_in], bias [C_in] or None -> [R, C_in].

    By hand because autograd would allocate a full gradient for every shifted slice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        taps: Tensor,
        bias: Tensor | None,
        heads: Tensor,
        sources: Tensor,
        compact_rows: int,
    ) -> Tensor:
        out = x.new_zeros(x.shape)
        for a in range(0, compact_rows, _BLOCK_ROWS):
            b = min(a + _BLOCK_ROWS, compact_rows)
            torch.mul(x[a:b], taps[0], out=out[a:b])
            for d in range(1, min(len(taps), b)):
                lo = max(a, d)
                out[lo:b].addcmul_(x[lo - d : b - d], taps[d])
        out[heads] = sum(
            (_gather(x, source) * tap for source, tap in zip(sources, taps, strict=True)),
            start=x.new_zeros(len(heads), x.shape[1]),
        )
        if bias is not None:
            out[:compact_rows] += bias
        ctx.save_for_backward(x, taps, heads, sources)
        ctx.compact_rows, ctx.has_bias = compact_rows, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, heads, sources = ctx.saved_tensors
        grad_x, grad_taps = torch.zeros_like(x), torch.zeros_like(taps)
        grad = grad[: ctx.compact_rows]
        at_heads = grad.index_select(0, heads)
        for d, source in enumerate(sources):
            grad_taps[d] = (_gather(x, source) * at_heads).sum(0)
            present = source >= 0
            grad_x.index_add_(0, source[present], (at_heads * taps[d])[present])
        plain = grad.index_fill(0, heads, 0.0)
        for a in range(0, ctx.compact_rows, _BLOCK_ROWS):
            b = min(a + _BLOCK_ROWS, ctx.compact_rows)
            for d in range(min(len(taps), b)):
                lo = max(a, d)
                block = plain[lo:b]
                grad_x[lo - d : b - d].addcmul_(block, taps[d])
                grad_taps[d] += (block * x[lo - d : b - d]).sum(0)
        grad_bias = grad.sum(0) if ctx.has_bias else None
        return grad_x, grad_taps, grad_bias, None, None, None


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x, zeros at -1; masked after the gather, so that no NaN of row 0 leaks."""
    return x.index_select(0, rows.clamp(min=0)).masked_fill_((rows < 0)[:, None], 0.0)
