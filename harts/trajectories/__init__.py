"""Trajectories as one validated, read-only record, and everything that becomes one.

Files, padded dictionaries and lists name their columns alike: by token `token_ids` (required),
`loss_mask`, `logprobs`, `ref_logprobs`, `advantages`, `identity`; by row rewards and ids.
"""

from harts.trajectories.arrays import from_lists, from_padded
from harts.trajectories.concatenation import concatenate
from harts.trajectories.files import read_trajectories
from harts.trajectories.record import Provenance, TrajectoryBatch
from harts.trajectories.writing import write_trajectories

__all__ = [
    "Provenance",
    "TrajectoryBatch",
    "concatenate",
    "from_lists",
    "from_padded",
    "read_trajectories",
    "write_trajectories",
]
