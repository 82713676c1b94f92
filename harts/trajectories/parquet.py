"""Parquet files, streamed column by column into arrays of their final size.

Reading a whole list column at once needs about eight times its bytes for Arrow's levels and
offsets; batches of about a million tokens need the result and little else, and are no slower.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from harts.errors import InputError
from harts.trajectories.arrow import ListCollector, known_columns, row_columns
from harts.trajectories.assembly import FlatColumn, assemble
from harts.trajectories.columns import TOKEN_COLUMNS, TokenColumn, input_error
from harts.trajectories.record import Provenance, TrajectoryBatch

BATCH_TOKENS: Final = 1 << 20


def read_parquet(path: Path) -> TrajectoryBatch:
    """One Parquet file as a batch.

    Raises:
        InputError: the file is damaged, has no rows, or breaks the contract of the columns.
    """
    file = str(path)
    try:
        return _read(path)
    except InputError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise input_error(
            f"file {file!r}",
            expected="a readable Parquet file",
            got=str(error),
            fix="Check that the file is whole and may be read, or write it again.",
        ) from error


def _read(path: Path) -> TrajectoryBatch:
    file = str(path)
    source = pq.ParquetFile(path, memory_map=True)
    rows = source.metadata.num_rows
    columns = known_columns(file, source.schema_arrow)
    if rows == 0:
        raise input_error(
            f"file {file!r}",
            expected="at least one row",
            got="no rows",
            fix="Write one row a trajectory.",
        )
    with ThreadPoolExecutor(max_workers=min(len(columns), pa.cpu_count())) as pool:
        streams = [pool.submit(_stream, path, source.metadata, column) for column in columns]
        others = [name for name in source.schema_arrow.names if name not in TOKEN_COLUMNS]
        table = source.read(columns=others)
        found = {c.name: s.result() for c, s in zip(columns, streams, strict=True)}
    provenance = Provenance.single(file, rows)
    return assemble(
        {name: column for name, column in found.items() if column is not None},
        describe_row=provenance.describe,
        provenance=provenance,
        **row_columns(file, table),
    )


def _stream(path: Path, metadata: pq.FileMetaData, column: TokenColumn) -> FlatColumn | None:
    leaves = (metadata.schema.column(i).path for i in range(metadata.num_columns))
    leaf = next(i for i, name in enumerate(leaves) if name.split(".")[0] == column.name)
    # Null and empty lists count as one value each, so this is never too small.
    capacity = sum(
        metadata.row_group(group).column(leaf).num_values
        for group in range(metadata.num_row_groups)
    )
    collector = ListCollector(str(path), column, capacity)
    # A ParquetFile is not safe to share between threads; the metadata is.
    with pq.ParquetFile(path, metadata=metadata, memory_map=True) as source:
        batch_rows = max(1, BATCH_TOKENS * metadata.num_rows // max(1, capacity))
        for batch in source.iter_batches(batch_rows, columns=[column.name], use_threads=False):
            collector.append(batch.column(0))
    return collector.finish()
