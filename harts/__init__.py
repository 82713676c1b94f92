"""HARTS trains hybrid-attention agents on rollout trees: every shared token once, exactly.

Planning (this namespace) needs NumPy and Arrow only; models, operators and training live in
``harts.models``, ``harts.ops`` and ``harts.training`` and need PyTorch.
"""

from harts.errors import HartsError, InputError, PlanError, UnsupportedError
from harts.forest import PrefixForest
from harts.layout import CompactLayout, build_layout
from harts.planning.calls import CallPlan, plan_calls
from harts.planning.step import Microbatch, StepPlan, plan_step
from harts.trajectories import TrajectoryBatch, read_trajectories, write_trajectories

__version__ = "0.1.0"

__all__ = [
    "CallPlan",
    "CompactLayout",
    "HartsError",
    "InputError",
    "Microbatch",
    "PlanError",
    "PrefixForest",
    "StepPlan",
    "TrajectoryBatch",
    "UnsupportedError",
    "build_layout",
    "plan_calls",
    "plan_step",
    "read_trajectories",
    "write_trajectories",
]
