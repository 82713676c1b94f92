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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.ops.device_copy import on_device
from harts.ops.index_cache import derived, on_host
from harts.ops.stretches import Int, before, stretches
from harts.ops.tree_index import TreeIndex

TILE = 128
"""Queries and keys are padded to tiles of this many rows by the kernels."""
_EMPTY = 16
"""Empty tiles for a real one that a launch may have: each costs a hundredth of a real one."""
_FEW_TILES = 16_384
"""Empty tiles that a launch may have anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Seconds on an H200, forward and backward; only ratios matter, and only near a tie."""

    score: float
    """One query-key pair of one head."""
    move_key: float = 12 * 128e-12
    """Gathers and the gradients' sums, for one head of one copied key."""
    # Fitted: with a quarter of it the tree of the benchmark shares some runs, and is 1% slower.
    move_query: float = 200 * 128e-12
    """Gathers, the merge of partial outputs and float32 sums, for one head of one query."""


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
class Fold:
    """Where the sums of one call's keys go, so that few rows are ever held in float32.

    A row that several calls reach has a slot that carries its sum from one to the next.
    """

    slots: Tensor
    """[U] int64 slot of each row of the call's `RowSum`; 0 where it has none."""
    first: Tensor
    """[U] bool: no earlier call reaches the row."""
    last: Tensor
    """[U] bool: no later call reaches the row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """Calls in order; those on views come first and reach every row once."""

    views: tuple[ViewCall, ...]
    shared: tuple[SharedCall, ...]
    folds: tuple[Fold, ...]
    """One a call: of the views, then of the shared runs."""
    slots: int


def plan_attention(
    index: TreeIndex,
    heads: int,
    kv_heads: int,
    key_budget: int,
    query_budget: int,
    speeds: Speeds,
) -> AttentionPlan:
    """Choose views and shared runs and cut both into calls.

    Args:
        index: the tree of rows.
        heads: H.
        kv_heads: Hkv.
        key_budget: keys copied and queries in one call at most, unless one sequence alone needs
            more.
        query_budget: queries repacked by one call at most, unless one run alone needs more.
        speeds: what views and shared runs cost.
    """
    ancestors = ancestors_of(index)
    shared = ancestors.shared_runs(heads, kv_heads, speeds)
    views = list(_view_calls(ancestors, shared, key_budget))
    runs = list(_shared_calls(ancestors, shared, query_budget))
    folds, slots = _folds([reached for _, reached in (*views, *runs)], ancestors.run_lengths)
    plan = AttentionPlan(
        views=tuple(call for call, _ in views),
        shared=tuple(call for call, _ in runs),
        folds=folds,
        slots=slots,
    )
    return on_device(plan, index.sequence_offsets.device)


def estimate_seconds(index: TreeIndex, heads: int, kv_heads: int, speeds: Speeds) -> float:
    """What views and shared runs cost, each run in the cheaper of the two ways."""
    ancestors = ancestors_of(index)
    own, lengths = ancestors.own, np.diff(ancestors.own)
    copied, packed = ancestors.costs(heads, kv_heads, speeds)
    own_pairs = float((tiled(lengths) * (lengths + TILE) / 2).sum())
    moved = float(own[-1]) * kv_heads * speeds.move_key
    return float(np.minimum(copied, packed).sum()) + moved + own_pairs * heads * speeds.score


def longest_path(index: TreeIndex) -> int:
    """Rows of the longest sequence and its ancestors: the least a call on views has to copy."""
    ancestors = ancestors_of(index)
    paths = np.diff(ancestors.offsets) + np.diff(ancestors.own)
    return int(paths.max()) if len(paths) else 0


def ancestors_of(index: TreeIndex) -> Ancestors:
    """The ancestors of a tree, cut into runs once a tree."""
    return derived(index, "attention ancestors", Ancestors.of)


def tiled(lengths: NDArray[Any]) -> NDArray[Any]:
    """Lengths rounded up to whole tiles."""
    return -(-lengths // TILE) * TILE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ancestors:
    """Ancestors of all sequences, cut into runs that every sequence reads whole or not at all."""

    own: Int
    """[Q+1] offsets of the sequences' own rows."""
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
    path: Int
    """[pairs] the runs that a sequence reads, root first, one sequence after the other."""
    path_offsets: Int
    """[Q+1] where each sequence's runs start in ``path``."""

    @classmethod
    def of(cls, index: TreeIndex) -> Ancestors:
        """Of all sequences of a tree, on the host."""
        host = on_host(index)
        own = host.sequence_offsets.numpy()
        rows, offsets = host.ancestor_rows.numpy(), host.ancestor_offsets.numpy()
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
        run = stretches(number[rows[first]], spans)
        reader = np.repeat(sequence, spans)
        order = np.argsort(run, kind="stable")
        return cls(
            own=own,
            rows=rows,
            offsets=offsets,
            run_starts=all_starts,
            run_lengths=lengths,
            reader=reader[order],
            run=run[order],
            path=run,
            path_offsets=np.searchsorted(reader, np.arange(len(own))),
        )

    def shared_runs(self, heads: int, kv_heads: int, speeds: Speeds) -> NDArray[np.bool_]:
        """[runs] where packing the queries below costs less than copying the keys."""
        copied, packed = self.costs(heads, kv_heads, speeds)
        found: NDArray[np.bool_] = packed < copied
        return found

    def costs(
        self, heads: int, kv_heads: int, speeds: Speeds
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[runs] seconds of copying each run's keys, and of packing the queries below it.

        Nobody packs queries for a run that one sequence reads: its cost is infinite.
        """
        runs = len(self.run_starts)
        queries = np.diff(self.own)[self.reader]
        below = np.bincount(self.run, queries, runs)
        padded = np.bincount(self.run, tiled(queries), runs)
        readers = np.bincount(self.run, minlength=runs)
        copied = self.run_lengths.astype(np.float64) * (
            readers * speeds.move_key * kv_heads + padded * speeds.score * heads
        )
        packed: NDArray[np.float64] = heads * (
            below * speeds.move_query + self.run_lengths * tiled(below) * speeds.score
        )
        packed[readers < 2] = np.inf
        return copied, packed


def _view_calls(
    ancestors: Ancestors, shared: NDArray[np.bool_], budget: int
) -> Iterator[tuple[ViewCall, Int]]:
    """Calls on views, and the runs that each one's keys add up to, ascending."""
    own, starts, lengths = ancestors.own, ancestors.run_starts, ancestors.run_lengths
    queries = np.diff(own)
    reader = np.repeat(np.arange(len(queries)), np.diff(ancestors.path_offsets))
    copied = ~shared[ancestors.path] & (queries[reader] > 0)
    # Each sequence copies runs of ancestors, root first, and then its own.
    owner = np.searchsorted(own, starts, side="right") - 1
    sequence = np.concatenate([reader[copied], owner])
    order = np.argsort(sequence, kind="stable")
    run = np.concatenate([ancestors.path[copied], np.arange(len(starts))])[order]
    first = np.searchsorted(sequence[order], np.arange(len(own)))
    keys = np.diff(np.concatenate([[0], np.cumsum(lengths[run])])[first])
    # A query holds about as much as a key, and sums of its gradient are kept in whole tiles.
    for lo, hi in _groups(keys + tiled(queries), budget, tiled(queries) // TILE):
        if own[hi] == own[lo]:
            continue
        runs = run[first[lo] : first[hi]]
        key_rows, sums = _gathered(starts[runs], lengths[runs])
        yield (
            ViewCall(
                own=slice(int(own[lo]), int(own[hi])),
                packed=_packed(key_rows, sums, queries[lo:hi], keys[lo:hi], True),
            ),
            np.unique(runs),
        )


def _shared_calls(
    ancestors: Ancestors, shared: NDArray[np.bool_], budget: int
) -> Iterator[tuple[SharedCall, Int]]:
    """Calls on shared runs, and the runs."""
    own, chosen = ancestors.own, np.flatnonzero(shared)
    lengths = np.diff(own)
    below = np.bincount(ancestors.run, lengths[ancestors.reader], len(shared)).astype(np.int64)
    for lo, hi in _groups(below[chosen], budget):
        runs = chosen[lo:hi]
        readers = ancestors.reader[np.isin(ancestors.run, runs)]
        readers = readers[lengths[readers] > 0]
        query_rows, queries = _gathered(own[readers], lengths[readers])
        key_lengths = ancestors.run_lengths[runs]
        key_rows, keys = _gathered(ancestors.run_starts[runs], key_lengths)
        yield (
            SharedCall(
                query_rows=torch.from_numpy(query_rows),
                queries=queries,
                packed=_packed(key_rows, keys, below[runs], key_lengths, False),
            ),
            runs,
        )


def _packed(
    key_rows: Int, keys: RowSum, query_lengths: Int, key_lengths: Int, causal: bool
) -> PackedKeys:
    return PackedKeys(
        key_rows=torch.from_numpy(key_rows),
        keys=keys,
        cu_queries=_bounds(query_lengths),
        cu_keys=_bounds(key_lengths),
        max_queries=int(query_lengths.max()),
        max_keys=int(key_lengths.max()),
        causal=causal,
    )


def _gathered(starts: Int, lengths: Int) -> tuple[Int, RowSum]:
    """Rows of some stretches, packed, and their sum; two stretches are the same or disjoint."""
    rows = stretches(starts, lengths)
    first, at, copies = np.unique(starts, return_index=True, return_counts=True)
    offsets = stretches(before(lengths[at] * copies), lengths[at], copies)
    sums = RowSum(
        rows=torch.from_numpy(stretches(first, lengths[at])),
        offsets=torch.from_numpy(np.append(offsets, len(rows))),
        # Sorting by merges takes little time where rows ascend in long stretches.
        entries=torch.from_numpy(np.argsort(rows, kind="stable")),
    )
    return rows, sums


def _folds(calls: list[Int], lengths: Int) -> tuple[tuple[Fold, ...], int]:
    """Folds of calls that reach the given runs, each whole; ``lengths`` [runs]."""
    total = np.bincount(np.concatenate([np.zeros(0, np.int64), *calls]), minlength=len(lengths))
    several = total > 1
    first_slot = before(lengths * several)
    seen = np.zeros_like(total)
    folds = []
    for runs in calls:
        rows = lengths[runs]
        carried = several[runs].astype(np.int64)
        seen[runs] += 1
        folds.append(
            Fold(
                slots=torch.from_numpy(stretches(first_slot[runs] * carried, rows, carried)),
                first=torch.from_numpy(np.repeat(seen[runs] == 1, rows)),
                last=torch.from_numpy(np.repeat(seen[runs] == total[runs], rows)),
            )
        )
    return tuple(folds), int(lengths[several].sum())


def _bounds(lengths: Int) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _groups(sizes: Int, budget: int, tiles: Int | None = None) -> list[tuple[int, int]]:
    """Consecutive groups that stay within a budget where a single member does.

    Kernels launch as many tiles for each member of a group as for the longest: with tiles given,
    a group that would launch mostly empty ones is cut as well.
    """
    groups, start, total, longest, real = [], 0, 0, 0, 0
    counts = np.zeros_like(sizes) if tiles is None else tiles
    for i, (size, count) in enumerate(zip(sizes.tolist(), counts.tolist(), strict=True)):
        longest, real = max(longest, count), real + count
        empty = longest * (i + 1 - start) - real
        if i > start and (total + size > budget or empty > _EMPTY * real + _FEW_TILES):
            groups.append((start, i))
            start, total, longest, real = i, 0, count, count
        total += size
    if start < len(sizes):
        groups.append((start, len(sizes)))
    return groups
