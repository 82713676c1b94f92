"""JSON lines, parsed by Arrow; Python's own parser only looks for the line to blame."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from harts.errors import InputError
from harts.trajectories.arrow import ListCollector, known_columns, row_columns
from harts.trajectories.assembly import assemble
from harts.trajectories.columns import TOKEN_COLUMNS, TokenColumn, input_error
from harts.trajectories.record import Provenance, TrajectoryBatch

MINIMUM_BLOCK: Final = 1 << 22
_FIX_LINE: Final = "Write one JSON object a line, one line a trajectory."


def read_json_lines(path: Path) -> TrajectoryBatch:
    """One file of JSON lines as a batch; blank lines are not rows.

    Raises:
        InputError: a line that is no JSON object, no rows, or a broken contract of the columns.
    """
    file = str(path)
    try:
        first = _first_row(path)
        table = pj.read_json(
            path,
            read_options=pj.ReadOptions(block_size=_block_size(path)),
            parse_options=pj.ParseOptions(explicit_schema=_schema(first)),
        )
    except pa.ArrowException as error:
        _blame_a_line(path)
        raise _unreadable(file, error) from error
    except OSError as error:
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
    others = table.drop_columns([n for n in TOKEN_COLUMNS if n in table.column_names])
    return assemble(
        found,
        describe_row=provenance.describe,
        provenance=provenance,
        **row_columns(file, others),
    )


def _unreadable(file: str, error: Exception) -> InputError:
    return input_error(
        f"file {file!r}", expected="readable JSON lines", got=str(error), fix=_FIX_LINE
    )


def _rows(path: Path) -> Iterator[tuple[int, int, Any]]:
    """(row, line counting from 1, parsed value) of each line that is not blank."""
    row = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise input_error(
                    f"file {str(path)!r}, row {row} (line {number})",
                    expected="a JSON object",
                    got=f"a line that is not JSON ({error})",
                    fix=_FIX_LINE,
                ) from error
            if not isinstance(value, dict):
                raise input_error(
                    f"file {str(path)!r}, row {row} (line {number})",
                    expected="a JSON object",
                    got=f"{type(value).__name__}",
                    fix=_FIX_LINE,
                )
            yield row, number, value
            row += 1


def _first_row(path: Path) -> dict[str, Any]:
    for _, _, value in _rows(path):
        found: dict[str, Any] = value
        return found
    raise input_error(
        f"file {str(path)!r}", expected="at least one row", got="no rows", fix=_FIX_LINE
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
        elif name == "reward" and (value is None or isinstance(value, int | float)):
            fields[name] = pa.float64()
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


def _blame_a_line(path: Path) -> None:
    """Raise for the first row that Arrow could not take; return when none is found."""
    for row, number, value in _rows(path):
        for name, column in TOKEN_COLUMNS.items():
            if name not in value or value[name] is None:
                continue
            where = f"file {str(path)!r}, row {row} (line {number}), column {name!r}"
            expected = f"a list of {column.expected}"
            fix = "Store the column as lists of numbers, one entry a token."
            if not isinstance(value[name], list):
                got = f"{value[name]!r:.60}"
                raise input_error(where, expected=expected, got=got, fix=fix)
            for position, entry in enumerate(value[name]):
                if not _fits(column, entry):
                    raise input_error(
                        f"{where}, position {position}",
                        expected=column.expected,
                        got=f"{entry!r:.60}",
                        fix=fix,
                    )


def _fits(column: TokenColumn, entry: object) -> bool:
    if isinstance(entry, bool):
        return "b" in column.kinds
    if isinstance(entry, float):
        return "f" in column.kinds
    if not isinstance(entry, int):
        return False
    if column.minimum is None or column.maximum is None:
        return True
    return column.minimum <= entry <= column.maximum
