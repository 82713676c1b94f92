"""Where a run's trajectories come from, and which of them each step trains on.

Shapes: S semantic positions · N trajectories.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError
from harts.objectives import PolicyObjective
from harts.synth import PRESETS, synthesize
from harts.trajectories import TrajectoryBatch, read_trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Files of trajectories, or a synthetic workload; a configuration may say ``data: FILE``."""

    files: list[str] = field(default_factory=list)
    """Parquet or JSON lines; relative paths start at the working directory."""
    preset: str | None = None
    """Name of a synthetic workload, used when there are no files."""
    seed: int = 0
    """Seed of the synthetic workload."""

    def __post_init__(self) -> None:
        if bool(self.files) == (self.preset is not None):
            raise InputError(
                "expected either files or a preset, "
                f"got {'both' if self.files else 'neither'}. Give data=FILE, or data.preset=NAME."
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise InputError(f"preset must be one of {sorted(PRESETS)}, got {self.preset!r}")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingData:
    """The trajectories of a run, tree by tree."""

    batch: TrajectoryBatch
    trees: tuple[NDArray[np.int64], ...]
    """Rows of each tree that a step may draw, trees in order of first appearance."""
    unusable_trees: int
    """Trees that no loss can learn from: every reward unknown, or every token masked."""

    @classmethod
    def load(cls, config: DataConfig, objective: PolicyObjective) -> "TrainingData":
        """Read or make the trajectories and group them by tree.

        Raises:
            InputError: a file is unreadable or invalid, or no tree can be learned from.
        """
        return cls.of(_read(config), objective)

    @classmethod
    def of(cls, batch: TrajectoryBatch, objective: PolicyObjective) -> "TrainingData":
        """Group a batch by tree; `objective` says which positions have an advantage."""
        rows: dict[str, list[int]] = {}
        for row, tree in enumerate(batch.tree_ids):
            rows.setdefault(tree, []).append(row)
        trees = [np.array(r, dtype=np.int64) for r in rows.values()]
        learnable = _learnable_trajectories(batch, objective)
        usable = tuple(tree for tree in trees if learnable[tree].any())
        if not usable:
            raise InputError(
                f"none of {len(trees)} rollout trees can be learned from: every reward is unknown "
                "or every loss_mask is 0. Give the trajectories a reward column (or advantages)."
            )
        return cls(batch=batch, trees=usable, unusable_trees=len(trees) - len(usable))

    def fingerprint(self) -> str:
        """SHA-256 of everything in the batch that training can see."""
        batch = self.batch
        digest = hashlib.sha256()
        columns: Sequence[NDArray[np.generic] | None] = (
            batch.tokens,
            batch.offsets,
            batch.loss_mask,
            batch.rewards,
            batch.logprobs,
            batch.ref_logprobs,
            batch.advantages,
            batch.identity,
        )
        for column in columns:
            content = b"absent" if column is None else np.ascontiguousarray(column).tobytes()
            digest.update(len(content).to_bytes(8, "little") + content)
        digest.update("\0".join(batch.tree_ids).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeSampler:
    """Draws each step's trees without replacement, in a fresh seeded order every epoch.

    The order depends on seed and step alone, so a resumed run needs no saved position. The last
    step of an epoch takes the trees that are left.
    """

    data: TrainingData
    trees_per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every tree is drawn once."""
        return -(-len(self.data.trees) // self.trees_per_step)

    def rows(self, step: int) -> NDArray[np.int64]:
        """Rows of all trajectories of step ``step`` (from 0), ascending."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data.trees))
        drawn = order[place * self.trees_per_step : (place + 1) * self.trees_per_step]
        return np.sort(np.concatenate([self.data.trees[tree] for tree in drawn]))


def _read(config: DataConfig) -> TrajectoryBatch:
    if config.preset is not None:
        return synthesize(config.preset, config.seed)
    return read_trajectories(config.files)


def _learnable_trajectories(
    batch: TrajectoryBatch, objective: PolicyObjective
) -> NDArray[np.bool_]:
    """[N] whether a trajectory has a position with a loss."""
    counted = batch.at_positions(batch.loss_mask) & ~np.isnan(objective.advantages(batch))
    total = np.concatenate([[0], np.cumsum(counted)])
    return np.asarray(np.diff(total[batch.position_offsets]) > 0)
