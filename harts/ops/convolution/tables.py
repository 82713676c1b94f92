"""Small index tables by which compiled kernels read a tree of rows.

Shapes: R physical rows · C compact rows · W convolution width · E rows in the heads of sequences ·
F rows that other sequences' heads read · L reads of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harts.ops.convolution.reference import head_sources
from harts.ops.device_copy import on_device
from harts.ops.index_cache import on_host
from harts.ops.tree_index import TreeIndex

GROUP = 4
"""Rows that the kernels take together; at least W-1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvolutionTables:
    """Context of each row, and who reads rows across sequences. All int32."""

    sources: Tensor
    """[W-1, C] row d+1 tokens before each row in its trajectories; -1 before the first token."""
    depth: Tensor
    """[C] rows before it in its own sequence, at most W-1."""
    head: Tensor
    """[C] number of the row among the E in heads of sequences; -1 elsewhere."""
    shared: Tensor
    """[C] number of the row among the F that other sequences read; -1 elsewhere."""
    special: Tensor
    """[groups] 1 where one of 4 rows is in a head, or W-1 after one of the F; else 0."""
    heads: int
    """E."""
    shared_rows: Tensor
    """[F] rows, ascending, that heads of other sequences read."""
    reader_offsets: Tensor
    """[F+1] bounds of each shared row's readers."""
    reader_heads: Tensor
    """[L] number among the E of each reader, ascending for each shared row."""
    reader_taps: Tensor
    """[L] how many tokens after the shared row the reader is; 1 to W-1."""


def convolution_tables(index: TreeIndex, width: int) -> ConvolutionTables:
    """Tables of one index for one width, on the index's device.

    What is as small as the heads is found on the host, so that its sizes are known there and
    nothing waits for the device.
    """
    device = index.sequence_offsets.device
    heads, sources, *reads = on_device(_head_tables(on_host(index), width), device)
    shared_rows, offsets, reader, taps = reads
    rows = torch.arange(index.compact_rows, device=device)
    depth = _depth(index, rows).clamp(max=width - 1)
    all_sources = rows - torch.arange(1, width, device=device)[:, None]
    all_sources[:, heads] = sources
    number = torch.full_like(rows, -1)
    number[heads] = torch.arange(len(heads), device=device)
    shared = torch.full_like(rows, -1)
    shared[shared_rows] = torch.arange(len(shared_rows), device=device)
    special = F.pad(number >= 0, (0, -len(number) % GROUP + GROUP))
    special[width - 1 : width - 1 + len(shared)] |= shared >= 0
    return ConvolutionTables(
        sources=all_sources.int().contiguous(),
        depth=depth.int(),
        head=number.int(),
        shared=shared.int(),
        special=special.view(-1, GROUP).any(1).int(),
        heads=len(heads),
        shared_rows=shared_rows.int(),
        reader_offsets=offsets.int(),
        reader_heads=reader.int(),
        reader_taps=taps.int(),
    )


def _head_tables(index: TreeIndex, width: int) -> tuple[Tensor, ...]:
    """Heads [E], their sources [W-1, E], shared rows [F], and their readers' offsets [F+1].

    Then number and tap of each reader [L].
    """
    heads, sources = head_sources(index, width)
    read, taps, reader = _cross_reads(sources[1:], _depth(index, heads))
    shared_rows, counts = torch.unique_consecutive(read, return_counts=True)
    return heads, sources[1:], shared_rows, F.pad(counts.cumsum(0), (1, 0)), reader, taps


def _depth(index: TreeIndex, rows: Tensor) -> Tensor:
    """Rows before each of some rows [n] in its own sequence."""
    sequence = torch.searchsorted(index.sequence_offsets, rows, right=True) - 1
    return rows - index.sequence_offsets[sequence]


def _cross_reads(sources: Tensor, depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row read, tap and head of every read [L] of another sequence, by row, then tap, then head."""
    tap = torch.arange(1, len(sources) + 1, device=sources.device)[:, None]
    tap, head = ((sources >= 0) & (tap > depth)).nonzero(as_tuple=True)
    read, order = torch.sort(sources[tap, head], stable=True)
    return read, tap[order] + 1, head[order]
