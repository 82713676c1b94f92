"""Rows of JSON lines by Python's own parser: the slow way, for lines that Arrow refuses.

Arrow wants one type a column and says little about a row that breaks this. Here the row to blame
is found, and columns that may mix types are read.

Shapes: N trajectories.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeGuard

import pyarrow as pa

from harts.trajectories.arrow import ROW_COLUMNS
from harts.trajectories.columns import INT64, TOKEN_COLUMNS, TokenColumn, input_error

FIX_LINE: Final = "Write one JSON object a line, one line a trajectory."
_FIX_TOKENS: Final = "Store the column as lists of numbers, one entry a token."
_FIX_REWARD: Final = "Store rewards as numbers (or true and false), null or NaN where unknown."


def rows_of(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(row, line counting from 1, parsed object) of each line that is not blank.

    Raises:
        InputError: a line that is no JSON object, or that names a column twice.
    """
    row = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"file {str(path)!r}, row {row} (line {number})"
            try:
                value = json.loads(line, object_pairs_hook=_unique)
            except ValueError as error:
                got = f"a line that is not JSON ({error})"
                raise input_error(where, expected="a JSON object", got=got, fix=FIX_LINE) from error
            if not isinstance(value, dict):
                got = type(value).__name__
                raise input_error(where, expected="a JSON object", got=got, fix=FIX_LINE)
            yield row, number, value
            row += 1


def check_known_columns(path: Path) -> dict[str, Any]:
    """Refuse the first value of a known column that breaks its contract.

    Returns:
        For every column of the file, its first value that is not null (None if there is none).

    Raises:
        InputError: naming row, line and column.
    """
    shown: dict[str, Any] = {}
    for row, number, value in rows_of(path):
        place = f"file {str(path)!r}, row {row} (line {number})"
        for name, entry in value.items():
            where = f"{place}, column {name!r}"
            if name in TOKEN_COLUMNS and entry is not None:
                _check_tokens(where, TOKEN_COLUMNS[name], entry, shown.get(name))
            elif name == "reward" and not isinstance(entry, int | float | None):
                raise input_error(where, expected="a number", got=_brief(entry), fix=_FIX_REWARD)
            elif name in ROW_COLUMNS and name != "reward":
                _check_name(where, entry, shown.get(name))
            if shown.get(name) is None:
                shown[name] = entry
    return shown


def loose_columns(path: Path, shown: dict[str, Any]) -> pa.Table:
    """[N] rows of all columns but the per-token ones, whatever their types.

    Rewards become floats, true being 1. A column whose values have no type in common is carried as
    text, each value in its JSON form.
    """
    names = [name for name in shown if name not in TOKEN_COLUMNS]
    values: dict[str, list[Any]] = {name: [] for name in names}
    rows = 0
    for _, _, value in rows_of(path):
        rows += 1
        for name in names:
            values[name].append(value.get(name))
    if not names:
        return pa.table({"": pa.nulls(rows)}).select([])
    return pa.table({name: _column(name, entries) for name, entries in values.items()})


def _column(name: str, entries: list[Any]) -> pa.Array:
    if name == "reward":
        return pa.array([None if entry is None else float(entry) for entry in entries])
    try:
        return pa.array(entries)
    except (pa.ArrowException, OverflowError):
        return pa.array(
            [None if e is None else json.dumps(e, ensure_ascii=False) for e in entries], pa.string()
        )


def _check_tokens(
    where: str, column: TokenColumn, entries: object, first: list[Any] | None
) -> None:
    if not isinstance(entries, list):
        expected = f"a list of {column.expected}"
        raise input_error(where, expected=expected, got=_brief(entries), fix=_FIX_TOKENS)
    # Arrow reads a mask of numbers and a mask of truth values, but not both in one column.
    model = (first or entries or [None])[0]
    for position, entry in enumerate(entries):
        if not _fits(column, entry):
            raise input_error(
                f"{where}, position {position}",
                expected=column.expected,
                got=_brief(entry),
                fix=_FIX_TOKENS,
            )
        if isinstance(entry, bool) != isinstance(model, bool):
            raise input_error(
                f"{where}, position {position}",
                expected=f"{'true or false' if isinstance(model, bool) else '0 or 1'}, as before",
                got=_brief(entry),
                fix="Write the whole column as 0 and 1, or as true and false.",
            )


def _check_name(where: str, entry: object, first: object) -> None:
    if isinstance(entry, str) or (_is_integer(entry) and INT64.min <= entry <= INT64.max):
        if first is None or isinstance(first, str) == isinstance(entry, str):
            return
        expected = f"{'text' if isinstance(first, str) else 'an integer'}, as in the rows before"
        fix = "Store the column as strings in every row, or as integers in every row."
    else:
        expected, fix = "text or an integer of 64 bits", "Store the column as strings."
        if entry is None:
            expected, fix = "text or an integer", "Name every row, or leave the column out."
    raise input_error(where, expected=expected, got=_brief(entry), fix=fix)


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


def _is_integer(entry: object) -> TypeGuard[int]:
    return isinstance(entry, int) and not isinstance(entry, bool)


def _brief(entry: object) -> str:
    """A value as the file writes it, cut to 60 characters."""
    return f"{json.dumps(entry, ensure_ascii=False):.60}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} comes twice in one object")
    return found
