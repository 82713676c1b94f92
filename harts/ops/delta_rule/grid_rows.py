"""Moving rows to the chunk grid and back, and adding repeated ones in a fixed order.

Shapes: R rows of the caller's tensors · C rows that a chunk owns · P packed rows · Z chunks ·
B chunk length · G heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.delta_rule.grid import ChunkGrid


class _ToGrid(torch.autograd.Function):
    """A function of its own: nearly every row has one copy, so backward mostly gathers too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, grid: ChunkGrid) -> Tensor:
        heads = rows.shape[1]
        ctx.grid, ctx.shape = grid, rows.shape
        out = rows.new_zeros((grid.chunks * heads * grid.chunk_size, *rows.shape[2:]))
        packed = rows.flatten(0, 1).index_select(0, _head_rows(grid.rows, heads))
        out.index_copy_(0, _grid_entries(grid.grid_rows, heads, grid.chunk_size), packed)
        return out.view(grid.chunks, heads, grid.chunk_size, *rows.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grid: ChunkGrid = ctx.grid
        heads, owned = ctx.shape[1], len(grid.own)
        flat = grad.flatten(0, 2)
        result = grad.new_empty(ctx.shape)
        result[owned:] = 0
        result[:owned] = flat.index_select(
            0, _grid_entries(grid.own, heads, grid.chunk_size)
        ).view_as(result[:owned])
        if len(grid.replay):
            copies = _grid_entries(grid.grid_rows[grid.replay], heads, grid.chunk_size)
            add_rows(
                result.flatten(0, 1),
                _head_rows(grid.rows[grid.replay], heads),
                flat.index_select(0, copies),
            )
        return result, None


class _FromGrid(torch.autograd.Function):
    """Own rows of the grid; a function of its own, as each has exactly one grid row."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, grid: ChunkGrid, rows: int) -> Tensor:
        heads, owned = chunks.shape[1], len(grid.own)
        ctx.grid, ctx.shape = grid, chunks.shape
        out = chunks.new_empty((rows, heads, *chunks.shape[3:]))
        out[owned:] = 0
        entries = _grid_entries(grid.own, heads, grid.chunk_size)
        out[:owned] = chunks.flatten(0, 2).index_select(0, entries).view_as(out[:owned])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grid: ChunkGrid = ctx.grid
        heads, owned = ctx.shape[1], len(grid.own)
        result = grad.new_zeros(ctx.shape)
        result.flatten(0, 2).index_copy_(
            0,
            _grid_entries(grid.own, heads, grid.chunk_size),
            grad[:owned].flatten(0, 1),
        )
        return result, None, None


def to_grid(rows: Tensor, grid: ChunkGrid) -> Tensor:
    """Copy rows [R, G, ...] to [Z, G, B, ...]; grid rows past a sequence's end are zero."""
    result: Tensor = _ToGrid.apply(rows, grid)  # type: ignore[no-untyped-call]
    return result


def from_grid(chunks: Tensor, grid: ChunkGrid, rows: int) -> Tensor:
    """Copy own rows of [Z, G, B, ...] back to [R = rows, G, ...]; rows that none owns are zero."""
    result: Tensor = _FromGrid.apply(chunks, grid, rows)  # type: ignore[no-untyped-call]
    return result


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x, with a gradient that adds repeated rows in a fixed order on every device.

    On a GPU index_select's backward adds with atomics, where indexing sorts; on the CPU indexing
    adds with atomics, where index_select goes in order.
    """
    return x[rows] if x.is_cuda else x.index_select(0, rows)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [n, ...] to rows [n] of total, repeated rows in the order of `take_rows`."""
    if total.is_cuda:
        total.index_put_((rows,), values, accumulate=True)
    else:
        total.index_add_(0, rows, values)


def _head_rows(rows: Tensor, heads: int) -> Tensor:
    """Entries of [R, G, ...] flattened to [R * G, ...], all heads of each row."""
    return (rows.unsqueeze(1) * heads + torch.arange(heads, device=rows.device)).flatten()


def _grid_entries(grid_rows: Tensor, heads: int, size: int) -> Tensor:
    """Entries of [Z, G, B, ...] flattened to [Z * G * B, ...], all heads of each grid row."""
    chunk, phase = grid_rows // size, grid_rows % size
    head = torch.arange(heads, device=grid_rows.device)
    return ((chunk.unsqueeze(1) * heads + head) * size + phase.unsqueeze(1)).flatten()
