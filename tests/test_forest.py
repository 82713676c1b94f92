"""The prefix forest against sets of prefixes."""

from itertools import pairwise

import numpy as np
import pytest

from harts.forest import PrefixForest, sorted_prefixes
from harts.trajectories import TrajectoryBatch
from tests.forests import batch_of, random_batch


def prefixes(batch: TrajectoryBatch, row: int) -> list[tuple[object, ...]]:
    """Every prefix of one trajectory: the definition of what may be shared."""
    a, b = batch.offsets[row], batch.offsets[row + 1]
    keys: list[object] = batch.tokens[a:b].tolist()
    if batch.identity is not None:
        keys = list(zip(keys, batch.identity[a:b].tolist(), strict=True))
    return [tuple(keys[: i + 1]) for i in range(len(keys))]


def assert_matches_oracle(batch: TrajectoryBatch, forest: PrefixForest) -> None:
    rows = forest.members.tolist()
    per_member = [prefixes(batch, row) for row in rows]
    nodes = {p for member in per_member for p in member}
    assert forest.compact_tokens == len(nodes)
    number: dict[tuple[object, ...], int] = {}
    for mine, own in zip(per_member, forest.compact_map(), strict=True):
        for prefix, compact in zip(mine, own.tolist(), strict=True):
            assert number.setdefault(prefix, compact) == compact
    assert sorted(number.values()) == list(range(len(nodes)))
    assert_segments_match(nodes, number, forest)


def assert_segments_match(
    nodes: set[tuple[object, ...]],
    number: dict[tuple[object, ...], int],
    forest: PrefixForest,
) -> None:
    children: dict[tuple[object, ...], list[tuple[object, ...]]] = {(): []}
    for p in nodes:
        children.setdefault(p, [])
        children.setdefault(p[:-1], []).append(p)
    heads = {p for p in nodes if len(p) == 1 or len(children[p[:-1]]) > 1}
    prefix_of = {compact: p for p, compact in number.items()}
    seen = set()
    for v, (start, end) in enumerate(zip(forest.segment_start, forest.segment_end, strict=True)):
        first = int(forest.segment_offset[v])
        head, tail = prefix_of[first], prefix_of[first + int(end - start) - 1]
        assert (len(head), len(tail)) == (start + 1, end)
        assert tail[: len(head)] == head
        assert len(children[tail]) != 1
        parent = int(forest.segment_parent[v])
        assert parent < v
        if parent >= 0:
            last = int(forest.segment_offset[parent] + forest.segment_lengths[parent]) - 1
            assert prefix_of[last] == head[:-1]
        else:
            assert start == 0
        path = prefixes_of_member(forest, prefix_of, int(forest.segment_member[v]))
        assert tail in path
        seen.add(head)
    assert seen == heads


def prefixes_of_member(
    forest: PrefixForest, prefix_of: dict[int, tuple[object, ...]], member: int
) -> set[tuple[object, ...]]:
    return {prefix_of[c] for c in forest.compact_map()[member].tolist()}


@pytest.mark.parametrize("block", range(10))
def test_forest_equals_sets_of_prefixes_on_ten_thousand_random_forests(block: int) -> None:
    rng = np.random.default_rng(block)
    for _ in range(1000):
        batch = random_batch(rng, trajectories=int(rng.integers(1, 9)), max_length=12)
        assert_matches_oracle(batch, PrefixForest.build(batch))


def test_subset_equals_a_forest_built_from_the_subset_alone() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        batch = random_batch(rng, trajectories=8, max_length=12)
        keep = np.flatnonzero(rng.random(8) < 0.5)
        if len(keep) == 0:
            continue
        subset = PrefixForest.build(batch).subset(keep)
        assert_matches_oracle(batch, subset)


def test_a_duplicate_and_a_strict_prefix_make_no_segment() -> None:
    forest = PrefixForest.build(batch_of([[1, 2, 3], [1, 2], [1, 2, 3], [1]]))
    assert forest.segment_start.tolist() == [0]
    assert forest.segment_end.tolist() == [3]
    assert forest.members.tolist() == [3, 1, 0, 2]
    assert np.bincount(np.concatenate(forest.compact_map())).tolist() == [4, 3, 2]


