"""Groupings of small trajectory lists, and what every grouping must satisfy."""

import numpy as np
from hypothesis import strategies as st

from harts.planning.grouping import in_order
from harts.planning.intervals import IntervalWork
from tests.planning.oracles import arrays_of, shared_prefix, sorted_trajectories, trie_size


def index_of(trajectories):
    return IntervalWork.build(*arrays_of(trajectories))


def as_lists(groups):
    return [group.tolist() for group in groups]


def arrays(groups):
    return [np.array(group, np.int64) for group in groups]


def sizes(trajectories, groups):
    return [trie_size([trajectories[i] for i in group]) for group in groups]


def check_grouping(trajectories, groups, capacity, replicas=1):
    assert sorted(i for group in groups for i in group) == list(range(len(trajectories)))
    assert all(len(group) for group in groups)
    assert all((np.diff(group) > 0).all() for group in groups)
    assert as_lists(groups) == sorted(as_lists(groups))
    assert max(sizes(trajectories, groups)) <= capacity
    assert len(groups) % replicas == 0


@st.composite
def groupings(draw, most=9):
    """Sorted trajectories, some grouping of them, and a capacity that it keeps."""
    trajectories = draw(sorted_trajectories(most))
    labels = [draw(st.integers(0, len(trajectories) // 2)) for _ in trajectories]
    found = {label: [i for i, at in enumerate(labels) if at == label] for label in set(labels)}
    groups = in_order(arrays(found.values()))
    capacity = max(sizes(trajectories, groups)) + draw(st.integers(0, 6))
    return trajectories, groups, capacity


def equation_10(trajectories, members, x):
    """The paper's own terms, with the missing predecessor's or successor's omitted."""
    before = [i for i in members if i < x]
    after = [i for i in members if i > x]
    increase = len(trajectories[x])
    if before:
        increase -= shared_prefix(trajectories[before[-1]], trajectories[x])
    if after:
        increase -= shared_prefix(trajectories[x], trajectories[after[0]])
    if before and after:
        increase += shared_prefix(trajectories[before[-1]], trajectories[after[0]])
    return increase
