"""Arrow columns to NumPy without a Python list of tokens on the way.

Shapes: S semantic positions, N trajectories.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harts.trajectories.assembly import FlatColumn, missing_tokens
from harts.trajectories.columns import (
    TOKEN_COLUMNS,
    TokenColumn,
    bad_value,
    empty_trajectory,
    input_error,
)

ROW_COLUMNS: Final = ("reward", "tree_id", "trajectory_id")


class ListCollector:
    """Flattens the chunks of one list column, in order, into one array of the record's type."""

    def __init__(self, file: str, column: TokenColumn, capacity: int) -> None:
        self._file = file
        self._column = column
        self._values: NDArray[Any] = np.empty(capacity, column.dtype)
        self._lengths: list[NDArray[np.int64]] = []
        self._filled = 0
        self._rows = 0
        self._null_rows = 0
        self._first_null = 0

    def append(self, chunk: pa.Array) -> None:
        """Add a chunk of lists; `capacity` must have room for its values."""
        if chunk.null_count:
            if not self._null_rows:
                nulls = chunk.is_null().to_numpy(zero_copy_only=False)
                self._first_null = self._rows + int(np.argmax(nulls))
            self._null_rows += chunk.null_count
        lengths = pc.list_value_length(chunk).fill_null(0).to_numpy().astype(np.int64, copy=False)
        flat = chunk.flatten()
        if flat.null_count:
            nulls = flat.is_null().to_numpy(zero_copy_only=False)
            raise bad_value(self._where(lengths, int(np.argmax(nulls))), self._column, "null")
        if len(flat):
            values = flat.to_numpy(zero_copy_only=False)
            if values.dtype != self._column.dtype:  # the record checks what is not cast here
                bad = self._column.first_bad(values)
                if bad is not None:
                    raise bad_value(self._where(lengths, bad), self._column, values[bad])
            with np.errstate(over="ignore"):
                self._values[self._filled : self._filled + len(flat)] = values
        self._lengths.append(lengths)
        self._filled += len(flat)
        self._rows += len(chunk)

    def finish(self) -> FlatColumn | None:
        """The whole column, or None for an optional column that is null in every row."""
        required = self._column.name == "token_ids"
        if self._null_rows and (required or self._null_rows < self._rows):
            raise input_error(
                f"file {self._file!r}, row {self._first_null}, column {self._column.name!r}",
                expected=f"a list of {self._column.expected}",
                got="null",
                fix="Give every row its list" + ("." if required else ", or leave the column out."),
            )
        if self._null_rows:
            return None
        lengths = np.concatenate(self._lengths)
        if required and not lengths.all():  # told here, before anything about other columns
            raise empty_trajectory(f"file {self._file!r}, row {int(np.argmin(lengths))}")
        return FlatColumn(values=self._values[: self._filled], lengths=lengths)

    def _where(self, lengths: NDArray[np.int64], index: int) -> str:
        ends = np.cumsum(lengths)
        row = int(np.searchsorted(ends, index, side="right"))
        position = index - int(ends[row] - lengths[row])
        return (
            f"file {self._file!r}, row {self._rows + row}, column {self._column.name!r}, "
            f"position {position}"
        )


def known_columns(file: str, schema: pa.Schema) -> list[TokenColumn]:
    """The per-token columns that a file has, their types checked.

    Raises:
        InputError: `token_ids` missing, a column named twice, or a wrong type.
    """
    where = f"file {file!r}"
    names = schema.names
    if "token_ids" not in names:
        raise missing_tokens(where, names)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise input_error(
            f"{where}, column {twice!r}",
            expected="one column of this name",
            got=names.count(twice),
            fix="Rename or drop the others.",
        )
    present = []
    for column in (column for name, column in TOKEN_COLUMNS.items() if name in names):
        data_type = schema.field(column.name).type
        if pa.types.is_null(data_type) and column.name != "token_ids":
            continue  # a writer that saw nothing but nulls
        present.append(column)
        if not _is_list(data_type) or _kind(data_type.value_type) not in column.kinds + "n":
            raise input_error(
                f"{where}, every row, column {column.name!r}",
                expected=f"a list of {column.expected}",
                got=f"type {data_type}",
                fix="Store the column as lists of numbers, one entry a token.",
            )
    return present


def row_columns(file: str, table: pa.Table) -> dict[str, Any]:
    """Rewards, ids and extra columns as attributes of a batch.

    Raises:
        InputError: a reward that is no number, an id that is neither text nor integer, or null.
    """
    found: dict[str, Any] = {}
    if "reward" in table.column_names:
        found["rewards"] = _rewards(file, table["reward"])
    for name in ("tree_id", "trajectory_id"):
        if name in table.column_names:
            found[f"{name}s"] = _names(file, name, table[name])
    extra = table.drop_columns([name for name in ROW_COLUMNS if name in table.column_names])
    if extra.num_columns:
        found["extra"] = extra.replace_schema_metadata(None)
    return found


def _is_list(data_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(data_type)
        or pa.types.is_large_list(data_type)
        or pa.types.is_fixed_size_list(data_type)
    )


def _kind(data_type: pa.DataType) -> str:
    tests = {
        "b": pa.types.is_boolean,
        "i": pa.types.is_signed_integer,
        "u": pa.types.is_unsigned_integer,
        "f": pa.types.is_floating,
        "n": pa.types.is_null,  # what a writer infers when every list is empty
    }
    return next((kind for kind, test in tests.items() if test(data_type)), "?")


def _rewards(file: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
    if _kind(column.type) == "?":
        raise input_error(
            f"file {file!r}, every row, column 'reward'",
            expected="a number in each row",
            got=f"type {column.type}",
            fix="Store rewards as floats, null or NaN where unknown.",
        )
    values: NDArray[np.float64] = column.cast(pa.float64()).fill_null(np.nan).to_numpy()
    return values


def _names(file: str, name: str, column: pa.ChunkedArray) -> tuple[str, ...]:
    data_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = pa.types.is_string(data_type) or pa.types.is_large_string(data_type)
    if not (text or _kind(data_type) in "iun"):
        raise input_error(
            f"file {file!r}, every row, column {name!r}",
            expected="text or an integer in each row",
            got=f"type {column.type}",
            fix="Store the column as strings.",
        )
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise input_error(
            f"file {file!r}, row {row}, column {name!r}",
            expected="text or an integer",
            got="null",
            fix="Name every row, or leave the column out.",
        )
    return tuple(column.cast(pa.string()).to_pylist())
