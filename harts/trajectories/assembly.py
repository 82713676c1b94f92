"""From flat columns to a validated batch: what all sources of trajectories have in common.

Shapes: S semantic positions, N trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.trajectories.columns import TOKEN_COLUMNS, input_error
from harts.trajectories.record import TrajectoryBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatColumn:
    """A per-token column: `values [S]` and the `lengths [N]` of its lists."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]


def missing_tokens(where: str, columns: list[str]) -> Exception:
    """The error for input without token ids."""
    return input_error(
        f"{where}, column 'token_ids'",
        expected="a list of integers in each row",
        got=f"no such column among {', '.join(map(repr, columns)) or 'none'}",
        fix="Name the column of token ids 'token_ids'.",
    )


def assemble(
    columns: Mapping[str, FlatColumn], *, describe_row: Callable[[int], str], **rest: Any
) -> TrajectoryBatch:
    """A batch from per-token columns by their file names; `rest` as in `TrajectoryBatch`.

    Raises:
        InputError: a column whose lists are not as long as the trajectories, or a bad value.
    """
    lengths = columns["token_ids"].lengths
    for name, column in columns.items():
        if column.lengths.size != lengths.size:
            raise input_error(
                f"column {name!r}",
                expected=f"{lengths.size} lists, one a trajectory",
                got=column.lengths.size,
                fix="Give every trajectory one list.",
            )
        wrong = column.lengths != lengths
        if wrong.any():
            row = int(np.argmax(wrong))
            raise input_error(
                f"{describe_row(row)}, column {name!r}",
                expected=f"{lengths[row]} entries, as many as token_ids",
                got=column.lengths[row],
                fix="Give every token of the trajectory one entry.",
            )
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    attributes: dict[str, Any] = {
        TOKEN_COLUMNS[name].attribute: column.values for name, column in columns.items()
    }
    return TrajectoryBatch.from_flat(attributes.pop("tokens"), offsets, **attributes, **rest)
