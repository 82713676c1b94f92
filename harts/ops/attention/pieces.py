"""How one tree of rows becomes a few packed attention calls of bounded size.

Shapes: R physical rows · C compact rows · H query heads · Hkv key/value heads · Q sequences ·
n queries and m keys of one call · U rows that a call reads or adds to.

Keys reach a query in one of two ways, whichever moves less. A *view* is the paper's (Eq. 21): the
ancestors of a sequence are copied in front of its own keys, and all sequences of a call are aligned
bottom right. A *shared run* is a stretch of ancestors that many sequences read: its keys stay where
they are, and the queries of all sequences below are packed against it, without a mask. Views are
less work where branches are long; shared runs where many short branches hang from a long trunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.ops.tree_index import TreeIndex

Int = NDArray[np.int64]

# Seconds on an H200; only their ratios matter, and only near the tie. A query's cost is fitted:
# with a quarter of it the tree of the benchmark shares some runs, and is 1% slower for it.
_MOVE_KEY = 12 * 128e-12
"""Gathers in forward and backward and the gradients' sums, for one head of one copied key."""
_MOVE_QUERY = 200 * 128e-12
"""Gathers, the merge of partial outputs and float32 sums, for one head of one repacked query."""
_SCORE = 11e-12
"""Forward and backward of one query-key pair of one head."""
_TILE = 128
"""Queries are padded to tiles of this many rows by the kernels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSum:
    """Which entries of a packed array belong to which row, in a fixed order of addition."""

    rows: Tensor
    """[U] int64 rows, ascending."""
    offsets: Tensor
    """[U+1] int64 bounds of their entries in ``entries``."""
    entries: Tensor
    """[n] int64 places in the packed array."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedKeys:
    """The part of a packed call that says which keys each piece has."""

    key_rows: Tensor
    """[m] int64 row of each key."""
    keys: RowSum
    cu_queries: Tensor
    """[pieces + 1] int32."""
    cu_keys: Tensor
    """[pieces + 1] int32."""
    max_queries: int
    max_keys: int
    causal: bool
    """Whether query i of l sees keys up to h + i only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ViewCall:
    """Consecutive sequences, each against its ancestors' and its own keys; causal."""

    own: slice
    """Rows of the queries."""
    packed: PackedKeys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedCall:
    """Runs of keys, each against the queries of all sequences below it; no mask."""

    query_rows: Tensor
    """[n] int64 row of each query."""
    queries: RowSum
    packed: PackedKeys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """Calls in order; those on views come first and reach every row once."""

    views: tuple[ViewCall, ...]
    shared: tuple[SharedCall, ...]


