"""An independent reading of what a grouping costs, from raw token lists alone."""

from collections.abc import Iterator, Sequence

import numpy as np

from harts.planning.intervals import IntervalWork
from tests.planning.oracles import Tokens, arrays_of, trie_size


def work_of(trajectories: Sequence[Tokens]) -> IntervalWork:
    """Interval work of trajectories that are already sorted."""
    return IntervalWork.build(*arrays_of(trajectories))


def checked_works(
    trajectories: Sequence[Tokens], groups: Sequence[np.ndarray], replicas: int, capacity: int
) -> list[int]:
    """Works of the groups as numbers of different prefixes, after checking every rule."""
    assert sorted(i for group in groups for i in group.tolist()) == list(range(len(trajectories)))
    assert all(group.tolist() == sorted(group.tolist()) for group in groups)
    assert all(group.size for group in groups)
    assert len(groups) % replicas == 0
    works = [trie_size([trajectories[i] for i in group]) for group in groups]
    assert max(works) <= capacity
    return works


def subset_works(trajectories: Sequence[Tokens]) -> np.ndarray:
    """Work of every subset by bit mask: prefixes that any of its members has; [2**N]."""
    owners: dict[Tokens, int] = {}
    for i, tokens in enumerate(trajectories):
        for n in range(1, len(tokens) + 1):
            owners[tokens[:n]] = owners.get(tokens[:n], 0) | 1 << i
    bits = np.array(list(owners.values()))
    return ((bits[:, None] & np.arange(1 << len(trajectories))) != 0).sum(axis=0)


def least_totals(works: np.ndarray, capacity: int, replicas: int) -> int | None:
    """Least total over all set partitions within capacity into a multiple of D; None if none.

    ``reached[mask]`` maps the count modulo D to the least total of a partition of ``mask``.
    """
    reached: list[dict[int, int]] = [{} for _ in works]
    reached[0][0] = 0
    for mask in range(1, len(works)):
        low = mask & -mask
        rest = mask ^ low
        sub = rest
        while True:
            group = sub | low
            if works[group] <= capacity:
                for count, total in reached[mask ^ group].items():
                    key, value = (count + 1) % replicas, total + int(works[group])
                    if value < reached[mask].get(key, value + 1):
                        reached[mask][key] = value
            if not sub:
                break
            sub = (sub - 1) & rest
    return reached[-1].get(0)


def random_trajectories(rng: np.random.Generator, most: int) -> list[Tokens]:
    """Up to ``most`` sorted token lists, branching off earlier ones; with duplicates, prefixes."""
    made: list[Tokens] = []
    for _ in range(int(rng.integers(1, most + 1))):
        base = made[int(rng.integers(len(made)))] if made and rng.random() < 0.8 else ()
        kept = int(rng.integers(0, len(base) + 1))
        tail = rng.integers(0, 3, size=int(rng.integers(0 if kept else 1, 9)))
        made.append((*base[:kept], *tail.tolist()))
    return sorted(made)


def cases(seed: int, count: int, most: int) -> Iterator[tuple[list[Tokens], int, int]]:
    """Trajectories, replicas and a capacity that every trajectory meets."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        trajectories = random_trajectories(rng, most)
        replicas = int(rng.integers(1, min(4, len(trajectories)) + 1))
        yield trajectories, replicas, max(map(len, trajectories)) + int(rng.integers(0, 25))
