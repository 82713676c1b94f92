"""Trajectories of a file cut to as many compact rows as the operators are measured with.

Shapes: C compact rows · S semantic positions.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError
from harts.forest import PrefixForest
from harts.trajectories import read_trajectories

ROWS = 65_536


def packed_file(path: Path, rows: int = ROWS) -> list[NDArray[np.int32]]:
    """The first trajectories of a file that have `rows` compact rows; the last one is cut to fit.

    Raises:
        InputError: the file has fewer compact rows.
    """
    batch = read_trajectories([path])

    def compact(count: int) -> int:
        forest = PrefixForest.build(batch.select(np.arange(count)))
        return int((forest.lengths - forest.lcp).sum())

    # The fewest trajectories that have enough rows: the count grows with every one.
    low, high = 0, len(batch)
    if compact(high) < rows:
        raise InputError(
            f"bench ops: {path} has {compact(high):,} compact rows; expected at least {rows:,}. "
            "Name a larger file."
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compact(middle) >= rows else (middle, high)
    found = [batch.tokens[a:b] for a, b in pairwise(batch.offsets[: high + 1].tolist())]
    # Only rows that no other trajectory shares are cut off: they are the last one's own end.
    found[-1] = found[-1][: len(found[-1]) - (compact(high) - rows)]
    return found
