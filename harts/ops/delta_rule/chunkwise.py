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
from harts.ops.delta_rule.dispatch import Backend, choose_backend
from harts.ops.delta_rule.grid import ChunkGrid, check_boundaries, packed_grid
from harts.ops.delta_rule.grid_rows import from_grid, take_rows, to_grid
from harts.ops.delta_rule.intra import ChunkScores, channel_scores, scalar_scores
from harts.ops.delta_rule.state_pass import pass_states

Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
    lowest_log_decay: float | None = None,
    backend: Backend | None = None,
) -> DeltaRuleOutput:
    """Compute `recurrent_delta_rule` in chunks and hand out chunk-boundary states.

    Every sequence starts at chunk phase 0; states and gradients never cross from one sequence to
    another. Arithmetic is float32 (float64 for float64 queries); on a GPU, products of bfloat16 or
    float16 operands are added in float32. States are float32 (float64) everywhere.

    Args:
        query: [P, H, K]; value head g reads query/key head g // (G // H).
        key: [P, H, K], normalised by the caller if the model does so.
        value: [P, G, V].
        log_decay: [P, G, K] (KDA) or [P, G] (Gated DeltaNet), at most 0, as strong as you like.
        beta: [P, G] step size.
        cu_seqlens: [Q+1] integers; rows after the last entry are padding, never read.
        initial_state: [Q, G, K, V], zeros when None.
        boundaries: [M, 2] pairs (sequence, chunk c): return the state before chunk c, after c * B
            rows; c may also be the number of chunks, for the state after all rows.
        chunk_size: B, a power of two.
        scale: factor on the query; K**-0.5 by default.
        lowest_log_decay: a bound that the caller promises. At -5 or above, KDA on a GPU uses
            matrix units for the diagonal of a chunk; beyond the promise it may overflow there.
        backend: see `choose_backend`; both GPU forms are the same one call here.

    Returns:
        Output [P, G, V], final states [Q, G, K, V] and boundary states [M, G, K, V].

    Raises:
        InputError: shapes that do not fit, an empty sequence, or a boundary that does not exist.
        UnsupportedError: the backend that was asked for cannot run.
    """
    check_rows(query, key, value, log_decay, beta)
    chosen = choose_backend(query, value, log_decay, chunk_size=chunk_size, backend=backend)
    columns = (query, key, value, log_decay, beta)
    starts = sequence_starts(cu_seqlens, query.shape[0])
    call = (columns, starts, initial_state, boundaries, chunk_size, scale)
    if chosen == "reference" or not query.is_cuda:
        return _in_torch(*call)
    return _on_gpu(*call, lowest_log_decay)


def _in_torch(
    columns: Columns,
    starts: list[int],
    initial_state: Tensor | None,
    boundaries: Tensor | None,
    chunk_size: int,
    scale: float | None,
) -> DeltaRuleOutput:
    query, _, value, _, _ = columns
    grid = packed_grid(starts, boundaries, chunk_size, query.device)
    shape = (len(starts) - 1, value.shape[1], query.shape[2], value.shape[2])
    if initial_state is None:
        initial_state = value.new_zeros(shape)
    check_initial_state(initial_state, shape)
    output, states = run_chunks(columns, initial_state, grid, scale)
    return DeltaRuleOutput(
        output,
        take_rows(states, grid.final_states),
        take_rows(states, grid.boundary_states),
    )


def _on_gpu(
    columns: Columns,
    starts: list[int],
    initial_state: Tensor | None,
    boundaries: Tensor | None,
    chunk_size: int,
    scale: float | None,
    lowest_log_decay: float | None,
) -> DeltaRuleOutput:
    # Imported here: it needs Triton and fla, which a machine without a GPU lacks.
    from harts.ops.delta_rule.gpu.entry import packed_delta_rule

    query, _, value, _, _ = columns
    if initial_state is not None:
        shape = (len(starts) - 1, value.shape[1], query.shape[2], value.shape[2])
        check_initial_state(initial_state, shape)
    return packed_delta_rule(
        columns,
        starts,
        initial_state=initial_state,
        boundaries=[] if boundaries is None else check_boundaries(boundaries, starts, chunk_size),
        chunk_size=chunk_size,
        scale=scale,
        lowest_log_decay=lowest_log_decay,
    )


def run_chunks(
    columns: Columns, initial: Tensor, grid: ChunkGrid, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Every chunk of a grid in PyTorch: work inside chunks at once, states level by level.

    Args:
        columns: query, key, value, decay and beta of R rows, as `chunk_delta_rule` takes them.
        initial: [M, G, K, V] initial states of the grid.
        grid: chunks of all sequences.
        scale: factor on the query.

    Returns:
        Output [R, G, V], zero in rows that no chunk owns, and the states [M + Z, G, K, V].
    """
    query, key, value, log_decay, beta = columns
    dtype = state_dtype(query)
    query = query.to(dtype) * (query.shape[2] ** -0.5 if scale is None else scale)
    q, k, v, g, b = (to_grid(x.to(dtype), grid) for x in (query, key, value, log_decay, beta))
    q, k, scores = _scores(q, k, g, v.shape[1])
    w, u = _updates(k, v, b, scores)
    chunk_decay = scores.decay_in[..., -1, :].unsqueeze(-1)
    delta, states = pass_states(w, u, k * scores.decay_out, chunk_decay, initial.to(dtype), grid)
    from_state = (q * scores.decay_in) @ take_rows(states, grid.parents)
    output = from_grid(from_state + scores.query_key @ delta, grid, len(value))
    return output.to(value.dtype), states


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
