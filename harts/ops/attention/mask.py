"""Tree attention under a mask, without copies of ancestors: FlexAttention.

Shapes: R physical rows · C compact rows · H query heads · Hkv key/value heads · K key dim ·
V value dim · B blocks of `TILE` rows.

Numbered in depth-first order, the descendants of a row are an interval. So row q sees row k when
``enter[k] <= enter[q] < leave[k]``, and what two blocks of rows have in common follows from the
least and the greatest of their numbers. Memory grows with C; work with the pairs of blocks that
meet. So this form needs the least memory, repeats bit for bit at no cost, and does well where many
branches share one long trunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from harts.ops.attention.pieces import TILE, Ancestors, ancestors_of
from harts.ops.device_copy import on_device
from harts.ops.index_cache import derived
from harts.ops.tree_index import TreeIndex

Int32: TypeAlias = NDArray[np.int32]

_SHAPES = 64
"""Head shapes, dtypes and modes that may be compiled."""
MIN_DIM = 16
"""Least head dim that FlexAttention takes."""
_PART = 32
"""Rows whose least and greatest number stand for them; a block has several such parts."""
_OPTIONS: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}  # not the kernel for decoding
_WIDE_OPTIONS = _OPTIONS | {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 8,
    "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 128,
    "bwd_BLOCK_M2": 128,
    "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 8,
    "bwd_num_stages": 2,
}
"""Measured on an H200 for key dims that FlexAttention has no blocks for: 90 ms against 158 ms."""
# Seconds on an H200, forward and backward, for one head, fitted to six trees.
_FULL = 10.5e-12
"""One pair of rows in blocks that meet in full."""
_PARTIAL = 19e-12
"""One pair of rows in blocks that meet in part."""
_ROW = 7e-9
"""One row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeMask:
    """Which rows see which; in host memory, where the estimate of its cost is made."""

    enter: Tensor
    """[C] int32 number of each row in depth-first order."""
    leave: Tensor
    """[C] int32 first number after the row's descendants."""
    partial: Tensor
    """[B, B] bool: some queries of the block may see some keys of the block, not all see all."""
    full: Tensor
    """[B, B] bool: all see all."""
    met: tuple[int, int]
    """Pairs of blocks in `partial` and in `full`."""


def tree_mask(index: TreeIndex) -> TreeMask:
    """The mask of a tree, made once a tree."""
    return derived(index, "attention mask", _tree_mask)


def attend_tree_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: TreeIndex,
    scale: float,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    """`tree_attention` after its checks; on the CPU with a dense mask."""
    rows = index.compact_rows
    mask = tree_mask(index)
    q, k, v = (t[:rows].transpose(0, 1)[None] for t in (query, key, value))
    if not query.is_cuda:
        seen = sees(mask.enter[:, None], mask.leave, mask.enter)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    else:
        out = _flex(
            q,
            k,
            v,
            block_mask=derived(index, "attention block mask", _block_mask),
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
            kernel_options=kernel_options or options(query.shape[2]),
        )
    return F.pad(out[0].transpose(0, 1), (0, 0, 0, 0, 0, index.rows - rows))


def options(key_dim: int) -> dict[str, Any]:
    """Blocks of the kernels where FlexAttention's own are slow."""
    return _WIDE_OPTIONS if 128 < key_dim < 256 else _OPTIONS


def estimate_mask(index: TreeIndex, heads: int) -> float:
    """Seconds on an H200, comparable with those of other forms only."""
    partial, full = tree_mask(index).met
    rows = len(tree_mask(index).enter)
    return heads * ((partial * _PARTIAL + full * _FULL) * TILE * TILE + rows * _ROW)


def sees(query_enter: Tensor, key_leave: Tensor, key_enter: Tensor) -> Tensor:
    """Whether a query sees a key."""
    return (key_enter <= query_enter) & (query_enter < key_leave)


