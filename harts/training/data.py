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
    flat_trees: int = 0
    """Trees among `trees` whose advantages are all 0, so that the policy loss learns nothing."""

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
        if int(batch.position_offsets[-1]) == 0:
            raise InputError(
                f"each of {len(batch)} trajectories has one token, so no token is predicted and "
                "there is nothing to train on. Give whole trajectories, prompt and answer."
            )
        learnable, differing = _useful_trajectories(batch, objective)
        usable = tuple(tree for tree in trees if learnable[tree].any())
        if not usable:
            raise InputError(
                f"none of {len(trees)} rollout trees can be learned from: every reward is unknown "
                "or every loss_mask is 0. Give the trajectories a reward column (or advantages)."
            )
        flat = sum(not differing[tree].any() for tree in usable)
        # With a reference, its KL still pulls where no try is better than another.
        if flat == len(usable) and not objective.needs_reference:
            raise InputError(
                f"every advantage is 0 in all of {flat} rollout trees, so there is nothing to "
                "learn: each has one trajectory, or equal rewards. Advantages compare the "
                "trajectories of one tree_id: give the tries of a task the same tree_id and "
                "rewards that differ, or give an advantages column."
            )
        return cls(
            batch=batch,
            trees=usable,
            unusable_trees=len(trees) - len(usable),
            flat_trees=flat,
        )

    def notes(self) -> list[str]:
        """What a reader should know of the data before a run, a sentence each."""
        notes = []
        if self.unusable_trees:
            notes.append(
                f"{self.unusable_trees} trees are left out: no known reward, or every token masked"
            )
        if self.flat_trees:
            notes.append(
                f"{self.flat_trees} of {len(self.trees)} trees add nothing to the policy gradient: "
                "one trajectory, or equal rewards, so every advantage is 0"
            )
        if spanning := _trees_in_several_files(self.batch):
            (tree, files), more = spanning[0], len(spanning) - 1
            others = f" (and {more} more trees span files)" if more else ""
            group = "one group of advantages" if self.batch.advantages is None else "drawn as one"
            notes.append(
                f"tree {tree!r} spans {' and '.join(files)}: {group}; rename to keep apart{others}"
            )
        if len(self.trees) == 1:
            name = self.batch.tree_ids[self.trees[0][0]]
            notes.append(
                f"tree {name!r} is the only one to train on, so every step is the whole of it; a "
                "tree_id column tells tasks apart"
            )
        return notes

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

    def trees(self, step: int) -> NDArray[np.int64]:
        """The trees that step ``step`` (from 0) draws, as places in ``data.trees``."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data.trees))
        return order[place * self.trees_per_step : (place + 1) * self.trees_per_step]

    def rows(self, step: int) -> NDArray[np.int64]:
        """Rows of all trajectories of step ``step`` (from 0), ascending."""
        return np.sort(np.concatenate([self.data.trees[tree] for tree in self.trees(step)]))


def _read(config: DataConfig) -> TrajectoryBatch:
    if config.preset is not None:
        return synthesize(config.preset, config.seed)
    return read_trajectories(config.files)


def _useful_trajectories(
    batch: TrajectoryBatch, objective: PolicyObjective
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[N] whether a trajectory has a position with a loss, and one whose advantage is not 0."""
    advantages = objective.advantages(batch)
    counted = batch.at_positions(batch.loss_mask) & ~np.isnan(advantages)

    def any_of(positions: NDArray[np.bool_]) -> NDArray[np.bool_]:
        total = np.concatenate([[0], np.cumsum(positions)])
        return np.asarray(np.diff(total[batch.position_offsets]) > 0)

    differing = any_of(counted & (advantages != 0))
    if batch.advantages is None:
        # The mean of equal rewards can be off by a rounding error.
        differing &= ~_equal_in_tree(batch)
    return any_of(counted), differing


def _equal_in_tree(batch: TrajectoryBatch) -> NDArray[np.bool_]:
    """[N] whether the known rewards of a trajectory's tree are all the same."""
    names, group = np.unique(np.asarray(batch.tree_ids, dtype=np.str_), return_inverse=True)
    least, most = np.full((2, len(names)), np.nan)
    np.fmin.at(least, group, batch.rewards)
    np.fmax.at(most, group, batch.rewards)
    return np.asarray((least == most)[group])


def _trees_in_several_files(batch: TrajectoryBatch) -> list[tuple[str, list[str]]]:
    """Trees with trajectories of more than one file, and those files, in order."""
    source = batch.provenance
    if source is None or len(source.files) < 2:
        return []
    files: dict[str, dict[int, None]] = {}
    for tree, file in zip(batch.tree_ids, source.file_of.tolist(), strict=True):
        files.setdefault(tree, {})[file] = None
    return [(t, [source.files[f] for f in found]) for t, found in files.items() if len(found) > 1]
