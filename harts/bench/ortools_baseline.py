"""The planning baseline of section 5.2: OR-Tools partitions trees after they went to replicas.

What the paper fixes is the order of things: shard-level first-fit decreasing (FFD) assigns rollout
trees to DP replicas; within each replica an OR-Tools partitioner, as Tree Training has one, divides
trees into partitions within capacity; further splits bring every replica to one microbatch count.
What it leaves open is settled here in the baseline's favour:

- *Rollout trees* are the trajectories of one ``tree_id``. A shared system prompt joins every task
  of a step to one tree, and whole trees cannot be spread over replicas. Only where all ids are
  equal is a tree what a common first token joins.
- *FFD* fills D shards up to the least load at which all trees fit, found by bisection (MULTIFIT),
  so replicas start as even as whole trees allow; a tree's size is its own compact tokens. With
  fewer trees than replicas, the largest is cut at its lowest adjacent-LCP valley until there are
  enough.
- *The partitioner* is a CP-SAT model of the whole tree, with members of any order in a partition.
  It minimises the tokens of all edges times the partitions that cross them, hence duplicated
  prefix tokens. It starts from the exact contiguous programme's solution and may use one partition
  more than that has. Per-subtree room cuts tighten its relaxation
  (`harts.bench.ortools_models`).
- *Packing* of a replica's partitions into microbatches is a CP-SAT bin packing for the fewest
  bins, started from FFD and not run where FFD meets the sum's bound. A partition counts with its
  own prefix when it is packed, but a microbatch counts as the union of what landed in it, and
  microbatches of a replica are joined, most duplicated tokens first, while a pair fits as a union.
- *Splits* are the cheapest there are: a group divides at its lowest valley, and that costs the
  prefix that all its members share, the least any division costs. A replica that has only
  microbatches of one trajectory takes over whole ones from the replica with the most.
- *Slots*: each replica runs its microbatches heaviest first, which for given replicas has the least
  sum of slot maxima.
- *Time* counts the forest and everything here, but no call planning. Solvers get every core, a
  fixed seed and the stated limits; a proof of optimality ends one early. How far a solver gets in
  a time limit depends on the machine, so unlike all else here its result may vary.

Partitions of one tree do not depend on the replica, so a table of them serves several D; the time
they took is charged to each.

Shapes: N trajectories, K microbatches, D replicas, U trees; work in compact tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from harts.bench.ortools_models import require_ortools, solve_packing, solve_partition
from harts.errors import InputError, PlanError
from harts.planning.contiguous import best_contiguous, check_feasible
from harts.planning.grouping import compact_works
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.schedule import Objective, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """Seconds that CP-SAT may take for one tree and for one packing."""

    tree_s: float
    packing_s: float

    def __post_init__(self) -> None:
        if not (self.tree_s > 0 and self.packing_s > 0):
            raise InputError(f"time limits must be positive seconds, got {self}")

    def __str__(self) -> str:
        return f"{self.tree_s:g}/{self.packing_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaselinePlan:
    """Groups of sorted positions with their places; ``works``, ``replica``, ``slot`` are [K]."""

    groups: tuple[IntArray, ...]
    works: IntArray
    replica: IntArray
    slot: IntArray
    objective: Objective
    seconds: float
    """Partitioning, packing and splitting; the forest is counted by the caller."""
    solves: int
    """CP-SAT models solved."""
    proved: int
    """Of those, solved to proven optimality."""


@dataclass(slots=True)
class _Solved:
    groups: list[IntArray]
    seconds: float
    solves: int = 0
    proved: int = 0


@dataclass(slots=True)
class PartitionTable:
    """Partitions of trees by (limit, members), so that another D does not solve them again."""

    entries: dict[tuple[float, int, bytes], _Solved] = field(default_factory=dict)


def rollout_trees(work: IntervalWork, tree_ids: Sequence[str]) -> list[IntArray]:
    """Sorted positions of each rollout tree, by first member; ``tree_ids[N]`` in sorted order."""
    ids = np.asarray(tree_ids)
    if np.unique(ids).size == 1:
        return np.split(np.arange(len(work)), np.flatnonzero(work.lcp[1:] == 0) + 1)
    _, tree = np.unique(ids, return_inverse=True)
    order = np.argsort(tree, kind="stable")
    trees = np.split(order, np.flatnonzero(np.diff(tree[order])) + 1)
    return sorted(trees, key=lambda members: int(members[0]))


def ortools_plan(
    work: IntervalWork,
    tree_ids: Sequence[str],
    replicas: int,
    capacity: int,
    limits: SolverLimits,
    *,
    table: PartitionTable | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> BaselinePlan:
    """Plan a step as the baseline does.

    Args:
        work: interval work of the N trajectories in lexicographic order.
        tree_ids: [N] rollout tree of each, in the same order.
        replicas: D.
        capacity: T, most compact tokens of one microbatch.
        limits: seconds for each solver run.
        table: partitions solved before, and where new ones are kept.
        progress: told what is being solved.

    Raises:
        PlanError: no plan exists; says what to change.
        HartsError: OR-Tools is not installed.
    """
    require_ortools()
    check_feasible(work, replicas, capacity)
    table = PartitionTable() if table is None else table
    began = time.perf_counter()
    shards = assign_trees(work, rollout_trees(work, tree_ids), replicas)
    spent, solves, proved = 0.0, 0, 0
    microbatches: list[list[IntArray]] = []
    for number, trees in enumerate(shards):
        partitions: list[IntArray] = []
        for at, tree in enumerate(trees):
            progress(f"replica {number + 1}/{replicas}, tree {at + 1}/{len(trees)}")
            solved, charge = _partition(work, tree, capacity, limits, table)
            partitions += solved.groups
            spent += charge
            solves, proved = solves + solved.solves, proved + solved.proved
        progress(f"replica {number + 1}/{replicas}, packing {len(partitions)} partitions")
        packed = pack_partitions(work, partitions, capacity, limits.packing_s)
        solves, proved = solves + packed.solves, proved + packed.proved
        microbatches.append(join_unions(work, packed.groups, capacity))
    equalise(work, microbatches)
    return _placed(work, microbatches, time.perf_counter() - began + spent, solves, proved)


def assign_trees(work: IntervalWork, trees: list[IntArray], replicas: int) -> list[list[IntArray]]:
    """Trees of each replica by FFD into D shards of the least load that holds them all."""
    trees = list(trees)
    while len(trees) < replicas:
        sizes = compact_works(work, trees)
        divisible = [i for i, tree in enumerate(trees) if tree.size > 1]
        if not divisible:
            raise PlanError(
                f"{len(trees)} trajectories cannot fill {replicas} replicas; use fewer replicas"
            )
        largest = max(divisible, key=lambda i: int(sizes[i]))
        trees += _halves(work, trees.pop(largest))
    sizes = compact_works(work, trees).tolist()
    order = sorted(range(len(trees)), key=lambda i: (-sizes[i], i))
    low, high = max(max(sizes), -(-sum(sizes) // replicas)), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_first_fit(order, sizes, middle)) <= replicas:
            high = middle
        else:
            low = middle + 1
    shards = _first_fit(order, sizes, low)
    while len(shards) < replicas:
        fullest = max((s for s in shards if len(s) > 1), key=lambda s: sum(sizes[i] for i in s))
        shards.append([fullest.pop()])
    return [[trees[i] for i in shard] for shard in shards]


def _first_fit(order: list[int], sizes: list[int], room: int) -> list[list[int]]:
    """Bins of items, each into the first bin that can take it."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for item in order:
        for at, load in enumerate(loads):
            if load + sizes[item] <= room:
                bins[at].append(item)
                loads[at] += sizes[item]
                break
        else:
            bins.append([item])
            loads.append(sizes[item])
    return bins


