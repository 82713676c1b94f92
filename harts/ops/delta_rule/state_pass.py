"""The sequential part of the chunkwise delta rule: carry the state over chunks (paper Eq. 1).

Shapes: Q sequences in a call · B chunk length · Z chunks of all sequences, in the order of
`ChunkGrid` · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _StatePass(torch.autograd.Function):
    """A function of its own: under autograd each step would save and add full-size tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        u: Tensor,
        key_end: Tensor,
        decay: Tensor,
        initial: Tensor,
        alive: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        chunks, sequences = u.shape[0], initial.shape[0]
        states = initial.new_empty((chunks + sequences, *initial.shape[1:]))
        states[:sequences] = initial
        values = torch.empty_like(u)
        first = 0
        for step, count in enumerate(alive):
            now = slice(first, first + count)
            survivors = alive[step + 1] if step + 1 < len(alive) else 0
            state = states[now].flatten(0, 1)
            torch.baddbmm(
                u[now].flatten(0, 1),
                w[now].flatten(0, 1),
                state,
                alpha=-1,
                out=values[now].flatten(0, 1),
            )
            state = torch.baddbmm(
                state * decay[now].flatten(0, 1),
                key_end[now].flatten(0, 1).mT,
                values[now].flatten(0, 1),
            ).view(count, *states.shape[1:])
            first += count
            states[first : first + survivors] = state[:survivors]
            states[chunks + survivors : chunks + count] = state[survivors:]
        ctx.save_for_backward(w, key_end, decay, states, values)
        ctx.alive = alive
        return values, states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
        w, key_end, decay, states, values = ctx.saved_tensors
        alive: tuple[int, ...] = ctx.alive
        chunks = values.shape[0]
        grad_u = torch.empty_like(values)
        # Gradient of the state AFTER each chunk: every consumer's share has been added to it.
        after = states.new_empty((chunks, *states.shape[1:]))
        before = grad_states[:0]
        first = chunks
        for count in reversed(alive):
            first -= count
            now = slice(first, first + count)
            survivors = before.shape[0]
            after[first : first + survivors] = before
            after[first + survivors : first + count] = grad_states[
                chunks + survivors : chunks + count
            ]
            torch.baddbmm(
                grad_values[now].flatten(0, 1),
                key_end[now].flatten(0, 1),
                after[now].flatten(0, 1),
                out=grad_u[now].flatten(0, 1),
            )
            before = torch.baddbmm(
                torch.addcmul(grad_states[now], after[now], decay[now]).flatten(0, 1),
                w[now].flatten(0, 1).mT,
                grad_u[now].flatten(0, 1),
                alpha=-1,
            ).view(count, *states.shape[1:])
        entering = states[:chunks]
        grad_w = torch.matmul(grad_u, entering.mT).neg_()
        grad_key_end = torch.matmul(values, after.mT)
        grad_decay = (entering * after).sum_to_size(decay.shape)
        return grad_w, grad_u, grad_key_end, grad_decay, before, None


def pass_states(
    w: Tensor, u: Tensor, key_end: Tensor, decay: Tensor, initial: Tensor, alive: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Advance all sequences chunk by chunk: D = U - W S; S <- decay * S + key_end^T D.

    Args:
        w: [Z, G, B, K] the paper's W.
        u: [Z, G, B, V] the paper's U.
        key_end: [Z, G, B, K] keys decayed to the end of their chunk.
        decay: [Z, G, K or 1, 1] decay over the whole chunk.
        initial: [Q, G, K, V] states before chunk 0, by rank.
        alive: sequences that have a chunk c, for each c.

    Returns:
        D [Z, G, B, V], and the states [Z + Q, G, K, V]: before each chunk, then final by rank.
    """
    result: tuple[Tensor, Tensor]
    result = _StatePass.apply(w, u, key_end, decay, initial, alive)  # type: ignore[no-untyped-call]
    return result