def _tree_mask(index: TreeIndex) -> TreeMask:
    enter, leave = _numbers(ancestors_of(index))
    partial, full = _block_pairs(enter, leave)
    return TreeMask(
        enter=torch.from_numpy(enter),
        leave=torch.from_numpy(leave),
        partial=torch.from_numpy(partial),
        full=torch.from_numpy(full),
        met=(int(np.count_nonzero(partial)), int(np.count_nonzero(full))),
    )


def _numbers(ancestors: Ancestors) -> tuple[Int32, Int32]:
    """[C] and [C] int32: `TreeMask.enter` and `TreeMask.leave`.

    Runs of rows that are read whole or not at all are the nodes of a forest, and a parent comes
    before its children: sequences come after their ancestors.
    """
    own = ancestors.own
    starts, lengths = ancestors.run_starts, ancestors.run_lengths
    run_of_row = np.repeat(np.arange(len(starts)), lengths)
    parent = np.arange(len(starts)) - 1
    owning = np.diff(own) > 0
    heads = np.searchsorted(starts, own[:-1][owning])
    above = np.diff(ancestors.offsets)[owning] > 0
    parent[heads] = -1
    parent[heads[above]] = run_of_row[ancestors.rows[ancestors.offsets[1:][owning][above] - 1]]
    size = lengths.copy()
    for run in range(len(starts) - 1, -1, -1):
        if parent[run] >= 0:
            size[parent[run]] += size[run]
    first = np.zeros(len(starts), dtype=np.int64)
    free = np.zeros(len(starts) + 1, dtype=np.int64)  # where the next child goes; roots' is last
    for run in range(len(starts)):
        first[run] = free[parent[run]]
        free[parent[run]] += size[run]
        free[run] = first[run] + lengths[run]
    enter = np.arange(own[-1]) + (first - starts)[run_of_row]
    leave = (first + size)[run_of_row]
    return enter.astype(np.int32), leave.astype(np.int32)


def _block_pairs(enter: Int32, leave: Int32) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Pairs of blocks of queries and keys that meet in part, and those that meet in full.

    A pair in part may turn out empty, since a part of a block is known by its extremes alone.
    """
    rows = len(enter)
    blocks, per_block = -(-rows // TILE), TILE // _PART

    def parts(numbers: Int32, absent: int) -> Int32:
        """Rows cut into [parts of a block, B, rows of a part]."""
        padded = np.full(blocks * TILE, absent, dtype=np.int32)
        padded[:rows] = numbers
        return padded.reshape(blocks, per_block, _PART).swapaxes(0, 1)

    top = np.iinfo(np.int32).max
    low, high = parts(enter, top).min(2), parts(enter, -1).max(2)
    far = parts(leave, -1).max(2)
    least, most = low.min(0), high.max(0)
    # Rows past the end are never seen, and see nothing.
    near, last = parts(leave, -1).min(2).min(0), parts(enter, top).max(2).max(0)
    full = (most <= least[:, None]) & (last[:, None] < near)
    may_meet = (least <= most[:, None]) & (least[:, None] < far.max(0))
    query, key = np.nonzero(may_meet & ~full)
    meet = (low[:, key] <= high[:, None, query]) & (low[:, None, query] < far[:, key])
    partial = np.zeros_like(full)
    partial[query, key] = meet.any((0, 1))
    return partial, full


def _block_mask(index: TreeIndex) -> Any:
    """What FlexAttention reads: lists of key blocks a query block, and the reverse."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = on_device(tree_mask(index), index.sequence_offsets.device)
    # Compiled code reads these, and is to see tensors of their own, not views of a larger buffer.
    enter, leave = mask.enter.clone(), mask.leave.clone()

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(enter[query], leave[key], enter[key])

    def listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
        order = pairs.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return pairs.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *listed(mask.partial),
        *listed(mask.full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(len(enter), len(enter)),
    )


def _flex(*tensors: Tensor, **options: Any) -> Tensor:
    # The usual limit is 8, for all head shapes and modes of a process together.
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        return _compiled()(*tensors, **options)


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Trees differ in rows: one compilation serves them all. A whole graph, because past the limit
    # any other silently runs without blocks, in memory that grows with C squared.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
