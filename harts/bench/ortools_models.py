"""The CP-SAT models of the OR-Tools planning baseline: dividing a tree, and packing its parts.

Shapes: N trajectories; work in compact tokens.
"""

import os
from typing import Any

import numpy as np

from harts.errors import HartsError
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.trie import PrefixTrie

SEED = 0


def require_ortools() -> Any:
    """The ``cp_model`` module of OR-Tools.

    Raises:
        HartsError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise HartsError(
            "the planning baseline needs OR-Tools, which is not installed: "
            "pip install 'harts[ortools]', or leave the baseline out with --no-ortools"
        ) from error
    return cp_model


def solve_partition(
    work: IntervalWork, start: IntArray, capacity: int, limit_s: float
) -> tuple[IntArray, bool]:
    """Owner [N] of each trajectory from CP-SAT, or ``start`` if it finds no better in time.

    Variable ``crosses[v][p]`` says that partition p holds a trajectory below trie node v.
    """
    cp_model = require_ortools()
    trie = PrefixTrie.build(work)
    parts = min(int(start.max()) + 2, len(work))
    nodes = range(1, len(trie.parent))
    model = cp_model.CpModel()
    crosses = [[model.new_bool_var("") for _ in range(parts)] for _ in trie.parent]
    for node in nodes:
        for below, above in zip(crosses[node], crosses[trie.parent[node]], strict=True):
            model.add_implication(below, above)
        if not trie.children[node]:
            model.add_exactly_one(crosses[node])
        else:
            inner = trie.depth[node]
            size = int(work.work(trie.first[node], trie.stop[node])) - inner
            room = capacity - inner
            model.add(sum(crosses[node]) >= (-(-size // room) if room else 1))
    cost = [sum(trie.edge(node) * crosses[node][part] for node in nodes) for part in range(parts)]
    for tokens in cost:
        model.add(tokens <= capacity)
    model.minimize(sum(cost))
    held = np.zeros((len(trie.parent), parts), np.int64)
    for node in range(len(trie.parent)):
        held[node, start[trie.first[node] : trie.stop[node]]] = 1
        for variable, value in zip(crosses[node], held[node].tolist(), strict=True):
            model.add_hint(variable, value)
    solver = _solver(limit_s)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start, False
    owner = start.copy()
    for node in nodes:
        if not trie.children[node]:
            values = [solver.value(variable) for variable in crosses[node]]
            owner[trie.first[node]] = values.index(1)
    return owner, status == cp_model.OPTIMAL


def solve_packing(
    sizes: list[int], start: list[list[int]], capacity: int, limit_s: float
) -> tuple[list[list[int]], bool]:
    """Bins of items, the fewest that CP-SAT finds from ``start`` on, and whether it proved so."""
    cp_model = require_ortools()
    model = cp_model.CpModel()
    count = len(start)
    placed = [[model.new_bool_var("") for _ in range(count)] for _ in sizes]
    used = [model.new_bool_var("") for _ in range(count)]
    for row in placed:
        model.add_exactly_one(row)
    for k, opened in enumerate(used):
        load = sum(size * row[k] for size, row in zip(sizes, placed, strict=True))
        model.add(load <= capacity * opened)
        model.add_hint(opened, 1)
        if k:
            model.add_implication(opened, used[k - 1])
    model.add(sum(used) >= -(-sum(sizes) // capacity))
    model.minimize(sum(used))
    for k, items in enumerate(start):
        for i, row in enumerate(placed):
            model.add_hint(row[k], int(i in items))
    solver = _solver(limit_s)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start, False
    bins = [[i for i, row in enumerate(placed) if solver.value(row[k])] for k in range(count)]
    return [items for items in bins if items], status == cp_model.OPTIMAL


def _solver(limit_s: float) -> Any:
    solver = require_ortools().CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.random_seed = SEED
    solver.parameters.num_workers = len(os.sched_getaffinity(0))
    return solver
