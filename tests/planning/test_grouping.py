"""Works of arbitrary microbatches and what trajectories share with them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harts.planning.grouping import Membership, compact_works
from tests.planning.groupings import as_lists, groupings, index_of, sizes
from tests.planning.oracles import shared_prefix


@given(groupings())
def test_works_are_trie_sizes_and_groups_survive_the_index(case):
    trajectories, groups, _ = case
    work = index_of(trajectories)
    assert compact_works(work, groups).tolist() == sizes(trajectories, groups)
    assert as_lists(Membership.of_groups(work, groups).groups()) == as_lists(groups)


@given(groupings(), st.data())
def test_shared_tokens_with_any_microbatch_less_any_trajectory(case, data):
    trajectories, groups, _ = case
    membership = Membership.of_groups(index_of(trajectories), groups)
    position = st.integers(0, len(trajectories) - 1)
    x, without = data.draw(position), data.draw(position)
    for k, group in enumerate(groups):
        others = [i for i in group.tolist() if i not in (x, without)]
        if x in group and x != without:
            continue  # a member stands for itself: only "less itself" is asked of its own group
        found = membership.shared(np.array([x]), np.array([k]), np.array([without]))
        assert found == [
            max((shared_prefix(trajectories[x], trajectories[i]) for i in others), default=0)
        ]