def test_fork_at_zero_gives_two_roots() -> None:
    forest = PrefixForest.build(batch_of([[2, 1], [1, 1]]))
    assert forest.segment_parent.tolist() == [-1, -1]
    assert forest.compact_tokens == 4


def test_one_token_trajectories_share_their_only_row() -> None:
    forest = PrefixForest.build(batch_of([[7], [7], [8]]))
    assert forest.compact_tokens == 2


def test_retokenised_or_rerouted_prefixes_with_equal_tokens_are_not_shared() -> None:
    """Peers' fault 13: equal text, other computation; the identity key keeps them apart."""
    identity = [np.array([0, 0, 5]), np.array([0, 1, 5]), np.array([0, 0, 5])]
    batch = batch_of([[1, 2, 3], [1, 2, 3], [1, 2, 3]], identity=identity)
    forest = PrefixForest.build(batch)
    assert forest.compact_tokens == 5
    assert_matches_oracle(batch, forest)
    ignoring = PrefixForest.build(batch_of([[1, 2, 3]] * 3))
    assert ignoring.compact_tokens == 3


def test_negative_identities_are_distinct_keys() -> None:
    batch = batch_of([[1, 1], [1, 1]], identity=[np.array([-1, 0]), np.array([1, 0])])
    assert PrefixForest.build(batch).compact_tokens == 4


def test_without_sharing_every_trajectory_is_a_tree_of_its_own() -> None:
    batch = batch_of([[1, 2], [1, 2], [1], [3]])
    forest = PrefixForest.build(batch, share=False)
    assert forest.compact_tokens == batch.raw_tokens
    assert forest.segment_parent.tolist() == [-1] * 4


def test_order_is_lexicographic_by_token_value_not_by_byte() -> None:
    order, lcp = sorted_prefixes(batch_of([[256], [255, 1], [1_000_000], [255]]))
    assert order.tolist() == [3, 1, 0, 2]
    assert lcp.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("rows", range(1, 12))
def test_equal_trajectories_keep_their_order(rows: int) -> None:
    order, lcp = sorted_prefixes(batch_of([[4, 4 + row % 2] for row in range(rows)]))
    assert order.tolist() == [*range(0, rows, 2), *range(1, rows, 2)]
    assert sorted(lcp.tolist()) == [0, *[1] * (rows > 1), *[2] * (rows - 2)]


@pytest.mark.parametrize("rows", [2, 3, 5, 8, 11])
def test_prefixes_that_part_far_in_are_compared_to_the_token(rows: int) -> None:
    """Also where one block of tokens that is compared at once ends and the next begins."""
    rng = np.random.default_rng(rows)
    blocks = np.cumsum([0, 64, 1024, 16_384, 16_384])
    forks = rng.permutation(np.concatenate([blocks - 1, blocks, blocks + 1])[1:])[:rows]
    trunk = rng.integers(0, 5, 40_000)
    batch = batch_of([[*trunk[:fork], 9 + i] for i, fork in enumerate(forks.tolist())])
    order, lcp = sorted_prefixes(batch)
    tokens = [batch.tokens[a:b].tolist() for a, b in pairwise(batch.offsets.tolist())]
    assert order.tolist() == sorted(range(rows), key=tokens.__getitem__)
    parted = np.minimum(forks[order][:-1], forks[order][1:])
    assert lcp.tolist() == [0, *parted.tolist()]


def test_deep_chain_and_wide_star_need_no_recursion() -> None:
    n = 100_000
    deep = PrefixForest.from_lcp(
        np.arange(n), np.arange(2, n + 2), np.concatenate([[0], np.arange(1, n)])
    )
    assert len(deep.segment_parent) == 2 * n - 1
    star = PrefixForest.from_lcp(np.arange(n), np.full(n, 65), np.append(0, np.full(n - 1, 64)))
    assert len(star.segment_parent) == n + 1
