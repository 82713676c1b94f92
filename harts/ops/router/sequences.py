"""The load-balancing loss of every trajectory by itself, over rows that trajectories share.

Shapes: R physical rows (padding included) · N trajectories · X runs of rows that the same
trajectories pass · E experts · k experts per token · n tokens of a trajectory.

A trajectory's loss is E / (k n^2) * sum_e count_e * mass_e over its own n tokens: linear in each
row's probabilities, with weights that are counts. So the sum over trajectories is one product of
the probabilities with weights of the runs, and rows that lie on other ranks need only have their
counts sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts.layout import CompactLayout
from harts.ops.device_copy import on_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryRows:
    """Which trajectories pass which rows."""

    runs: Tensor
    """[R] run of each row; X at padding."""
    passes: Tensor
    """[N, X] float64, 1 where the trajectory passes the run."""
    lengths: Tensor
    """[N] float64, n."""

    @classmethod
    def from_layout(
        cls, layout: CompactLayout, device: torch.device | str | None = None
    ) -> TrajectoryRows:
        """Find the runs of a layout.

        The trajectories of a row are among those of the row before it, so a run starts where
        their number changes.
        """
        rows, offsets = layout.member_rows, layout.member_offsets
        count = layout.multiplicity[rows]
        starts = np.empty(len(rows), dtype=np.bool_)
        starts[1:] = count[1:] != count[:-1]
        starts[offsets[:-1]] = True
        at = np.flatnonzero(starts)
        first_rows, run = np.unique(rows[at], return_inverse=True)
        runs = np.full(layout.rows, len(first_rows), dtype=np.int64)
        runs[rows] = run[np.cumsum(starts) - 1]
        passes = np.zeros((len(offsets) - 1, len(first_rows)))
        passes[np.searchsorted(offsets, at, side="right") - 1, run] = 1.0
        host = cls(
            runs=torch.from_numpy(runs),
            passes=torch.from_numpy(passes),
            lengths=torch.from_numpy(np.diff(offsets).astype(np.float64)),
        )
        return on_device(host, device)


def counts_of_runs(rows: TrajectoryRows, selected: Tensor, experts: int) -> Tensor:
    """[X, E] float64: how often rows of each run chose each expert.

    Args:
        rows: runs of the R rows at hand, which may be a part of a microbatch's.
        selected: [R, k] experts chosen; anything at padding.
        experts: E.
    """
    runs = rows.passes.shape[1]
    real = (rows.runs < runs)[:, None].expand_as(selected)
    flat = torch.where(real, rows.runs[:, None] * experts + selected, 0).flatten()
    counts = rows.passes.new_zeros(runs * experts)
    return counts.index_add(0, flat, real.flatten().to(counts.dtype)).view(runs, experts)


def sequence_balancing_loss(
    rows: TrajectoryRows, probability: Tensor, counts: Tensor, top_k: int
) -> Tensor:
    """Sum over the trajectories of each one's `load_balancing_loss`, differentiable.

    Args:
        rows: runs of the R rows at hand.
        probability: [R, E] routing probabilities; finite at padding.
        counts: [X, E] of all rows of the microbatch, over all ranks.
        top_k: k.

    Returns:
        [] what the rows at hand add to the sum.
    """
    scale = probability.shape[1] / (top_k * rows.lengths.square())
    weights = rows.passes.T @ (scale[:, None] * (rows.passes @ counts))
    padded = torch.cat([weights, weights.new_zeros(1, weights.shape[1])]).to(probability.dtype)
    return (probability * padded[rows.runs]).sum()
