"""JSON lines, parsed by Arrow; what Arrow refuses is left to `harts.trajectories.json_rows`."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from harts.errors import InputError
from harts.trajectories.arrow import ListCollector, known_columns, row_columns
from harts.trajectories.assembly import assemble
from harts.trajectories.columns import TOKEN_COLUMNS, TokenColumn, input_error
from harts.trajectories.json_rows import FIX_LINE, check_known_columns, loose_columns, rows_of
from harts.trajectories.record import Provenance, TrajectoryBatch

MINIMUM_BLOCK: Final = 1 << 22


def read_json_lines(path: Path) -> TrajectoryBatch:
    """One file of JSON lines as a batch; blank lines are not rows.

    Raises:
        InputError: a line that is no JSON object, no rows, or a broken contract of the columns.
    """
    file = str(path)
    try:
        table, loose = _read(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error
    found = {}
    for column in known_columns(file, table.schema):
        chunks = table[column.name].chunks
        collector = ListCollector(file, column, sum(len(chunk.flatten()) for chunk in chunks))
        for chunk in chunks:
            collector.append(chunk)
        if (flat := collector.finish()) is not None:
            found[column.name] = flat
    provenance = Provenance.single(file, table.num_rows)
    if loose is None:
        loose = table.drop_columns([n for n in TOKEN_COLUMNS if n in table.column_names])
    return assemble(
        found,
        describe_row=provenance.describe,
        provenance=provenance,
        **row_columns(file, loose),
    )


def _read(path: Path) -> tuple[pa.Table, pa.Table | None]:
    """The table, or what of it Arrow can read, and apart from it the columns that may mix types."""
    schema = _schema(_first_row(path))
    read = pj.ReadOptions(block_size=_block_size(path))
    try:
        table = pj.read_json(path, read, pj.ParseOptions(explicit_schema=schema))
        # Text that looks like a date and is missing from the first row.
        late = [pa.field(f.name, pa.string()) for f in table.schema if pa.types.is_temporal(f.type)]
        if late:
            schema = pa.unify_schemas([schema, pa.schema(late)])
            table = pj.read_json(path, read, pj.ParseOptions(explicit_schema=schema))
        return table, None
    except pa.ArrowException:
        shown = check_known_columns(path)
        schema = _schema({name: shown[name] for name in shown if name in TOKEN_COLUMNS})
        parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        return pj.read_json(path, read, parse), loose_columns(path, shown)


def _unreadable(file: str, error: Exception) -> InputError:
    return input_error(
        f"file {file!r}", expected="readable JSON lines", got=str(error), fix=FIX_LINE
    )


def _first_row(path: Path) -> dict[str, Any]:
    for _, _, value in rows_of(path):
        return value
    raise input_error(
        f"file {str(path)!r}", expected="at least one row", got="no rows", fix=FIX_LINE
    )


def _schema(first: dict[str, Any]) -> pa.Schema:
    """Types for what the first row shows, where Arrow's inference would guess wrong.

    Left alone, Arrow reads text that looks like a date as a time, and refuses 0.5 after 1.
    """
    fields = {}
    for name, value in first.items():
        column = TOKEN_COLUMNS.get(name)
        if column is not None:
            if value is None or isinstance(value, list):
                fields[name] = pa.list_(_value_type(column, value or []))
        elif name == "reward" and isinstance(value, int | float | None):
            fields[name] = pa.bool_() if isinstance(value, bool) else pa.float64()
        elif isinstance(value, str):
            fields[name] = pa.string()
    return pa.schema(fields)


def _value_type(column: TokenColumn, values: list[Any]) -> pa.DataType:
    if "f" not in column.kinds:
        return pa.int64()
    if column.dtype is np.bool_ and values and isinstance(values[0], bool):
        return pa.bool_()
    return pa.float64()


def _block_size(path: Path) -> int:
    """A block that holds the longest line: Arrow refuses a line across two block borders."""
    longest, last = 0, -1
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        for start in range(0, size, MINIMUM_BLOCK):
            block = np.frombuffer(data[start : start + MINIMUM_BLOCK], np.uint8)
            ends = np.flatnonzero(block == ord("\n")) + start
            if ends.size:
                longest = max(longest, int(np.diff(ends, prepend=last).max()))
                last = int(ends[-1])
    return max(MINIMUM_BLOCK, longest + 1, size - last)