def _partition(
    work: IntervalWork,
    tree: IntArray,
    capacity: int,
    limits: SolverLimits,
    table: PartitionTable,
) -> tuple[_Solved, float]:
    """Partitions of a tree, and seconds to charge beyond what has just passed."""
    key = (limits.tree_s, capacity, tree.tobytes())
    if key in table.entries:
        return table.entries[key], table.entries[key].seconds
    began = time.perf_counter()
    solved = partition_tree(work, tree, capacity, limits.tree_s)
    solved.seconds = time.perf_counter() - began
    table.entries[key] = solved
    return solved, 0.0


def partition_tree(work: IntervalWork, tree: IntArray, capacity: int, limit_s: float) -> _Solved:
    """Divide a tree into partitions within capacity of least duplicated prefix, by CP-SAT."""
    local = _restrict(work, tree)
    if local.total <= capacity:
        return _Solved([tree], 0.0)
    cuts = best_contiguous(local.lengths, local.lcp, 1, capacity).cuts
    start = np.zeros(tree.size, np.int64)
    start[cuts] = 1
    start = np.cumsum(start)
    owner, proved = solve_partition(local, start, capacity, limit_s)
    groups = [tree[owner == part] for part in range(int(owner.max()) + 1)]
    return _Solved([group for group in groups if group.size], 0.0, 1, int(proved))


