"""Triton kernels of the tree convolution: one pass over the rows each way.

Shapes: R physical rows · C compact rows · C_in channels · W convolution width · n runs of rows ·
E rows in the heads of sequences · F rows that other sequences' heads read.

A program walks one run of rows for one block of channels with the last W rows in registers, so that
every element is read once. Where a sequence begins, the registers are filled anew with its true
ancestors. Backward makes the gradient of the plain convolution on the way, adds it to the W rows
that it came from, and keeps two small things in float32: gradients of heads, which a second kernel
adds to the ancestors in other sequences, and one partial sum of taps a run, added up afterwards.
All sums have a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.ops.convolution.tables import ConvolutionTables


class _Launch(NamedTuple):
    """Channels of a program, its warps, most registers a thread, and about how many programs."""

    block: int
    warps: int
    registers: int
    programs: int


# The fastest for 65,536 rows of 2,048 and 6,144 channels on an H200 of those that were tried.
_FORWARD = _Launch(256, 2, 80, 1584)
_BACKWARD = _Launch(512, 4, 128, 528)
_FINISH_CHANNELS = 128
_FINISH_ROWS = 16
_SHORTEST_RUN = 16


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, tables: ConvolutionTables, silu: bool
) -> Tensor:
    """Tree convolution of x [R, C_in], contiguous, with weight [C_in, W]; padding rows are zero."""
    rows, channels = len(tables.depth), x.shape[1]
    out = torch.empty_like(x)
    out[rows:] = 0
    if rows and channels:
        run, grid = _runs(_FORWARD, rows, channels)
        _forward_kernel[grid](
            x, weight, weight if bias is None else bias, out,
            tables.sources, tables.depth, tables.special, rows, channels, run,
            width=weight.shape[1], has_bias=bias is not None, silu=silu,
            block=_block(_FORWARD, channels), **_options(_FORWARD),
        )  # fmt: skip
    return out


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: ConvolutionTables,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x [R, C_in], weight [C_in, W] and bias [C_in], each in its dtype."""
    rows, channels = len(tables.depth), x.shape[1]
    width = weight.shape[1]
    grad_x = torch.empty_like(x)
    grad_x[rows:] = 0
    if not rows or not channels:
        return grad_x, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
    run, grid = _runs(_BACKWARD, rows, channels)
    partial = x.new_empty(grid[0], width + 1, channels, dtype=torch.float32)
    at_heads = x.new_empty(tables.heads, channels, dtype=torch.float32)
    own = x.new_empty(len(tables.shared_rows), channels, dtype=torch.float32)
    _backward_kernel[grid](
        grad, x, weight, weight if bias is None else bias, grad_x, partial, at_heads, own,
        tables.sources, tables.depth, tables.head, tables.shared, tables.special,
        rows, channels, run,
        width=width, has_bias=bias is not None, silu=silu,
        block=_block(_BACKWARD, channels), **_options(_BACKWARD),
    )  # fmt: skip
    grad_weight = torch.empty_like(weight)
    grad_bias = None if bias is None else torch.empty_like(bias)
    programs = width + (bias is not None) + len(own)
    _finish_kernel[(programs, triton.cdiv(channels, _FINISH_CHANNELS))](
        grad_x, weight, at_heads, own,
        tables.shared_rows, tables.reader_offsets, tables.reader_heads, tables.reader_taps,
        partial, grid[0], grad_weight, grad_weight if grad_bias is None else grad_bias, channels,
        width=width, has_bias=bias is not None,
        block=_FINISH_CHANNELS, block_rows=_FINISH_ROWS,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias


def _options(launch: _Launch) -> dict[str, int]:
    return {"num_warps": launch.warps, "maxnreg": launch.registers}


def _block(launch: _Launch, channels: int) -> int:
    block: int = min(launch.block, triton.next_power_of_2(channels))
    return block


def _runs(launch: _Launch, rows: int, channels: int) -> tuple[int, tuple[int, int]]:
    """Rows of a run, a multiple of 4, and the grid: runs by channel blocks."""
    blocks = triton.cdiv(channels, _block(launch, channels))
    run = max(_SHORTEST_RUN, 4 * triton.cdiv(rows * blocks, 4 * launch.programs))
    return run, (triton.cdiv(rows, run), blocks)


@triton.jit
def _row(x, row, channels, at, inside):
    """[block] one row in float32; zeros for row -1 and past the channels."""
    return tl.load(x + row.to(tl.int64) * channels + at, mask=inside & (row >= 0), other=0.0).to(
        tl.float32
    )


@triton.jit
def _rows_ahead(x, start, rows, channels, at, inside):
    """Four rows at once, so that their loads are in flight together; zeros past the rows."""
    to = x + start.to(tl.int64) * channels + at
    a = tl.load(to, mask=inside & (start < rows), other=0.0)
    b = tl.load(to + channels, mask=inside & (start + 1 < rows), other=0.0)
    c = tl.load(to + 2 * channels, mask=inside & (start + 2 < rows), other=0.0)
    d = tl.load(to + 3 * channels, mask=inside & (start + 3 < rows), other=0.0)
    return a, b, c, d


@triton.jit
def _context(x, sources, row, rows, channels, at, inside, width: tl.constexpr):
    """The rows one, two and three tokens before a row."""
    x1 = _row(x, tl.load(sources + row), channels, at, inside)
    x2 = x1
    x3 = x1
    if width > 2:
        x2 = _row(x, tl.load(sources + rows + row), channels, at, inside)
    if width > 3:
        x3 = _row(x, tl.load(sources + 2 * rows + row), channels, at, inside)
    return x1, x2, x3


@triton.jit
def _taps(weight, bias, at, inside, width: tl.constexpr, has_bias: tl.constexpr):
    """Taps of a channel block in float32, the row's own first, and its bias."""
    base = weight + at * width + width - 1
    w0 = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(base - 1, mask=inside, other=0.0).to(tl.float32)
    w2 = w1
    w3 = w1
    if width > 2:
        w2 = tl.load(base - 2, mask=inside, other=0.0).to(tl.float32)
    if width > 3:
        w3 = tl.load(base - 3, mask=inside, other=0.0).to(tl.float32)
    b = tl.zeros_like(w0)
    if has_bias:
        b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, b


@triton.jit
def _convolve(x0, xs, w, width: tl.constexpr, has_bias: tl.constexpr):
    # Fused by name: the compiler rounded rows near forks and far from them differently.
    y = tl.fma(x0, w[0], w[4]) if has_bias else x0 * w[0]
    y = tl.fma(xs[0], w[1], y)
    if width > 2:
        y = tl.fma(xs[1], w[2], y)
    if width > 3:
        y = tl.fma(xs[2], w[3], y)
    return y


@triton.jit
def _sigmoid(y):
    """1 / (1 + exp(-y)) in five instructions, where a division and an exponential take eleven.

    The square of a reciprocal root is exact to 2e-7, and 0 where the exponential overflows.
    """
    root = tl.math.rsqrt(1.0 + tl.math.exp2(y * -1.4426950408889634))
    return root * root


@triton.jit
def _forward_row(
    out, row, here, x0, xs, w, channels, at, inside,
    width: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr,
):  # fmt: skip
    """Write one row; returns the context of the next."""
    y = _convolve(x0, xs, w, width, has_bias)
    if silu:
        y = y * _sigmoid(y)
    to = out + row.to(tl.int64) * channels + at
    tl.store(to, y.to(out.dtype.element_ty), mask=inside & here)
    return x0, xs[0], xs[1]


@triton.jit(do_not_specialize=["rows", "run"])
def _forward_kernel(
    x, weight, bias, out, sources, depth, special, rows, channels, run,
    width: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    w = _taps(weight, bias, at, inside, width, has_bias)
    first = tl.program_id(0) * run
    xs = _context(x, sources, first, rows, channels, at, inside, width)
    ahead = _rows_ahead(x, first, rows, channels, at, inside)
    special_ahead = tl.load(special + first // 4)
    for offset in range(0, min(run, rows - first), 4):
        start = first + offset
        now = ahead
        branching = special_ahead
        ahead = _rows_ahead(x, start + 4, rows, channels, at, inside)
        special_ahead = tl.load(special + start // 4 + 1, mask=start < rows, other=1)
        # Most groups have no branches, so that the arithmetic of their rows overlaps.
        if branching == 0:
            for i in tl.static_range(4):
                row = start + i
                x0 = now[i].to(tl.float32)
                xs = _forward_row(
                    out, row, row < rows, x0, xs, w, channels, at, inside, width, has_bias, silu
                )
        else:
            for i in tl.static_range(4):
                row = start + i
                x0 = now[i].to(tl.float32)
                if tl.load(depth + row, mask=row < rows, other=1) == 0:
                    xs = _context(x, sources, row, rows, channels, at, inside, width)
                xs = _forward_row(
                    out, row, row < rows, x0, xs, w, channels, at, inside, width, has_bias, silu
                )


@triton.jit
def _through_silu(g, x0, xs, w, width: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr):
    """Gradient of the plain convolution from that of its activation."""
    if silu:
        y = _convolve(x0, xs, w, width, has_bias)
        gate = _sigmoid(y)
        g = g * gate * (1.0 + y * (1.0 - gate))
    return g


@triton.jit
def _add_to_taps(s, g, x0, xs, width: tl.constexpr, has_bias: tl.constexpr):
    """Sums for the taps, the row's own first, and for the bias."""
    s2 = s[2]
    s3 = s[3]
    s4 = s[4]
    if width > 2:
        s2 += g * xs[1]
    if width > 3:
        s3 += g * xs[2]
    if has_bias:
        s4 += g
    return s[0] + g * x0, s[1] + g * xs[0], s2, s3, s4


@triton.jit
def _plain_row(
    grad_x, row, g, x0, xs, d, s, w, channels, at, inside,
    width: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr,
):  # fmt: skip
    """A row far from forks and from the ends of the run."""
    g = _through_silu(g, x0, xs, w, width, has_bias, silu)
    d1 = d[0] + g * w[1]
    d2 = d[1]
    d3 = d[2]
    if width > 2:
        d2 += g * w[2]
    if width > 3:
        d3 += g * w[3]
    finished = d1 if width == 2 else (d2 if width == 3 else d3)
    to = grad_x + (row - (width - 1)).to(tl.int64) * channels + at
    tl.store(to, finished.to(grad_x.dtype.element_ty), mask=inside)
    return (x0, xs[0], xs[1]), (g * w[0], d1, d2), _add_to_taps(s, g, x0, xs, width, has_bias)


@triton.jit
def _special_row(
    grad_x, at_heads, own, head, shared, row, deep, first, last, g, x0, xs, d, s, w,
    channels, at, inside, width: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr,
):  # fmt: skip
    """Any row: sequences end, rows of other runs do not count, two gradients are kept."""
    g = _through_silu(g, x0, xs, w, width, has_bias, silu)
    d1 = d[0] + tl.where(deep >= 1, g * w[1], 0.0)
    d2 = d[1] + tl.where(deep >= 2, g * w[2], 0.0)
    d3 = d[2] + tl.where(deep >= 3, g * w[3], 0.0)
    number = tl.load(head + row, mask=row < last, other=-1)
    kept = at_heads + number.to(tl.int64) * channels + at
    tl.store(kept, g, mask=inside & (number >= 0))
    finished = d1 if width == 2 else (d2 if width == 3 else d3)
    done = row - (width - 1)
    emits = (done >= first) & (done < last)
    to = grad_x + done.to(tl.int64) * channels + at
    tl.store(to, finished.to(grad_x.dtype.element_ty), mask=inside & emits)
    number = tl.load(shared + done, mask=emits, other=-1)
    kept = own + number.to(tl.int64) * channels + at
    tl.store(kept, finished, mask=inside & (number >= 0))
    counted = tl.where(row < last, g, 0.0)
    s = _add_to_taps(s, counted, x0, xs, width, has_bias)
    return (x0, xs[0], xs[1]), (g * w[0], d1, d2), s


@triton.jit(do_not_specialize=["rows", "run"])
def _backward_kernel(
    grad, x, weight, bias, grad_x, partial, at_heads, own,
    sources, depth, head, shared, special, rows, channels, run,
    width: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    w = _taps(weight, bias, at, inside, width, has_bias)
    first = tl.program_id(0) * run
    last = min(first + run, rows)
    xs = _context(x, sources, first, rows, channels, at, inside, width)
    # Unfinished gradients of the three rows before this one; sums for the taps.
    zero = tl.zeros((block,), dtype=tl.float32)
    d = (zero, zero, zero)
    s = (zero, zero, zero, zero, zero)
    ahead = _rows_ahead(x, first, rows, channels, at, inside)
    grad_ahead = _rows_ahead(grad, first, rows, channels, at, inside)
    special_ahead = tl.load(special + first // 4)
    # The rows just past the run finish its last rows; they count for the next run's taps.
    for offset in range(0, last - first + width - 1, 4):
        start = first + offset
        now = ahead
        grad_now = grad_ahead
        branching = special_ahead
        ahead = _rows_ahead(x, start + 4, rows, channels, at, inside)
        grad_ahead = _rows_ahead(grad, start + 4, rows, channels, at, inside)
        special_ahead = tl.load(special + start // 4 + 1, mask=start < rows, other=1)
        # Most groups have no branches, so that the arithmetic of their rows overlaps.
        if (branching == 0) & (offset > 0) & (start + 4 <= last):
            for i in tl.static_range(4):
                xs, d, s = _plain_row(
                    grad_x, start + i, grad_now[i].to(tl.float32), now[i].to(tl.float32),
                    xs, d, s, w, channels, at, inside, width, has_bias, silu,
                )  # fmt: skip
        else:
            for i in tl.static_range(4):
                row = start + i
                deep = tl.load(depth + row, mask=row < rows, other=width - 1)
                if deep == 0:
                    xs = _context(x, sources, row, rows, channels, at, inside, width)
                xs, d, s = _special_row(
                    grad_x, at_heads, own, head, shared, row, deep, first, last,
                    grad_now[i].to(tl.float32), now[i].to(tl.float32),
                    xs, d, s, w, channels, at, inside, width, has_bias, silu,
                )  # fmt: skip
    # Taps are stored oldest first, as in the weight.
    to = partial + tl.program_id(0).to(tl.int64) * (width + 1) * channels + at
    for tap in tl.static_range(width):
        tl.store(to + (width - 1 - tap) * channels, s[tap], mask=inside)
    tl.store(to + width * channels, s[4], mask=inside)


@triton.jit(do_not_specialize=["runs"])
def _finish_kernel(
    grad_x, weight, at_heads, own, shared_rows, reader_offsets, reader_heads, reader_taps,
    partial, runs, grad_weight, grad_bias, channels,
    width: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Add up sums of taps; add what heads of other sequences send to the rows they read."""
    sums: tl.constexpr = width + has_bias
    number = tl.program_id(0) - sums
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    if number < 0:
        tap = number + sums
        total = tl.zeros((block,), dtype=tl.float32)
        for start in range(0, runs, 4 * block_rows):
            r = start + tl.arange(0, 4 * block_rows)
            to = partial + (r.to(tl.int64) * (width + 1) + tap)[:, None] * channels + at[None, :]
            total += tl.sum(tl.load(to, mask=(r < runs)[:, None] & inside, other=0.0), 0)
        if tap < width:
            to = grad_weight + at * width + tap
            tl.store(to, total.to(grad_weight.dtype.element_ty), mask=inside)
        else:
            tl.store(grad_bias + at, total.to(grad_bias.dtype.element_ty), mask=inside)
    else:
        total = tl.load(own + number.to(tl.int64) * channels + at, mask=inside, other=0.0)
        stop = tl.load(reader_offsets + number + 1)
        for start in range(tl.load(reader_offsets + number), stop, block_rows):
            r = start + tl.arange(0, block_rows)
            head = tl.load(reader_heads + r, mask=r < stop, other=0)
            tap = tl.load(reader_taps + r, mask=r < stop, other=0)
            here = (r < stop)[:, None] & inside[None, :]
            to = at_heads + head.to(tl.int64)[:, None] * channels + at[None, :]
            g = tl.load(to, mask=here, other=0.0)
            to = weight + at[None, :] * width + (width - 1 - tap)[:, None]
            total += tl.sum(g * tl.load(to, mask=here, other=0.0).to(tl.float32), 0)
        row = tl.load(shared_rows + number).to(tl.int64)
        tl.store(grad_x + row * channels + at, total.to(grad_x.dtype.element_ty), mask=inside)
