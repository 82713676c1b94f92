"""Trees of compact rows on which the GPU operators are measured.

Shapes: S semantic positions · C compact rows · R physical rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from harts.bench.ops_delta_rule import rollout_tree
from harts.forest import PrefixForest
from harts.layout import build_layout
from harts.ops.tree_index import TreeIndex
from harts.planning.calls import plan_calls
from harts.trajectories import from_lists

CHUNK_SIZE = 64
ROW_MULTIPLE = 128

Tokens = list[NDArray[np.int32]]


def index_of(token_ids: Tokens, device: torch.device | str) -> TreeIndex:
    """The index of some trajectories laid out as one microbatch."""
    batch = from_lists(token_ids=token_ids)
    forest = PrefixForest.build(batch)
    calls = plan_calls(forest.segment_parent, forest.segment_start, forest.segment_end, CHUNK_SIZE)
    layout = build_layout(batch, forest, calls, row_multiple=ROW_MULTIPLE)
    return TreeIndex.from_layout(layout, device)


def comb(trunk: int, branches: int, length: int) -> Tokens:
    """Branches of one length that leave one trunk at its end."""
    start = np.zeros(trunk, np.int32)
    return [np.concatenate([start, np.full(length, 1 + i, np.int32)]) for i in range(branches)]


def bushy(levels: int, length: int) -> Tokens:
    """Paths of the full binary tree of this many levels, with this many rows a node."""
    return [
        np.concatenate(
            [
                np.full(length, 2**level + (leaf >> (levels - 1 - level)), np.int32)
                for level in range(levels)
            ]
        )
        for leaf in range(2 ** (levels - 1))
    ]


TREES: dict[str, Callable[[], Tokens]] = {
    "rollout tree, 50 leaves": rollout_tree,
    "trunk of 32,768 with 512 branches of 64": lambda: comb(32_768, 512, 64),
    "trunk of 2,048 with 16 branches of 3,968": lambda: comb(2_048, 16, 3_968),
}
"""Trajectories of 65,536 compact rows each."""
