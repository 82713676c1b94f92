"""The gated delta rule over a tree of compact rows (paper section 3.4).

Shapes: R physical rows · C compact rows · P packed rows of one call · Q sequences in a call ·
M requested boundary states · H query/key heads · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts.errors import InputError
from harts.ops.delta_rule.arguments import check_rows, state_dtype
from harts.ops.delta_rule.chunkwise import chunk_delta_rule, run_chunks
from harts.ops.delta_rule.dispatch import Backend, choose_backend
from harts.ops.delta_rule.grid import tree_grid
from harts.ops.delta_rule.grid_rows import take_rows
from harts.ops.tree_index import TreeIndex


def tree_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    index: TreeIndex,
    scale: float | None = None,
    lowest_log_decay: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Run KDA or Gated DeltaNet on compact rows, equal to running every trajectory alone.

    Sequences start from boundary states (in float32, or float64) of sequences of earlier rounds
    and replay the rows between the boundary and their fork; replay rows write nothing. The
    gradients of all consumers of one state are added in a fixed order. The backend `rounds` is one
    `chunk_delta_rule` call a round; the others do the work inside chunks once for all rounds.

    Args:
        query: [R, H, K]; value head g reads query/key head g // (G // H).
        key: [R, H, K], normalised by the caller if the model does so.
        value: [R, G, V].
        log_decay: [R, G, K] (KDA) or [R, G] (Gated DeltaNet), at most 0.
        beta: [R, G] step size.
        index: rounds, replay and state sources.
        scale: factor on the query; K**-0.5 by default.
        lowest_log_decay: see `chunk_delta_rule`.
        backend: see `choose_backend`.

    Returns:
        [R, G, V] in the dtype of value. Padding rows are never read; theirs are zeros.

    Raises:
        InputError: shapes that do not fit the index or each other.
        UnsupportedError: the backend that was asked for cannot run.
    """
    check_rows(query, key, value, log_decay, beta)
    if query.shape[0] != index.rows:
        raise InputError(
            f"tree delta rule: the index has {index.rows} physical rows, the tensors have "
            f"{query.shape[0]}. Pass all rows of the layout, padding included."
        )
    columns = (query, key, value, log_decay, beta)
    chosen = choose_backend(query, value, log_decay, chunk_size=index.chunk_size, backend=backend)
    if chosen == "split":
        # Imported here: it needs Triton and fla, which a machine without a GPU lacks.
        from harts.ops.delta_rule.gpu.entry import split_tree_delta_rule

        return split_tree_delta_rule(columns, index, scale, lowest_log_decay)
    if chosen == "reference":
        return _in_torch(columns, index, scale)
    outputs = _run_rounds(columns, index, scale, lowest_log_decay)
    padding = value.new_zeros((index.rows - index.compact_rows, *value.shape[1:]))
    return torch.cat([*outputs, padding])


def _in_torch(
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], index: TreeIndex, scale: float | None
) -> Tensor:
    query, _, value, _, _ = columns
    if index.compact_rows == 0:
        return value.new_zeros(value.shape)
    zero = value.new_zeros((1, value.shape[1], query.shape[2], value.shape[2]))
    output, _ = run_chunks(columns, zero, tree_grid(index), scale)
    return output


def _run_rounds(
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    index: TreeIndex,
    scale: float | None,
    lowest_log_decay: float | None,
) -> list[Tensor]:
    """Outputs of every round's own rows, in order."""
    query, _, value, _, _ = columns
    state_shape = (value.shape[1], query.shape[2], value.shape[2])
    # Entry 0 is the zero state, so that source -1 is an ordinary row of the bank.
    bank = value.new_zeros((1, *state_shape), dtype=state_dtype(query))
    outputs = []
    for packed in index.rounds:
        if packed.initial_state.numel() == 0:
            continue
        q, k, v, g, b = (take_rows(column, packed.packed_rows) for column in columns)
        result = chunk_delta_rule(
            q,
            k,
            v,
            g,
            b,
            cu_seqlens=packed.cu_seqlens,
            initial_state=take_rows(bank, packed.initial_state + 1),
            boundaries=packed.boundaries,
            chunk_size=index.chunk_size,
            scale=scale,
            lowest_log_decay=lowest_log_decay,
            backend="rounds",
        )
        outputs.append(result.output.index_select(0, packed.own_positions))
        bank = torch.cat((bank, result.boundary_states))
    return outputs
