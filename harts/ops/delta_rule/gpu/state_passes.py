"""Launches of our own kernels: state passes by rounds, and the fold of copied rows.

Shapes: P buffer rows · E copied rows · Q sequences · L bank slots · Z chunks · G value heads ·
K key dim · V value dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from harts.ops.delta_rule.gpu.chunk_lists import StatePlan, Walk
from harts.ops.delta_rule.gpu.parts import Config, InParts, Sizes, StateGradients, empty
from harts.ops.delta_rule.gpu.row_plan import CopiedRows
from harts.ops.delta_rule.gpu.triton_kernels import fold_copies, state_backward, state_forward


class _Tile(NamedTuple):
    """Value channels of one program, and its launch configuration."""

    block: int
    config: Config


# Fastest on an H200 for the rounds of a tree, and for all pieces at once, of those that were tried.
_FORWARD = {True: _Tile(32, Config(4, 2)), False: _Tile(64, Config(4, 2))}
_AGAIN = {True: _Tile(64, Config(4, 2)), False: _Tile(64, Config(4, 2))}
_BACKWARD = {True: _Tile(64, Config(8, 3)), False: _Tile(32, Config(4, 2))}
_WIDE = _Tile(32, Config(4, 2))
"""For 256 key channels: more would not fit in shared memory."""


def _tile(table: dict[bool, _Tile], key_dim: int, decay: Tensor) -> _Tile:
    """The tile for decays by channel or by head."""
    return _WIDE if key_dim > 128 else table[decay.dim() == 3]


def _tables(walk: Walk, plan: StatePlan) -> tuple[Tensor, ...]:
    pieces = plan.pieces
    return (
        walk.piece_offsets,
        pieces.rows,
        pieces.lengths,
        pieces.chunks,
        pieces.slots,
    )


def pass_states(
    plan: StatePlan,
    sizes: Sizes,
    key: InParts,
    w: Tensor,
    u: Tensor,
    decay: Tensor,
    bank: Tensor,
    *,
    again: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return D [P, G, V] and the states [Z, G, K, V] before each chunk, in the dtype of u.

    Rounds run in order and fill `bank` [L, G, K, V] float32. With `again` the bank is full, so
    everything between two of its states runs at once.
    """
    _, groups, key_dim, value_dim, chunk = sizes
    values = torch.empty_like(u)
    states = empty(u, plan.chunks, groups, key_dim, value_dim)
    walk = plan.segments if again else plan.sequences
    count = walk.initial_slots.numel()
    tile = _tile(_AGAIN if again else _FORWARD, key_dim, decay)
    for first, end in pairwise((0, count) if again else plan.round_offsets):
        state_forward[((end - first) * groups * (value_dim // tile.block),)](
            *key,
            w,
            u,
            decay,
            values,
            states,
            bank,
            walk.initial_slots,
            *_tables(walk, plan),
            plan.copied_from,
            first,
            key_heads=key.in_place.shape[1],
            groups=groups,
            key_dim=key_dim,
            value_dim=value_dim,
            chunk_size=chunk,
            block=tile.block,
            by_channel=decay.dim() == 3,
            store_bank=not again,
            num_warps=tile.config.warps,
            num_stages=tile.config.stages,
        )
    return values, states


def pass_state_gradients(
    plan: StatePlan,
    sizes: Sizes,
    query: InParts,
    key: InParts,
    w: Tensor,
    decay: Tensor,
    grad_output: InParts,
    grad_values: Tensor,
    grad_bank: Tensor | None,
    scale: float,
) -> tuple[StateGradients, Tensor]:
    """Gradients inside the rounds, and those of initial states [Q, G, K, V] float32.

    The latter also carry each consumer's gradient to the round that produced its state.
    """
    _, groups, key_dim, value_dim, chunk = sizes
    whole = torch.empty_like(grad_values)
    grad_states = empty(w, plan.chunks, groups, key_dim, value_dim)
    sequences = plan.round_offsets[-1]
    tile = _tile(_BACKWARD, key_dim, decay)
    initial = empty(w, sequences, groups, key_dim, value_dim, dtype=torch.float32)
    for first, end in reversed(list(pairwise(plan.round_offsets))):
        state_backward[((end - first) * groups * (value_dim // tile.block),)](
            *query,
            *key,
            w,
            decay,
            *grad_output,
            grad_values,
            whole,
            grad_states,
            initial if grad_bank is None else grad_bank,
            initial,
            *_tables(plan.sequences, plan),
            plan.pieces.consumer_offsets,
            plan.pieces.consumers,
            plan.copied_from,
            first,
            scale,
            query_heads=query.in_place.shape[1],
            key_heads=key.in_place.shape[1],
            groups=groups,
            key_dim=key_dim,
            value_dim=value_dim,
            chunk_size=chunk,
            block=tile.block,
            by_channel=decay.dim() == 3,
            read_bank=grad_bank is not None,
            num_warps=tile.config.warps,
            num_stages=tile.config.stages,
        )
    return StateGradients(whole, grad_states), initial


def fold(rows: Tensor, copies: Tensor, copied: CopiedRows) -> None:
    """Add copies [E, ...] to the rows [R, ...] that they are copies of, in place and in order."""
    targets = copied.targets.numel()
    if not targets:
        return
    width = copies[0].numel()
    block = min(1024, 1 << (width - 1).bit_length())
    fold_copies[(targets, -(-width // block))](
        rows,
        copies,
        copied.targets,
        copied.fresh,
        copied.offsets,
        copied.copies,
        width=width,
        block=block,
    )
