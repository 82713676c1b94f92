"""A batch made by hand, whose tables can be worked out on paper, and its plan."""

import pytest

from harts.planning.step import StepPlan, plan_step
from harts.trajectories import TrajectoryBatch, from_lists

PROMPT = list(range(100, 108))
"""8 tokens: two chunks of 4."""


@pytest.fixture(scope="session")
def batch() -> TrajectoryBatch:
    """Ten trajectories of three rollout trees; chunks of 4 tokens.

    Tree a: forks at 8 (on the grid, three ways) and at 11 (off it), a copy, a strict prefix that
    ends at a fork. Tree b: a fork at 6 and a prefix that ends inside a path. Tree c: one token.
    """
    a = PROMPT
    b = list(range(200, 206))
    rows = [
        ("a", "a0", [*a, 1, 1, 1, 2, 2]),
        ("a", "a1", [*a, 1, 1, 1, 3, 3, 3]),
        ("a", "a2 <copy> $x$", [*a, 1, 1, 1, 3, 3, 3]),
        ("a", "a3", a),
        ("a", "a4", [*a, 4]),
        ("a", "a5 [bold]", [*a, 5, 5]),
        ("b", "b0", [*b, 7, 7, 7, 7]),
        ("b", "b1", [*b, 8]),
        ("b", "b2", [*b[:3]]),
        ("c", "c0", [9]),
    ]
    return from_lists(
        token_ids=[tokens for _, _, tokens in rows],
        tree_ids=[tree for tree, _, _ in rows],
        trajectory_ids=[name for _, name, _ in rows],
    )


@pytest.fixture(scope="session")
def plan(batch: TrajectoryBatch) -> StepPlan:
    """Tree a and the rest apart: 19 tokens and 12."""
    return plan_step(batch, replicas=2, capacity=19, chunk_size=4)