def plan_attention(
    index: TreeIndex, heads: int, kv_heads: int, key_budget: int, query_budget: int
) -> AttentionPlan:
    """Choose views and shared runs and cut both into calls.

    Args:
        index: the tree of rows.
        heads: H.
        kv_heads: Hkv.
        key_budget: keys copied by one call at most, unless one sequence alone needs more.
        query_budget: queries repacked by one call at most, unless one run alone needs more.
    """
    own = index.sequence_offsets.cpu().numpy()
    ancestors = _Ancestors.of(index, own)
    shared = ancestors.shared_runs(np.diff(own), heads, kv_heads)
    device = index.sequence_offsets.device
    return AttentionPlan(
        views=tuple(_view_calls(own, ancestors, shared, key_budget, device)),
        shared=tuple(_shared_calls(own, ancestors, shared, query_budget, device)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ancestors:
    """Ancestors of all sequences, cut into runs that every sequence reads whole or not at all."""

    rows: Int
    """[sum of h]"""
    offsets: Int
    """[Q+1]"""
    run_starts: Int
    """[runs] first row of each run."""
    run_lengths: Int
    reader: Int
    """[pairs] a sequence that reads a run, ascending within each run."""
    run: Int
    """[pairs] the run, ascending."""

    @classmethod
    def of(cls, index: TreeIndex, own: Int) -> _Ancestors:
        rows, offsets = index.ancestor_rows.cpu().numpy(), index.ancestor_offsets.cpu().numpy()
        starts = np.ones(len(rows), dtype=bool)
        starts[1:] = np.diff(rows) != 1
        starts[offsets[offsets < len(rows)]] = True
        first = np.flatnonzero(starts)
        last = np.append(first[1:], len(rows)) - 1 if len(first) else first
        cuts = np.zeros(int(own[-1]) + 1, dtype=bool)
        cuts[own] = cuts[rows[first]] = cuts[rows[last] + 1] = True
        read = np.zeros(len(cuts), dtype=np.int64)
        np.add.at(read, rows[first], 1)
        np.add.at(read, rows[last] + 1, -1)
        all_starts = np.flatnonzero(cuts[:-1])
        lengths = np.diff(np.append(all_starts, own[-1]))
        number = np.cumsum(cuts)[:-1] - 1
        sequence = np.searchsorted(offsets, first, side="right") - 1
        spans = number[rows[last]] - number[rows[first]] + 1 if len(first) else first
        run = np.repeat(number[rows[first]], spans) + _ranges(spans)
        reader = np.repeat(sequence, spans)
        order = np.lexsort((reader, run))
        return cls(
            rows=rows,
            offsets=offsets,
            run_starts=all_starts,
            run_lengths=lengths,
            reader=reader[order],
            run=run[order],
        )

    def shared_runs(self, own_lengths: Int, heads: int, kv_heads: int) -> NDArray[np.bool_]:
        """[runs] where packing the queries below costs less than copying the keys."""
        runs = len(self.run_starts)
        queries = own_lengths[self.reader]
        below = np.bincount(self.run, queries, runs)
        padded = np.bincount(self.run, -(-queries // _TILE) * _TILE, runs)
        readers = np.bincount(self.run, minlength=runs)
        view = self.run_lengths * (readers * _MOVE_KEY * kv_heads + padded * _SCORE * heads)
        packed = heads * (
            below * _MOVE_QUERY + self.run_lengths * -(-below // _TILE) * _TILE * _SCORE
        )
        found: NDArray[np.bool_] = (packed < view) & (readers > 1)
        return found


def _view_calls(
    own: Int, ancestors: _Ancestors, shared: NDArray[np.bool_], budget: int, device: torch.device
) -> Iterator[ViewCall]:
    run_of_row = np.repeat(np.arange(len(shared)), ancestors.run_lengths)
    kept = ~shared[run_of_row[ancestors.rows]]
    rows = ancestors.rows[kept]
    offsets = np.concatenate([[0], np.cumsum(kept)])[ancestors.offsets]
    queries = np.diff(own)
    above = np.where(queries > 0, np.diff(offsets), 0)
    # One pool holds ancestors, then own rows; a call's keys are alternating slices of it.
    pool = np.concatenate([rows, np.arange(own[-1])])
    for lo, hi in _groups(above + queries, budget):
        if own[hi] == own[lo]:
            continue
        lengths = np.stack([above[lo:hi], queries[lo:hi]], 1).ravel()
        begins = np.stack([offsets[lo:hi], len(rows) + own[lo:hi]], 1).ravel()
        key_rows = pool[np.repeat(begins, lengths) + _ranges(lengths)]
        yield ViewCall(
            own=slice(int(own[lo]), int(own[hi])),
            packed=_packed(key_rows, queries[lo:hi], (above + queries)[lo:hi], True, device),
        )


def _shared_calls(
    own: Int, ancestors: _Ancestors, shared: NDArray[np.bool_], budget: int, device: torch.device
) -> Iterator[SharedCall]:
    chosen = np.flatnonzero(shared)
    lengths = np.diff(own)
    below = np.bincount(ancestors.run, lengths[ancestors.reader], len(shared)).astype(np.int64)
    for lo, hi in _groups(below[chosen], budget):
        runs = chosen[lo:hi]
        readers = ancestors.reader[np.isin(ancestors.run, runs)]
        query_rows = np.repeat(own[readers], lengths[readers]) + _ranges(lengths[readers])
        key_lengths = ancestors.run_lengths[runs]
        key_rows = np.repeat(ancestors.run_starts[runs], key_lengths) + _ranges(key_lengths)
        yield SharedCall(
            query_rows=torch.from_numpy(query_rows).to(device),
            queries=_row_sum(query_rows, device),
            packed=_packed(key_rows, below[runs], key_lengths, False, device),
        )


def _packed(
    key_rows: Int, query_lengths: Int, key_lengths: Int, causal: bool, device: torch.device
) -> PackedKeys:
    return PackedKeys(
        key_rows=torch.from_numpy(key_rows).to(device),
        keys=_row_sum(key_rows, device),
        cu_queries=_bounds(query_lengths, device),
        cu_keys=_bounds(key_lengths, device),
        max_queries=int(query_lengths.max()),
        max_keys=int(key_lengths.max()),
        causal=causal,
    )


def _row_sum(rows: Int, device: torch.device) -> RowSum:
    ordered, entries = torch.sort(torch.from_numpy(rows).to(device), stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    offsets = torch.zeros(len(unique) + 1, dtype=torch.int64, device=device)
    offsets[1:] = counts.cumsum(0)
    return RowSum(rows=unique, offsets=offsets, entries=entries)


def _bounds(lengths: Int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def _ranges(lengths: Int) -> Int:
    """0..lengths[0]-1, 0..lengths[1]-1, ..., end to end."""
    total = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _groups(sizes: Int, budget: int) -> list[tuple[int, int]]:
    """Consecutive groups that stay within a budget where a single member does."""
    groups, start, total = [], 0, 0
    for i, size in enumerate(sizes.tolist()):
        if i > start and total + size > budget:
            groups.append((start, i))
            start, total = i, 0
        total += size
    if start < len(sizes):
        groups.append((start, len(sizes)))
    return groups
