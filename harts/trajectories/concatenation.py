"""Several batches as one, for input spread over files.

Shapes: S semantic positions, N trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from harts.trajectories.columns import TOKEN_COLUMNS, input_error
from harts.trajectories.record import Provenance, TrajectoryBatch


def concatenate(batches: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
    """One batch of all trajectories, in order.

    Optional per-token columns must be in all batches or in none. Extra columns are united by
    name: a batch without one has nulls there.
    """
    if not batches:
        raise input_error(
            "concatenate", expected="at least one batch", got="none", fix="Pass a batch."
        )
    if len(batches) == 1:
        return batches[0]
    columns: dict[str, Any] = {}
    for column in TOKEN_COLUMNS.values():
        parts = [getattr(batch, column.attribute) for batch in batches]
        absent = [part is None for part in parts]
        if any(absent) and not all(absent):
            has, lacks = absent.index(False), absent.index(True)
            raise input_error(
                batches[lacks].describe_row(0),
                expected=f"column {column.name!r}, as in {batches[has].describe_row(0)}",
                got="no such column",
                fix="Give the column to all inputs or to none.",
            )
        if not absent[0]:
            columns[column.attribute] = np.concatenate(parts)
    lengths = np.concatenate([batch.lengths for batch in batches])
    return TrajectoryBatch(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rewards=np.concatenate([batch.rewards for batch in batches]),
        tree_ids=tuple(name for batch in batches for name in batch.tree_ids),
        trajectory_ids=tuple(name for batch in batches for name in batch.trajectory_ids),
        extra=_united_extra(batches),
        provenance=_united_provenance(batches),
        **columns,
    )


def _united_extra(batches: Sequence[TrajectoryBatch]) -> pa.Table | None:
    names: dict[str, None] = {}
    for batch in batches:
        if batch.extra is not None:
            names |= dict.fromkeys(batch.extra.column_names)
    if not names:
        return None
    tables = []
    for batch in batches:
        nulls = pa.nulls(len(batch))
        extra = pa.table({}) if batch.extra is None else batch.extra
        held = dict(zip(extra.column_names, extra.columns, strict=True))
        tables.append(pa.table({name: held.get(name, nulls) for name in names}))
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise input_error(
            f"extra columns {', '.join(map(repr, names))}",
            expected="one type a column in all inputs",
            got=str(error),
            fix="Write the column with one type, or leave it out.",
        ) from error


def _united_provenance(batches: Sequence[TrajectoryBatch]) -> Provenance | None:
    sources = [batch.provenance for batch in batches if batch.provenance is not None]
    if len(sources) < len(batches):
        return None
    bases = np.cumsum([0, *(len(source.files) for source in sources[:-1])])
    return Provenance(
        files=tuple(name for source in sources for name in source.files),
        file_of=np.concatenate(
            [source.file_of + np.int32(base) for source, base in zip(sources, bases, strict=True)]
        ),
        row=np.concatenate([source.row for source in sources]),
    )
