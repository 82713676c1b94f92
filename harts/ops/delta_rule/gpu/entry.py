"""Packed calls and whole trees on a GPU.

Shapes: R physical rows · P packed rows of one call · Q sequences in a call · M requested boundary
states · H query/key heads · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts.ops.delta_rule.arguments import DeltaRuleOutput
from harts.ops.delta_rule.gpu.function import ChunkedDeltaRule, Rule
from harts.ops.delta_rule.gpu.gdn import GatedDeltaNet
from harts.ops.delta_rule.gpu.kda import KDA
from harts.ops.delta_rule.gpu.parts import Sizes
from harts.ops.delta_rule.gpu.row_plan import plan_packed, plan_tree
from harts.ops.tree_index import TreeIndex

RowColumns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# Below this a decay inside a sub-chunk of 16 rows leaves float32 in fla's bounded form.
LOWEST_BOUNDED_DECAY = -5.0


def packed_delta_rule(
    columns: RowColumns,
    starts: list[int],
    *,
    initial_state: Tensor | None,
    boundaries: list[tuple[int, int]],
    chunk_size: int,
    scale: float | None,
    lowest_log_decay: float | None,
) -> DeltaRuleOutput:
    """`chunk_delta_rule` for checked arguments on a GPU."""
    query, _, value, _, _ = columns
    rule = _rule(columns, chunk_size, scale, lowest_log_decay)
    packed = plan_packed(
        tuple(starts),
        tuple(boundaries),
        rows=query.shape[0],
        chunk_size=chunk_size,
        device=query.device,
    )
    if initial_state is None:
        shape = (len(starts) - 1, value.shape[1], query.shape[2], value.shape[2])
        initial_state = value.new_zeros(shape, dtype=torch.float32)
    output, bank = ChunkedDeltaRule.apply(  # type: ignore[no-untyped-call]
        *columns, initial_state.float(), packed.plan, rule
    )
    # Indexing, not index_select: the backward of the latter adds with atomics on a GPU.
    return DeltaRuleOutput(output, bank[packed.final_slots], bank[packed.boundary_slots])


def split_tree_delta_rule(
    columns: RowColumns, index: TreeIndex, scale: float | None, lowest_log_decay: float | None
) -> Tensor:
    """`tree_delta_rule` for checked arguments on a GPU: rounds only where states are passed on."""
    plan = plan_tree(index)
    if not plan.used_rows:
        return columns[2].new_zeros(columns[2].shape)
    rule = _rule(columns, index.chunk_size, scale, lowest_log_decay)
    output: Tensor
    output, _ = ChunkedDeltaRule.apply(*columns, None, plan, rule)  # type: ignore[no-untyped-call]
    return output


def _rule(
    columns: RowColumns, chunk_size: int, scale: float | None, lowest_log_decay: float | None
) -> Rule:
    query, _, value, log_decay, _ = columns
    sizes = Sizes(query.shape[1], value.shape[1], query.shape[2], value.shape[2], chunk_size)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if log_decay.dim() == 2:
        return GatedDeltaNet(sizes, scale)
    bounded = lowest_log_decay is not None and lowest_log_decay >= LOWEST_BOUNDED_DECAY
    return KDA(sizes, scale, bounded)
