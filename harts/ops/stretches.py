"""Index arrays that are a few stretches of evenly spaced integers."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int: TypeAlias = NDArray[np.int64]


def stretches(starts: Int, lengths: Int, steps: Int | None = None) -> Int:
    """From each start so many integers, a step apart (1 if none is given), end to end."""
    count: Int = np.arange(int(lengths.sum()))
    first = before(lengths)
    if steps is not None:
        first = first * steps
        count *= np.repeat(steps, lengths)
    count += np.repeat(starts - first, lengths)
    return count


def before(lengths: Int) -> Int:
    """Sum of all earlier entries."""
    total: Int = np.cumsum(lengths) - lengths
    return total
