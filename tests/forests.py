"""Random rollout forests for tests, and one microbatch laid out from them."""

from collections.abc import Sequence

import numpy as np

from harts.forest import PrefixForest
from harts.layout import CompactLayout, build_layout
from harts.planning.calls import CallPlan, plan_calls
from harts.trajectories import TrajectoryBatch, from_lists


def batch_of(token_lists: Sequence[Sequence[int]], **columns: object) -> TrajectoryBatch:
    """A batch from plain lists of token ids, in this order."""
    return from_lists(token_ids=[np.array(t, dtype=np.int32) for t in token_lists], **columns)


def random_batch(
    rng: np.random.Generator,
    *,
    trajectories: int = 8,
    max_length: int = 40,
    vocabulary: int = 3,
    chunk_size: int = 4,
) -> TrajectoryBatch:
    """Trajectories that branch off earlier ones anywhere, often next to a chunk boundary.

    Exact duplicates, strict prefixes, forks at 0 and one-token trajectories all occur.
    """
    made: list[np.ndarray] = []
    for _ in range(trajectories):
        tail = rng.integers(0, vocabulary, size=rng.integers(1, max_length + 1))
        kind = rng.integers(0, 8)
        if not made or kind == 0:
            made.append(tail)
            continue
        base = made[rng.integers(len(made))]
        if kind == 1:
            made.append(base.copy())
            continue
        if kind == 2:
            made.append(base[: rng.integers(1, len(base) + 1)])
            continue
        cut = int(rng.integers(0, len(base) + 1))
        if kind >= 5:
            near = rng.integers(0, len(base) // chunk_size + 1) * chunk_size + rng.integers(-1, 2)
            cut = int(np.clip(near, 0, len(base)))
        made.append(np.concatenate([base[:cut], tail]))
    order = rng.permutation(len(made))
    return batch_of([made[i] for i in order])


def lay_out(
    batch: TrajectoryBatch,
    *,
    chunk_size: int = 4,
    row_multiple: int = 1,
    share: bool = True,
) -> tuple[PrefixForest, CallPlan, CompactLayout]:
    """The whole batch as one microbatch."""
    forest = PrefixForest.build(batch, share=share)
    calls = plan_calls(forest.segment_parent, forest.segment_start, forest.segment_end, chunk_size)
    return forest, calls, build_layout(batch, forest, calls, row_multiple=row_multiple)


def hard_tree(vocabulary: int, seed: int = 0) -> TrajectoryBatch:
    """A binary tree four forks deep, and a comb of tiny branches below one of its leaves.

    Forks lie at B-1, B and B+1 of chunks of B = 64 rows.
    """
    chunk = 64
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, vocabulary, count).tolist()

    def grow(prefix: list[int], ends: list[list[int]]) -> list[list[int]]:
        """Branch twice at each of the next depths; a depth lists its two branches' ends."""
        if not ends:
            return [prefix]
        grown = [prefix + tokens(end - len(prefix)) for end in ends[0]]
        return [leaf for branch in grown for leaf in grow(branch, ends[1:])]

    trunk = tokens(chunk - 1)
    leaves = grow(trunk, [[chunk * 2, chunk * 2 + 1], [chunk * 3 + 5, 200], [257, 263], [270, 275]])
    comb = leaves[0]
    for length in (1, 2, 1, 3, 1):
        leaves.append(comb[:-1] + tokens(length))
        comb = comb[:-1] + tokens(4)
        leaves.append(comb)
    leaves += [trunk[:10] + tokens(2), tokens(1), tokens(70), leaves[3], leaves[3][:100]]
    order = rng.permutation(len(leaves))
    return batch_of(
        [leaves[i] for i in order],
        tree_ids=[str(i % 3) for i in range(len(leaves))],
        rewards=rng.normal(size=len(leaves)),
        logprobs=[rng.normal(-4, 0.3, len(leaves[i])).astype(np.float32) for i in order],
        ref_logprobs=[rng.normal(-4, 0.3, len(leaves[i])).astype(np.float32) for i in order],
    )
