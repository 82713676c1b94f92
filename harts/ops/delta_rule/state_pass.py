"""The sequential part of the chunkwise delta rule: carry the state over chunks (paper Eq. 1).

Shapes: M initial states · B chunk length · Z chunks, in the order of `ChunkGrid` · G value heads ·
K key dim · V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.delta_rule.grid import ChunkGrid
from harts.ops.delta_rule.grid_rows import add_rows


class _StatePass(torch.autograd.Function):
    """A function of its own: under autograd each level would save and add full-size tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        u: Tensor,
        key_end: Tensor,
        decay: Tensor,
        initial: Tensor,
        grid: ChunkGrid,
    ) -> tuple[Tensor, Tensor]:
        held = initial.shape[0]
        states = initial.new_empty((held + grid.chunks, *initial.shape[1:]))
        states[:held] = initial
        after = states[held:]
        values = torch.empty_like(u)
        for level in grid.levels:
            now = level.chunks
            state = states[level.parents]
            torch.baddbmm(
                u[now].flatten(0, 1),
                w[now].flatten(0, 1),
                state.flatten(0, 1),
                alpha=-1,
                out=values[now].flatten(0, 1),
            )
            torch.baddbmm(
                (state * decay[now]).flatten(0, 1),
                key_end[now].flatten(0, 1).mT,
                values[now].flatten(0, 1),
                out=after[now].flatten(0, 1),
            )
        ctx.save_for_backward(w, key_end, decay, states, values)
        ctx.grid = grid
        return values, states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
        w, key_end, decay, states, values = ctx.saved_tensors
        grid: ChunkGrid = ctx.grid
        held = states.shape[0] - grid.chunks
        grad_u = torch.empty_like(values)
        # Every consumer of a state adds its share before the chunk that made the state is reached.
        grad_states = grad_states.clone()
        grad_after = grad_states[held:]
        for level in reversed(grid.levels):
            now = level.chunks
            torch.baddbmm(
                grad_values[now].flatten(0, 1),
                key_end[now].flatten(0, 1),
                grad_after[now].flatten(0, 1),
                out=grad_u[now].flatten(0, 1),
            )
            before = torch.baddbmm(
                (grad_after[now] * decay[now]).flatten(0, 1),
                w[now].flatten(0, 1).mT,
                grad_u[now].flatten(0, 1),
                alpha=-1,
            ).view_as(grad_after[now])
            if isinstance(level.parents, slice):
                grad_states[level.parents] += before
            else:
                add_rows(grad_states, level.parents, before)
        entering = states.index_select(0, grid.parents)
        grad_w = torch.matmul(grad_u, entering.mT).neg_()
        grad_key_end = torch.matmul(values, grad_after.mT)
        grad_decay = (entering * grad_after).sum_to_size(decay.shape)
        return grad_w, grad_u, grad_key_end, grad_decay, grad_states[:held], None


def pass_states(
    w: Tensor, u: Tensor, key_end: Tensor, decay: Tensor, initial: Tensor, grid: ChunkGrid
) -> tuple[Tensor, Tensor]:
    """Advance all chunks level by level: D = U - W S; S <- decay * S + key_end^T D.

    Args:
        w: [Z, G, B, K] the paper's W.
        u: [Z, G, B, V] the paper's U.
        key_end: [Z, G, B, K] keys decayed to the end of their chunk.
        decay: [Z, G, K or 1, 1] decay over the whole chunk.
        initial: [M, G, K, V] states that chunks without a parent start from.
        grid: levels, and the parent of each chunk.

    Returns:
        D [Z, G, B, V], and the states [M + Z, G, K, V]: the initial ones, then after each chunk.
    """
    result: tuple[Tensor, Tensor]
    result = _StatePass.apply(w, u, key_end, decay, initial, grid)  # type: ignore[no-untyped-call]
    return result
