"""The OR-Tools baseline: best partitions of small trees, valid plans, clear errors."""

import sys
from itertools import product

import numpy as np
import pytest

from harts.bench.ortools_baseline import (
    PartitionTable,
    SolverLimits,
    assign_trees,
    equalise,
    join_unions,
    ortools_plan,
    pack_partitions,
    partition_tree,
    rollout_trees,
)
from harts.errors import HartsError, InputError, PlanError
from harts.forest import PrefixForest
from harts.planning.grouping import compact_works
from harts.planning.intervals import IntervalWork
from harts.synth import synthesize
from tests.planning.oracles import arrays_of, set_partitions, trie_size

LIMITS = SolverLimits(tree_s=5.0, packing_s=5.0)


@pytest.fixture
def _ortools() -> None:
    pytest.importorskip("ortools.sat.python.cp_model", reason="needs OR-Tools: harts[ortools]")


def work_of(trajectories: list[tuple[int, ...]]) -> IntervalWork:
    return IntervalWork.build(*arrays_of(trajectories))


def random_tree(seed: int, leaves: int) -> list[tuple[int, ...]]:
    """Sorted trajectories with nested forks, all from one root token."""
    rng = np.random.default_rng(seed)
    found: list[tuple[int, ...]] = [(0,)]
    while len(found) < leaves:
        base = found[int(rng.integers(len(found)))]
        kept = base[: int(rng.integers(1, len(base) + 1))]
        found.append((*kept, *rng.integers(0, 3, int(rng.integers(1, 6))).tolist()))
    return sorted(found)


def least_total(trajectories: list[tuple[int, ...]], capacity: int) -> int:
    """Least compact work of any division into groups within capacity."""
    totals = []
    for groups in set_partitions(range(len(trajectories))):
        works = [trie_size([trajectories[i] for i in group]) for group in groups]
        if max(works) <= capacity:
            totals.append(sum(works))
    return min(totals)


