"""Small excerpts of a batch that keep its trees: what checks and benchmarks run on.

Shapes: S semantic positions · N trajectories · A vocabulary.
"""

import dataclasses
from typing import Any

import numpy as np

from harts.forest import sorted_prefixes
from harts.trajectories import TrajectoryBatch


def bounded_excerpt(batch: TrajectoryBatch, tokens: int) -> TrajectoryBatch:
    """Take trajectories tree by tree until ``tokens`` are reached; input order is kept.

    A tree that does not fit whole gives its first trajectories. At least one trajectory is taken,
    however long, so that the excerpt is never empty.
    """
    by_tree: dict[str, list[int]] = {}
    for row, tree in enumerate(batch.tree_ids):
        by_tree.setdefault(tree, []).append(row)
    taken: list[int] = []
    left = tokens
    for rows in by_tree.values():
        for row in rows:
            if batch.lengths[row] <= left or not taken:
                taken.append(row)
                left -= int(batch.lengths[row])
    return batch.select(np.array(sorted(taken), dtype=np.int64))


def crop_shared_heads(batch: TrajectoryBatch, *, keep: int, length: int) -> TrajectoryBatch:
    """Drop what all trajectories of a tree share but its last ``keep`` tokens; cut at ``length``.

    Trajectories with a common head form the same tree behind it, so forks and their positions
    relative to each other stay, and much shorter trajectories still show them.
    """
    order, lcp = sorted_prefixes(batch)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    rows_of: dict[str, list[int]] = {}
    for row, tree in enumerate(batch.tree_ids):
        rows_of.setdefault(tree, []).append(row)
    start = np.zeros(len(batch), dtype=np.int64)
    for rows in rows_of.values():
        places = np.sort(place[rows])
        between = lcp[places[0] + 1 : places[-1] + 1]
        shared = int(between.min()) if len(between) else 0
        shared = min(shared, int(batch.lengths[rows].min()) - 1)
        start[rows] = max(0, shared - keep)
    first = batch.offsets[:-1] + start
    last = np.minimum(batch.offsets[1:], first + length)
    index = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
    return _take_positions(batch, index, last - first)


def _take_positions(
    batch: TrajectoryBatch, index: np.ndarray, lengths: np.ndarray
) -> TrajectoryBatch:
    per_token = ("tokens", "loss_mask", "logprobs", "ref_logprobs", "advantages", "identity")
    columns: dict[str, Any] = {name: getattr(batch, name) for name in per_token}
    kept: dict[str, Any] = {
        name: None if column is None else column[index] for name, column in columns.items()
    }
    return dataclasses.replace(
        batch,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        **kept,
    )


def renumber_tokens(batch: TrajectoryBatch) -> tuple[TrajectoryBatch, int]:
    """Number the token ids that occur 0, 1, ...; return the batch and how many there are.

    A renumbering changes neither which prefixes are equal nor any gradient of the rows in use,
    and spares a small model the full vocabulary.
    """
    used, renumbered = np.unique(batch.tokens, return_inverse=True)
    tokens = renumbered.reshape(-1).astype(np.int32)
    return dataclasses.replace(batch, tokens=tokens), len(used)
