"""What one call hands to the kernels: sizes, rows in two parts, and pinned launches.

Shapes: P buffer rows (in place, then copied) · R rows in place · E copied rows · Z chunks ·
B chunk length · H query/key heads · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts.ops.delta_rule.gpu.chunk_lists import ChunkList
from harts.ops.delta_rule.gpu.row_plan import RowPlan


class Sizes(NamedTuple):
    """Static sizes of one call."""

    heads: int
    groups: int
    key_dim: int
    value_dim: int
    chunk_size: int


class Columns(NamedTuple):
    """Row tensors [rows, ...]: the caller's, or those of one part."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_decay: Tensor | None
    """None in backward, which has the sums."""


class Prepared(NamedTuple):
    """What forward keeps for backward besides its inputs."""

    decay: Tensor
    """[P, G, K] or [P, G] float32, log2, summed from the chunk's start."""
    solve: Tensor
    """[P, G, B] inverse of the chunk's triangular matrix."""
    query_key: Tensor | None
    """[P, G, B] scores within the chunk; Gated DeltaNet makes them again."""


class InParts(NamedTuple):
    """A row tensor in its two parts, which need not be neighbours in memory."""

    in_place: Tensor
    """[R, ...]."""
    copied: Tensor
    """[E, ...]; never read where no row is copied."""


class Expanded(NamedTuple):
    """Inputs of the state pass."""

    w: Tensor
    """[P, G, K] the paper's W."""
    u: Tensor
    """[P, G, V] the paper's U."""
    key: InParts
    """[R, G, K] and [E, G, K] keys decayed to the chunk's end, or plain keys with H heads."""
    query: InParts
    """The same of queries, decayed from the chunk's start, or plain; read in backward only."""


class StateGradients(NamedTuple):
    """What the backward state pass leaves for the chunk-parallel gradients."""

    values: Tensor
    """[P, G, V] gradient of D."""
    states: Tensor
    """[Z, G, K, V] gradient of the state after each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One contiguous part of the row buffer and the chunks in it."""

    chunk_list: ChunkList
    rows: slice
    """Its rows of the buffer."""
    chunks: slice
    """Its chunks of state buffers."""
    columns: Columns

    @property
    def count(self) -> int:
        """Chunks in this part."""
        return self.chunk_list.chunks.shape[0]

    def of(self, rows: InParts) -> Tensor:
        """The tensor of this part."""
        return rows.copied if self.rows.start else rows.in_place

    def arguments(self, sizes: Sizes, value: bool = True) -> dict[str, Any]:
        """Arguments that every chunk-parallel kernel of fla takes."""
        named: dict[str, Any] = {
            "cu_seqlens": self.chunk_list.cu_seqlens,
            "chunk_indices": self.chunk_list.chunks,
            "T": self.chunk_list.rows,
            "H": sizes.heads,
            "HV": sizes.groups,
            "K": sizes.key_dim,
            "BT": sizes.chunk_size,
            "IS_VARLEN": True,
        }
        if value:
            named["V"] = sizes.value_dim
        return named


class Config(NamedTuple):
    """A launch configuration. Pinned, because another one may round differently."""

    warps: int
    stages: int = 2


def launch(kernel: Any, grid: tuple[int, ...], config: Config, **arguments: Any) -> None:
    """Launch one of fla's kernels past its autotuner, in a configuration that never changes."""
    while hasattr(kernel, "fn") and hasattr(kernel.fn, "fn"):
        kernel = kernel.fn
    kernel[grid](**arguments, num_warps=config.warps, num_stages=config.stages)


def make_parts(plan: RowPlan, columns: Columns) -> list[Part]:
    """Rows in place as they are; rows of mixed chunks gathered. Parts without chunks are left out.

    Columns are the caller's [R, ...].
    """
    in_place, copied = plan.in_place, plan.copied_chunks
    first = in_place.chunks.shape[0]
    parts = [
        Part(
            chunk_list=in_place,
            rows=slice(0, plan.rows),
            chunks=slice(0, first),
            columns=columns,
        )
    ]
    if plan.copied_rows:
        rows = plan.copied.rows
        query, key, value, beta = (x.index_select(0, rows) for x in columns[:4])
        decay = columns.log_decay
        gathered = Columns(
            query, key, value, beta, None if decay is None else decay.index_select(0, rows)
        )
        parts.append(
            Part(
                chunk_list=copied,
                rows=slice(plan.rows, plan.rows + plan.copied_rows),
                chunks=slice(first, plan.states.chunks),
                columns=gathered,
            )
        )
    return [part for part in parts if part.count]


def buffer_rows(plan: RowPlan) -> int:
    """P."""
    return plan.rows + plan.copied_rows


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor: kernels write every entry that is read."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def sum_groups(x: Tensor, heads: int) -> Tensor:
    """Add n tensors [n, rows, G, K], and the value heads that share a query/key head: [rows, H, K].

    The sum is in float32 and rounded once, to the dtype of x.
    """
    tensors, rows, groups, key_dim = x.shape
    if tensors == 1 and groups == heads:
        return x[0]
    return x.view(tensors, rows, heads, groups // heads, key_dim).sum((0, 3))


def cast_all(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtype of what they belong to."""
    return [x.to(other.dtype) for x, other in zip(tensors, like, strict=True)]