@pytest.mark.usefixtures("_ortools")
@pytest.mark.parametrize("seed", range(8))
def test_a_small_tree_is_divided_at_least_cost(seed: int) -> None:
    trajectories = random_tree(seed, 7)
    work = work_of(trajectories)
    capacity = max(int(work.lengths.max()), work.total * 2 // 3)
    solved = partition_tree(work, np.arange(len(work)), capacity, 5.0)
    works = compact_works(work, solved.groups)
    assert solved.proved == solved.solves
    assert sorted(np.concatenate(solved.groups).tolist()) == list(range(len(work)))
    assert works.max() <= capacity
    assert works.sum() == least_total(trajectories, capacity)


@pytest.mark.usefixtures("_ortools")
def test_members_of_a_partition_need_not_be_neighbours() -> None:
    # In lexicographic order the large branch lies between two small ones that fit together.
    work = work_of([(0, *(1,) * 4), (0, *(2,) * 5), (0, *(3,) * 2)])
    solved = partition_tree(work, np.arange(3), 7, 5.0)
    assert sorted(group.tolist() for group in solved.groups) == [[0, 2], [1]]
    assert solved.proved


@pytest.mark.usefixtures("_ortools")
def test_packing_finds_the_bin_that_first_fit_decreasing_wastes() -> None:
    sizes = [4, 4, 3, 3, 3, 3]  # FFD at room 10: 4+4, 3+3+3, 3
    work = work_of([(i,) * size for i, size in enumerate(sizes)])
    solved = pack_partitions(work, [np.array([i]) for i in range(len(sizes))], 10, 5.0)
    assert [int(w) for w in compact_works(work, solved.groups)] == [10, 10]
    assert (solved.solves, solved.proved) == (1, 1)


@pytest.mark.usefixtures("_ortools")
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_synthetic_step_gets_a_valid_plan(replicas: int) -> None:
    batch = synthesize("tiny", 0)
    forest = PrefixForest.build(batch)
    work = IntervalWork.build(forest.lengths, forest.lcp)
    ids = [batch.tree_ids[row] for row in forest.members.tolist()]
    plan = ortools_plan(work, ids, replicas, 700, SolverLimits(tree_s=0.2, packing_s=0.5))
    assert sorted(np.concatenate(plan.groups).tolist()) == list(range(len(work)))
    assert plan.works.max() <= 700
    assert np.array_equal(plan.works, compact_works(work, list(plan.groups)))
    assert len(set(np.bincount(plan.replica, minlength=replicas).tolist())) == 1
    places = set(zip(plan.slot.tolist(), plan.replica.tolist(), strict=True))
    assert places == set(product(range(len(plan.groups) // replicas), range(replicas)))
    assert plan.solves >= plan.proved
    for replica in range(replicas):
        own = np.argsort(plan.slot[plan.replica == replica])
        assert (np.diff(plan.works[plan.replica == replica][own]) <= 0).all()


@pytest.mark.usefixtures("_ortools")
def test_whole_trees_stay_on_one_replica_when_nothing_has_to_be_moved() -> None:
    trees = [[(t, 1, s) for s in range(3)] for t in range(4)]
    work = work_of([x for tree in trees for x in tree])
    ids = [str(t) for t in range(4) for _ in range(3)]
    plan = ortools_plan(work, ids, 2, 5, LIMITS)
    homes = {
        (ids[i], int(plan.replica[k]))
        for k, group in enumerate(plan.groups)
        for i in group.tolist()
    }
    assert len(homes) == 4
    assert plan.objective.total_work == 4 * 5


@pytest.mark.usefixtures("_ortools")
def test_a_table_saves_solving_and_charges_the_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(random_tree(0, 8))
    table, capacity = PartitionTable(), int(work.lengths.max()) + 2
    first = ortools_plan(work, ["a"] * len(work), 1, capacity, LIMITS, table=table)
    for solved in table.entries.values():
        solved.seconds = 100.0
    monkeypatch.setattr("harts.bench.ortools_baseline.solve_partition", None)
    again = ortools_plan(work, ["a"] * len(work), 1, capacity, LIMITS, table=table)
    assert again.objective == first.objective
    assert again.seconds > 100.0


def test_without_ids_trees_are_what_a_first_token_joins() -> None:
    work = work_of([(0, 1), (0, 2), (1, 1), (2, 5, 5), (2, 5, 6)])
    assert [t.tolist() for t in rollout_trees(work, ["0"] * 5)] == [[0, 1], [2], [3, 4]]
    named = rollout_trees(work, ["b", "a", "a", "b", "b"])
    assert [t.tolist() for t in named] == [[0, 3, 4], [1, 2]]


def test_trees_spread_evenly_and_every_replica_gets_one() -> None:
    work = work_of([(t,) * n for t, n in enumerate((7, 6, 5, 4, 3, 1))])
    trees = [np.array([i]) for i in range(6)]
    shards = assign_trees(work, trees, 2)
    assert [int(compact_works(work, s).sum()) for s in shards] == [13, 13]
    lonely = work_of([(0,) * 10, (1,), (2,)])
    assert all(assign_trees(lonely, [np.array([i]) for i in range(3)], 3))


def test_one_tree_is_cut_where_it_shares_least_for_several_replicas() -> None:
    work = work_of([(0, 0, 1), (0, 0, 2), (0, 3, 1)])
    shards = assign_trees(work, [np.arange(3)], 2)
    assert sorted(t.tolist() for s in shards for t in s) == [[0, 1], [2]]


def test_microbatches_that_fit_as_a_union_are_joined() -> None:
    work = work_of([(0, 0, 0, 1), (0, 0, 0, 2), (5, 5, 1), (6,)])
    groups = [np.array([i]) for i in range(4)]
    assert [g.tolist() for g in join_unions(work, groups, 5)] == [[0, 1], [2, 3]]
    assert len(join_unions(work, groups, 4)) == 3


def test_counts_are_made_equal_by_the_cheapest_splits() -> None:
    work = work_of([(0, 0, 1), (0, 0, 2), (0, 3, 1), (1,), (2,)])
    microbatches = [[np.arange(3)], [np.array([3]), np.array([4])]]
    equalise(work, microbatches)
    assert [[g.tolist() for g in groups] for groups in microbatches] == [
        [[0, 1], [2]],
        [[3], [4]],
    ]


def test_single_trajectories_are_made_up_for_by_whole_microbatches() -> None:
    work = work_of([(t, *range(2)) for t in range(5)])
    microbatches = [[np.array([0])], [np.array([1]), np.array([2]), np.array([3, 4])]]
    equalise(work, microbatches)
    assert {len(groups) for groups in microbatches} == {2}
    with pytest.raises(PlanError, match="fewer replicas"):
        equalise(work, [[np.array([0])], [np.array([1]), np.array([2])]])


def test_without_ortools_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.delitem(sys.modules, "ortools.sat.python.cp_model", raising=False)
    monkeypatch.delitem(sys.modules, "ortools.sat.python", raising=False)
    with pytest.raises(HartsError, match=r"pip install 'harts\[ortools\]'.*--no-ortools"):
        ortools_plan(work_of([(0,), (1,)]), ["a", "b"], 1, 5, LIMITS)


def test_limits_must_be_positive() -> None:
    with pytest.raises(InputError, match="positive"):
        SolverLimits(tree_s=0, packing_s=1)
