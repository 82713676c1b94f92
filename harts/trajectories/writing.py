"""Writing a batch so that reading it gives the same batch, and nothing is ever half-written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harts.trajectories.columns import TOKEN_COLUMNS, input_error
from harts.trajectories.record import TrajectoryBatch

ROW_GROUP_TOKENS: Final = 1 << 22  # small enough that readers can share a file among threads
_FILE_TYPES: Final = {"tokens": pa.int32(), "loss_mask": pa.int8(), "identity": pa.int64()}


def write_trajectories(batch: TrajectoryBatch, path: str | os.PathLike[str]) -> None:
    """Write Parquet (.parquet, zstd) or JSON lines (.jsonl, .json).

    The file is written under a temporary name in the same folder and then renamed.

    Raises:
        InputError: an unknown extension, an extra column JSON cannot hold, or a failed write.
    """
    path = Path(path)
    writers = {".parquet": _write_parquet, ".jsonl": _write_json, ".json": _write_json}
    writer = writers.get(path.suffix.lower())
    if writer is None:
        raise input_error(
            f"file {str(path)!r}",
            expected=f"a name that ends in {', '.join(writers)}",
            got=path.suffix or "no extension",
            fix="Give the file one of these extensions.",
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer(batch, temporary)
        temporary.replace(path)
    except (OSError, pa.ArrowException) as error:
        raise input_error(
            f"file {str(path)!r}",
            expected="a place that can be written",
            got=str(error),
            fix="Check folder, permissions and free space; nothing was written.",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_parquet(batch: TrajectoryBatch, path: Path) -> None:
    first = _table(batch, 0, 0)
    # Cuts fall where the running token count passes a multiple of the group size.
    group = batch.offsets[:-1] // ROW_GROUP_TOKENS
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(batch)]
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for start, end in pairwise(cuts):
            writer.write_table(_table(batch, start, end), row_group_size=max(1, end - start))


def _table(batch: TrajectoryBatch, start: int, end: int) -> pa.Table:
    """Rows [start, end) under the names of the file format; list values are not copied."""
    bounds = batch.offsets[start : end + 1]
    low, high = int(bounds[0]), int(bounds[-1])
    columns: dict[str, Any] = {
        "tree_id": pa.array(batch.tree_ids[start:end], pa.string()),
        "trajectory_id": pa.array(batch.trajectory_ids[start:end], pa.string()),
    }
    for column in TOKEN_COLUMNS.values():
        values = getattr(batch, column.attribute)
        if values is not None:
            part = values[low:high]
            if column.attribute == "loss_mask":
                part = part.view(np.int8)
            flat = pa.array(part, _FILE_TYPES.get(column.attribute, pa.float32()))
            offsets = pa.array((bounds - low).astype(np.int32))
            columns[column.name] = pa.ListArray.from_arrays(offsets, flat)
    columns["reward"] = pa.array(batch.rewards[start:end])
    table = pa.table(columns)
    if batch.extra is not None:
        extra = batch.extra.slice(start, end - start)
        for name in extra.column_names:
            table = table.append_column(extra.schema.field(name), extra[name])
    return table


def _write_json(batch: TrajectoryBatch, path: Path) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for row in _json_rows(batch):
            try:
                line = json.dumps(row, allow_nan=True, ensure_ascii=False)
            except (TypeError, ValueError) as error:
                raise input_error(
                    f"trajectory {row['trajectory_id']!r}, extra columns",
                    expected="values that JSON can hold",
                    got=str(error),
                    fix="Write Parquet instead.",
                ) from error
            stream.write(line + "\n")


def _json_rows(batch: TrajectoryBatch) -> Iterator[dict[str, Any]]:
    for row in range(len(batch)):
        start, end = batch.offsets[row], batch.offsets[row + 1]
        found: dict[str, Any] = {
            "tree_id": batch.tree_ids[row],
            "trajectory_id": batch.trajectory_ids[row],
        }
        for column in TOKEN_COLUMNS.values():
            values = getattr(batch, column.attribute)
            if values is not None:
                part = values[start:end]
                found[column.name] = (
                    part.view(np.int8) if part.dtype == np.bool_ else part
                ).tolist()
        reward = float(batch.rewards[row])
        found["reward"] = None if math.isnan(reward) else reward
        if batch.extra is not None:
            found |= batch.extra.slice(row, 1).to_pylist()[0]
        yield found
