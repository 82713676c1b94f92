"""The gated delta rule token by token: slow, plain, and the meaning of every faster form.

Shapes: P packed rows of one call · Q sequences in a call · H query/key heads · G value heads ·
K key dim · V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts.ops.delta_rule.arguments import (
    check_initial_state,
    check_rows,
    sequence_starts,
    state_dtype,
)


def recurrent_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run KDA or Gated DeltaNet one token at a time.

    For each sequence, from its initial state S (zeros when None), for each row t::

        S <- diag(exp(g_t)) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  o_t = S^T (scale q_t)

    Args:
        query: [P, H, K]; value head g reads query/key head g // (G // H).
        key: [P, H, K], normalised by the caller if the model does so.
        value: [P, G, V].
        log_decay: [P, G, K] (KDA) or [P, G] (Gated DeltaNet); the g_t above, at most 0.
        beta: [P, G] step size.
        cu_seqlens: [Q+1] integers; rows after the last entry are padding and give zeros.
        initial_state: [Q, G, K, V] or None.
        scale: factor on the query; K**-0.5 by default.

    Returns:
        output [P, G, V] in the dtype of value, and final states [Q, G, K, V] in float32
        (float64 for float64 inputs).

    Raises:
        InputError: shapes that do not fit, or an empty sequence.
    """
    check_rows(query, key, value, log_decay, beta)
    starts = sequence_starts(cu_seqlens, query.shape[0])
    states = _initial_states(initial_state, len(starts) - 1, query, value)
    used = (x[: starts[-1]] for x in (query, key, value, log_decay, beta))
    columns = _columns(*used, scale=scale)
    outputs, finals = [], []
    for start, end, state in zip(starts[:-1], starts[1:], states, strict=True):
        output, final = _scan(tuple(column[start:end] for column in columns), state)
        outputs.append(output)
        finals.append(final)
    padding = outputs[0].new_zeros((query.shape[0] - starts[-1], *value.shape[1:]))
    return torch.cat([*outputs, padding]).to(value.dtype), torch.stack(finals)


def _initial_states(
    initial_state: Tensor | None, sequences: int, query: Tensor, value: Tensor
) -> Tensor:
    """States [Q, G, K, V] in the dtype of the arithmetic; zeros when None."""
    shape = (sequences, value.shape[1], query.shape[2], value.shape[2])
    if initial_state is None:
        return query.new_zeros(shape, dtype=state_dtype(query))
    check_initial_state(initial_state, shape)
    return initial_state.to(state_dtype(query))


def _columns(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Scaled query, key, value, decay and beta with one entry per value head."""
    dtype, share = state_dtype(query), value.shape[1] // query.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    return (
        query.to(dtype).repeat_interleave(share, dim=1) * scale,
        key.to(dtype).repeat_interleave(share, dim=1),
        value.to(dtype),
        log_decay.to(dtype).exp().reshape(*beta.shape, -1),
        beta.to(dtype).unsqueeze(-1),
    )


def _scan(columns: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: rows [T, G, ...] and state [G, K, V] to output [T, G, V] and the last state."""
    outputs = []
    # unbind makes one autograd node for a whole column; indexing would make one a row, each with
    # a full-size gradient buffer.
    for q, k, v, a, b in zip(*(column.unbind(0) for column in columns), strict=True):
        state = a.unsqueeze(-1) * state
        delta = b * (v - torch.einsum("gk,gkv->gv", k, state))
        state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append(torch.einsum("gk,gkv->gv", q, state))
    return torch.stack(outputs), state
