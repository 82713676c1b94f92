"""Triton kernels that carry the state from chunk to chunk, and two that work beside them.

In a state pass a program owns one sequence, one value head and a block of value channels, and
keeps its part of the state in float32 registers. It walks pieces, and inside a piece chunks. All
loop bounds are loaded inside the loops: Triton 3.6 loses a carried scalar that is only a nested
loop's bound (triton-lang/triton pull request 9036).

Shapes: P buffer rows (R in place, then E copied) · Q sequences · U pieces · L bank slots ·
Z chunks · B chunk length · H query/key heads · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _part_of(first_row, in_place, copied, copied_from, width: tl.constexpr):
    """Where row 0 of the buffer would lie, for a piece at first_row, which is in one part wholly.

    in_place [R, width] and copied [E, width] are not neighbours; copied_from is R.
    """
    before_copied = copied - copied_from.to(tl.int64) * width
    return tl.where(first_row >= copied_from, before_copied, in_place)


@triton.jit(do_not_specialize=["copied_from", "first_walk"])
def state_forward(
    key,
    key_copied,
    w,
    u,
    decay,
    new_values,
    states,
    bank,
    initial_slots,
    piece_offsets,
    piece_rows,
    piece_lengths,
    piece_chunks,
    piece_slots,
    copied_from,
    first_walk,
    key_heads: tl.constexpr,
    groups: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk_size: tl.constexpr,
    block: tl.constexpr,
    by_channel: tl.constexpr,
    store_bank: tl.constexpr,
):
    """D = U - W S; S <- decay S + key^T D; states before each chunk, and bank slots, on the way.

    key [R, key_heads, K], key_copied [E, key_heads, K], w [P, G, K], u and new_values [P, G, V],
    states [Z, G, K, V], bank [L, G, K, V] float32, decay [P, G, K] or [P, G]: log2, summed from
    the chunk's start.
    By channel the keys come decayed to the chunk's end; otherwise D is decayed here.
    """
    blocks: tl.constexpr = value_dim // block
    program = tl.program_id(0)
    value_block = program % blocks
    group = (program // blocks) % groups
    walk = program // (blocks * groups) + first_walk
    key_head = group // (groups // key_heads)
    o_k = tl.arange(0, key_dim)
    o_v = value_block * block + tl.arange(0, block)
    o_b = tl.arange(0, chunk_size)
    state_tile = o_k[:, None] * value_dim + o_v[None, :]

    state = tl.zeros([key_dim, block], dtype=tl.float32)
    slot = tl.load(initial_slots + walk).to(tl.int64)
    state += tl.load(
        bank + (slot * groups + group) * key_dim * value_dim + state_tile,
        mask=(o_k[:, None] >= 0) & (slot >= 0),
        other=0.0,
    )

    for piece in range(tl.load(piece_offsets + walk), tl.load(piece_offsets + walk + 1)):
        first_row = tl.load(piece_rows + piece).to(tl.int64)
        length = tl.load(piece_lengths + piece)
        first_chunk = tl.load(piece_chunks + piece).to(tl.int64)
        key_rows = _part_of(first_row, key, key_copied, copied_from, key_heads * key_dim)
        for step in range(0, tl.cdiv(length, chunk_size)):
            inside = step * chunk_size + o_b < length
            rows = first_row + step * chunk_size + o_b
            last = first_row + tl.minimum((step + 1) * chunk_size, length) - 1
            heads = rows * groups + group
            stored = ((first_chunk + step) * groups + group) * key_dim * value_dim
            tl.store(states + stored + state_tile, state.to(states.dtype.element_ty))

            w_tile = tl.load(
                w + heads[:, None] * key_dim + o_k[None, :], mask=inside[:, None], other=0.0
            )
            values = tl.load(
                u + heads[:, None] * value_dim + o_v[None, :], mask=inside[:, None], other=0.0
            ) - tl.dot(w_tile, state.to(w_tile.dtype))
            tl.store(
                new_values + heads[:, None] * value_dim + o_v[None, :],
                values.to(new_values.dtype.element_ty),
                mask=inside[:, None],
            )
            if by_channel:
                end = tl.load(decay + (last * groups + group) * key_dim + o_k)
                state *= tl.math.exp2(end)[:, None]
            else:
                end = tl.load(decay + last * groups + group)
                along = tl.load(decay + heads, mask=inside, other=0.0)
                values *= tl.where(inside, tl.math.exp2(end - along), 0.0)[:, None]
                state *= tl.math.exp2(end)
            keys = tl.load(
                key_rows + (rows * key_heads + key_head)[None, :] * key_dim + o_k[:, None],
                mask=inside[None, :],
                other=0.0,
            )
            state = tl.dot(keys, values.to(keys.dtype), state)
        if store_bank:
            slot = tl.load(piece_slots + piece).to(tl.int64)
            # A store under a mask: a branch here would end the software pipeline of the walk.
            at = bank + (slot * groups + group) * key_dim * value_dim + state_tile
            tl.store(at, state, mask=(o_k[:, None] >= 0) & (slot >= 0))


@triton.jit(do_not_specialize=["copied_from", "first_walk", "scale"])
def state_backward(
    query,
    query_copied,
    key,
    key_copied,
    w,
    decay,
    grad_output,
    grad_output_copied,
    grad_values,
    grad_new_values,
    grad_states,
    grad_bank,
    grad_initial,
    piece_offsets,
    piece_rows,
    piece_lengths,
    piece_chunks,
    piece_slots,
    consumer_offsets,
    consumers,
    copied_from,
    first_walk,
    scale,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    groups: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk_size: tl.constexpr,
    block: tl.constexpr,
    by_channel: tl.constexpr,
    read_bank: tl.constexpr,
):
    """Walk backwards; at each piece's end add what consumers of that state sent, in their order.

    Rows of query, key and grad_output come in two parts, R in place and E copied. grad_values
    [P, G, V] comes without the state's part and goes to grad_new_values with it;
    grad_states [Z, G, K, V] is that of the state AFTER each chunk; grad_initial [Q, G, K, V]
    float32 is written here and read here by the producers of earlier rounds.
    """
    blocks: tl.constexpr = value_dim // block
    program = tl.program_id(0)
    value_block = program % blocks
    group = (program // blocks) % groups
    walk = program // (blocks * groups) + first_walk
    query_head = group // (groups // query_heads)
    key_head = group // (groups // key_heads)
    o_k = tl.arange(0, key_dim)
    o_v = value_block * block + tl.arange(0, block)
    o_b = tl.arange(0, chunk_size)
    state_tile = o_k[:, None] * value_dim + o_v[None, :]
    size: tl.constexpr = key_dim * value_dim

    grad = tl.zeros([key_dim, block], dtype=tl.float32)
    for back in range(0, tl.load(piece_offsets + walk + 1) - tl.load(piece_offsets + walk)):
        piece = tl.load(piece_offsets + walk + 1) - 1 - back
        first_row = tl.load(piece_rows + piece).to(tl.int64)
        length = tl.load(piece_lengths + piece)
        first_chunk = tl.load(piece_chunks + piece).to(tl.int64)
        query_rows = _part_of(first_row, query, query_copied, copied_from, query_heads * key_dim)
        key_rows = _part_of(first_row, key, key_copied, copied_from, key_heads * key_dim)
        upstream = _part_of(
            first_row, grad_output, grad_output_copied, copied_from, groups * value_dim
        )
        if read_bank:
            slot = tl.load(piece_slots + piece).to(tl.int64)
            grad += tl.load(
                grad_bank + (slot * groups + group) * size + state_tile,
                mask=(o_k[:, None] >= 0) & (slot >= 0),
                other=0.0,
            )
        for place in range(
            tl.load(consumer_offsets + piece), tl.load(consumer_offsets + piece + 1)
        ):
            consumer = tl.load(consumers + place).to(tl.int64)
            grad += tl.load(grad_initial + (consumer * groups + group) * size + state_tile)

        for undone in range(0, tl.cdiv(length, chunk_size)):
            step = tl.cdiv(length, chunk_size) - 1 - undone
            inside = step * chunk_size + o_b < length
            rows = first_row + step * chunk_size + o_b
            last = first_row + tl.minimum((step + 1) * chunk_size, length) - 1
            heads = rows * groups + group
            stored = ((first_chunk + step) * groups + group) * size
            tl.store(grad_states + stored + state_tile, grad.to(grad_states.dtype.element_ty))

            keys = tl.load(
                key_rows + (rows * key_heads + key_head)[:, None] * key_dim + o_k[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            values = tl.dot(keys, grad.to(keys.dtype))
            queries = tl.load(
                query_rows + (rows * query_heads + query_head)[None, :] * key_dim + o_k[:, None],
                mask=inside[None, :],
                other=0.0,
            )
            if by_channel:
                end = tl.load(decay + (last * groups + group) * key_dim + o_k)
                grad *= tl.math.exp2(end)[:, None]
            else:
                end = tl.load(decay + last * groups + group)
                along = tl.load(decay + heads, mask=inside, other=0.0)
                values *= tl.where(inside, tl.math.exp2(end - along), 0.0)[:, None]
                grad *= tl.math.exp2(end)
            tile = heads[:, None] * value_dim + o_v[None, :]
            values += tl.load(grad_values + tile, mask=inside[:, None], other=0.0)
            tl.store(
                grad_new_values + tile,
                values.to(grad_new_values.dtype.element_ty),
                mask=inside[:, None],
            )
            outputs = tl.load(upstream + tile, mask=inside[:, None], other=0.0)
            if not by_channel:
                # The output's gradient is decayed, not the query: that one would become a matrix
                # operand in registers, which Triton has got wrong on Hopper.
                outputs = (outputs * tl.math.exp2(along)[:, None]).to(outputs.dtype)
            w_tile = tl.load(
                w + heads[None, :] * key_dim + o_k[:, None], mask=inside[None, :], other=0.0
            )
            grad += tl.dot(queries, outputs) * scale - tl.dot(w_tile, values.to(w_tile.dtype))
    tl.store(grad_initial + (walk.to(tl.int64) * groups + group) * size + state_tile, grad)


@triton.jit(do_not_specialize=["scale"])
def scalar_gate_gradients(
    query,
    key,
    values,
    decay,
    states,
    grad_output,
    grad_values,
    grad_states,
    grad_query,
    grad_key,
    grad_w,
    grad_decay,
    cu_seqlens,
    chunks,
    scale,
    rows,
    heads: tl.constexpr,
    groups: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk_size: tl.constexpr,
    block: tl.constexpr,
    value_block: tl.constexpr,
):
    """Gradients of q, k, W and summed decay of each chunk, given those of D and of its end state.

    query and key [P, heads, K]; values and its gradient [P, G, V]; decay [P, G]; states and their
    gradients [Z, G, K, V]; grad_query, grad_key, grad_w [P, G, K]; grad_decay [n, rows, G], one a
    block of key channels. W enters as D = U - W S, so its gradient is -dD S^T.

    The states are read twice on purpose. A tile that a matrix product reads from shared memory
    while other arithmetic uses it too gets one buffer less in Triton's pipeline (3.6, 3.7.1), and
    the next tile lands in it before the product has ended.
    """
    blocks: tl.constexpr = key_dim // block
    chunk = tl.program_id(0) // blocks
    key_block = tl.program_id(0) % blocks
    group = tl.program_id(1)
    head = group // (groups // heads)
    segment = tl.load(chunks + 2 * chunk)
    start = tl.load(cu_seqlens + segment) + tl.load(chunks + 2 * chunk + 1) * chunk_size
    length = tl.minimum(tl.load(cu_seqlens + segment + 1) - start, chunk_size)

    o_b = tl.arange(0, chunk_size)
    o_k = key_block * block + tl.arange(0, block)
    inside = o_b < length
    row = (start + o_b).to(tl.int64)
    of_group = row * groups + group
    of_head = (row * heads + head)[:, None] * key_dim + o_k[None, :]
    state = (chunk.to(tl.int64) * groups + group) * key_dim * value_dim

    scores = tl.zeros([chunk_size, chunk_size], dtype=tl.float32)
    to_query = tl.zeros([chunk_size, block], dtype=tl.float32)
    to_key = tl.zeros([chunk_size, block], dtype=tl.float32)
    to_w = tl.zeros([chunk_size, block], dtype=tl.float32)
    for first in range(0, value_dim, value_block):
        o_v = first + tl.arange(0, value_block)
        tile = of_group[:, None] * value_dim + o_v[None, :]
        across = state + o_k[None, :] * value_dim + o_v[:, None]
        delta = tl.load(values + tile, mask=inside[:, None], other=0.0)
        upstream = tl.load(grad_output + tile, mask=inside[:, None], other=0.0)
        before = tl.load(states + across)
        after = tl.load(grad_states + across)
        scores = tl.dot(upstream, tl.trans(delta), scores)
        to_query = tl.dot(upstream, before, to_query)
        to_key = tl.dot(delta, after, to_key)
        to_delta = tl.load(grad_values + tile, mask=inside[:, None], other=0.0)
        to_w = tl.dot(to_delta, before, to_w)
    out = of_group[:, None] * key_dim + o_k[None, :]
    tl.store(grad_w + out, -to_w.to(grad_w.dtype.element_ty), mask=inside[:, None])

    kept = tl.zeros([block], dtype=tl.float32)
    for first in range(0, value_dim, value_block):
        along = state + o_k[:, None] * value_dim + (first + tl.arange(0, value_block))[None, :]
        kept += tl.sum(tl.load(states + along).to(tl.float32) * tl.load(grad_states + along), 1)

    queries = tl.load(query + of_head, mask=inside[:, None], other=0.0)
    keys = tl.load(key + of_head, mask=inside[:, None], other=0.0)
    sofar = tl.load(decay + of_group, mask=inside, other=0.0)
    end = tl.load(decay + (start + length - 1).to(tl.int64) * groups + group)
    to_query = to_query * (tl.math.exp2(sofar) * scale)[:, None]
    to_key = to_key * tl.where(inside, tl.math.exp2(end - sofar), 0.0)[:, None]
    to_end = tl.sum(kept) * tl.math.exp2(end) + tl.sum(to_key * keys)
    earlier = (o_b[:, None] >= o_b[None, :]) & inside[:, None] & inside[None, :]
    scores = tl.where(earlier, scores * tl.math.exp2(sofar[:, None] - sofar[None, :]), 0.0) * scale
    scores = scores.to(keys.dtype)
    to_query = tl.dot(scores, keys, to_query)
    to_key = tl.dot(tl.trans(scores), queries, to_key)
    to_decay = tl.sum(to_query * queries, 1) - tl.sum(to_key * keys, 1)
    to_decay += tl.where(o_b == length - 1, to_end, 0.0)
    tl.store(grad_query + out, to_query.to(grad_query.dtype.element_ty), mask=inside[:, None])
    tl.store(grad_key + out, to_key.to(grad_key.dtype.element_ty), mask=inside[:, None])
    at = grad_decay + (key_block.to(tl.int64) * rows) * groups + of_group
    tl.store(at, to_decay, mask=inside)


@triton.jit
def fold_copies(
    rows,
    copies,
    targets,
    fresh,
    offsets,
    copy_rows,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Add to each target row of rows [R, width] its copies [E, width], in float32 and in order."""
    target_number = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    target = tl.load(targets + target_number).to(tl.int64)
    kept = tl.load(fresh + target_number) == 0
    at = rows + target * width + columns
    total = tl.load(at, mask=inside & kept, other=0.0).to(tl.float32)
    for place in range(tl.load(offsets + target_number), tl.load(offsets + target_number + 1)):
        copy = tl.load(copy_rows + place).to(tl.int64)
        total += tl.load(copies + copy * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(rows.dtype.element_ty), mask=inside)
