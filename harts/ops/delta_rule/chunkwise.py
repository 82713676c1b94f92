"""The gated delta rule in chunks, over packed sequences of any length (paper Eq. 1 and 16).

Shapes: P packed rows of one call · Q sequences in a call · M requested boundary states ·
B chunk length · Z chunks of all sequences · H query/key heads · G value heads · K key dim ·
V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts.ops.delta_rule.arguments import (
    DeltaRuleOutput,
    check_initial_state,
    check_rows,
    sequence_starts,
    state_dtype,
)
from harts.ops.delta_rule.grid import ChunkGrid
from harts.ops.delta_rule.intra import ChunkScores, channel_scores, scalar_scores
from harts.ops.delta_rule.state_pass import pass_states


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    boundaries: Tensor | None = None,
    chunk_size: int = 64,
    scale: float | None = None,
) -> DeltaRuleOutput:
    """Compute `recurrent_delta_rule` in chunks and hand out chunk-boundary states.

    Every sequence starts at chunk phase 0; states and gradients never cross from one sequence to
    another. Arithmetic is float32 (float64 for float64 queries).

    Args:
        query: [P, H, K]; value head g reads query/key head g // (G // H).
        key: [P, H, K], normalised by the caller if the model does so.
        value: [P, G, V].
        log_decay: [P, G, K] (KDA) or [P, G] (Gated DeltaNet), at most 0, as strong as you like.
        beta: [P, G] step size.
        cu_seqlens: [Q+1] integers; rows after the last entry are padding, never read.
        initial_state: [Q, G, K, V], zeros when None.
        boundaries: [M, 2] pairs (sequence, chunk c): return the state after c * B of its rows.
        chunk_size: B, a power of two.
        scale: factor on the query; K**-0.5 by default.

    Returns:
        Output [P, G, V], final states [Q, G, K, V] and boundary states [M, G, K, V].

    Raises:
        InputError: shapes that do not fit, an empty sequence, or a boundary that does not exist.
    """
    check_rows(query, key, value, log_decay, beta)
    rows, key_dim = query.shape[0], query.shape[2]
    grid = ChunkGrid.build(sequence_starts(cu_seqlens, rows), chunk_size, query.device)
    index = grid.rows[:0] if boundaries is None else grid.boundary_index(boundaries)
    initial = _ranked_states(initial_state, grid, value, key_dim, state_dtype(query))
    query = query.to(initial.dtype) * (key_dim**-0.5 if scale is None else scale)
    output, states = _run_chunks((query, key, value, log_decay, beta), initial, grid)
    return DeltaRuleOutput(
        grid.gather(output, rows).to(value.dtype),
        states.index_select(0, grid.rank + grid.chunks),
        states.index_select(0, index),
    )


def _run_chunks(
    columns: tuple[Tensor, ...], initial: Tensor, grid: ChunkGrid
) -> tuple[Tensor, Tensor]:
    """Outputs [Z, G, B, V], and the states [Z + Q, G, K, V] before each chunk and at the ends."""
    q, k, v, g, b = (grid.scatter(column.to(initial.dtype)) for column in columns)
    q, k, scores = _scores(q, k, g, v.shape[1])
    w, u = _updates(k, v, b, scores)
    chunk_decay = scores.decay_in[..., -1, :].unsqueeze(-1)
    delta, states = pass_states(w, u, k * scores.decay_out, chunk_decay, initial, grid.alive)
    from_state = (q * scores.decay_in) @ states[: grid.chunks]
    return from_state + scores.query_key @ delta, states


def _ranked_states(
    initial_state: Tensor | None, grid: ChunkGrid, value: Tensor, key_dim: int, dtype: torch.dtype
) -> Tensor:
    """Initial states [Q, G, K, V] in rank order."""
    shape = (len(grid.lengths), value.shape[1], key_dim, value.shape[2])
    if initial_state is None:
        return value.new_zeros(shape, dtype=dtype)
    check_initial_state(initial_state, shape)
    return initial_state.to(dtype).index_select(0, grid.order)


def _scores(q: Tensor, k: Tensor, g: Tensor, groups: int) -> tuple[Tensor, Tensor, ChunkScores]:
    """Scores of all chunks, with query and key repeated to [Z, G, B, K]."""
    share = groups // q.shape[1]
    scores = scalar_scores(q, k, g) if g.dim() == 3 else None
    if share > 1:
        q, k = (x.repeat_interleave(share, dim=1) for x in (q, k))
    return q, k, channel_scores(q, k, g) if scores is None else scores


def _updates(k: Tensor, v: Tensor, beta: Tensor, scores: ChunkScores) -> tuple[Tensor, Tensor]:
    """The paper's W [Z, G, B, K] and U [Z, G, B, V]: one unit lower-triangular solve for both."""
    beta = beta.unsqueeze(-1)
    right = torch.cat((k * scores.decay_in, v), dim=-1) * beta
    # Entries on and above the diagonal are not read: the matrix is 1 + strictly lower.
    solved = torch.linalg.solve_triangular(
        scores.key_key * beta, right, upper=False, unitriangular=True
    )
    return solved[..., : k.shape[-1]].contiguous(), solved[..., k.shape[-1] :].contiguous()
