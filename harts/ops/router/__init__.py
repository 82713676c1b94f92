"""Multiplicity-weighted statistics of a mixture-of-experts router, and the losses made of them."""

from harts.ops.router.reference import (
    RouterStatistics,
    load_balancing_loss,
    router_statistics,
    updated_expert_bias,
    z_loss,
)
from harts.ops.router.sequences import TrajectoryRows

__all__ = [
    "RouterStatistics",
    "TrajectoryRows",
    "load_balancing_loss",
    "router_statistics",
    "updated_expert_bias",
    "z_loss",
]