def pack_partitions(
    work: IntervalWork, partitions: list[IntArray], capacity: int, limit_s: float
) -> _Solved:
    """Microbatches of the fewest bins of capacity that CP-SAT finds for whole partitions."""
    sizes = compact_works(work, partitions).tolist()
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    bins = _first_fit(order, sizes, capacity)
    solves, proved = 0, False
    if len(bins) > -(-sum(sizes) // capacity):
        solves = 1
        bins, proved = solve_packing(sizes, bins, capacity, limit_s)
    groups = [np.sort(np.concatenate([partitions[i] for i in items])) for items in bins]
    return _Solved(groups, 0.0, solves, int(proved))


def join_unions(work: IntervalWork, groups: list[IntArray], capacity: int) -> list[IntArray]:
    """Groups after joining pairs whose union fits, the pair that shares most tokens first."""
    groups = list(groups)
    while len(groups) > 1:
        first, second = np.triu_indices(len(groups), 1)
        pairs = zip(first.tolist(), second.tolist(), strict=True)
        unions = [np.sort(np.concatenate((groups[i], groups[j]))) for i, j in pairs]
        apart, together = compact_works(work, groups), compact_works(work, unions)
        shared = np.where(together <= capacity, apart[first] + apart[second] - together, -1)
        best = int(np.argmax(shared))
        if shared[best] < 0:
            break
        groups[int(first[best])] = unions[best]
        del groups[int(second[best])]
    return groups


def equalise(work: IntervalWork, microbatches: list[list[IntArray]]) -> None:
    """Split in place until every replica has as many microbatches as the one with most.

    Raises:
        PlanError: single trajectories everywhere, and not as many on every replica.
    """
    while len({len(groups) for groups in microbatches}) > 1:
        fewest, most = min(microbatches, key=len), max(microbatches, key=len)
        if _split_cheapest(work, fewest):
            continue
        if len(most) > len(fewest) + 1:
            lightest = int(np.argmin(compact_works(work, most)))
            fewest.append(most.pop(lightest))
        elif not _split_cheapest(work, most):
            raise PlanError(
                f"{len(work)} trajectories on {len(microbatches)} replicas allow no equal count of "
                "microbatches; use fewer replicas or a larger capacity"
            )


def _split_cheapest(work: IntervalWork, groups: list[IntArray]) -> bool:
    """Divide in place the group that it costs least to divide; whether there was one."""
    options = [
        (*_cheapest_cut(work, group)[:2], i) for i, group in enumerate(groups) if group.size > 1
    ]
    if options:
        groups += _halves(work, groups.pop(min(options)[-1]))
    return bool(options)


def _cheapest_cut(work: IntervalWork, group: IntArray) -> tuple[int, int, int]:
    """(tokens duplicated, heavier side, members on the left) of the best cut of a group."""
    local = _restrict(work, group)
    cuts = np.flatnonzero(local.lcp[1:] == local.lcp[1:].min()) + 1
    heavier = np.maximum(local.work(0, cuts), local.work(cuts, len(local)))
    best = int(np.argmin(heavier))
    return int(local.lcp[cuts[best]]), int(heavier[best]), int(cuts[best])


def _halves(work: IntervalWork, group: IntArray) -> list[IntArray]:
    at = _cheapest_cut(work, group)[2]
    return [group[:at], group[at:]]


def _restrict(work: IntervalWork, positions: IntArray) -> IntervalWork:
    """Interval work of some trajectories alone."""
    lcp = np.zeros(positions.size, np.int64)
    lcp[1:] = work.pairwise_lcp(positions[:-1], positions[1:])
    return IntervalWork.build(work.lengths[positions], lcp)


def _placed(
    work: IntervalWork,
    microbatches: list[list[IntArray]],
    seconds: float,
    solves: int,
    proved: int,
) -> BaselinePlan:
    """Slots: every replica runs its heaviest microbatch first."""
    groups: list[IntArray] = []
    replica: list[int] = []
    slot: list[int] = []
    for number, own in enumerate(microbatches):
        works = compact_works(work, own)
        for j, k in enumerate(np.argsort(-works, kind="stable").tolist()):
            groups.append(own[k])
            replica.append(number)
            slot.append(j)
    works = compact_works(work, groups)
    places = np.array(replica, np.int64), np.array(slot, np.int64)
    return BaselinePlan(
        groups=tuple(groups),
        works=works,
        replica=places[0],
        slot=places[1],
        objective=evaluate(works, *places),
        seconds=seconds,
        solves=solves,
        proved=proved,
    )
