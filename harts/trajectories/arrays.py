"""Trajectories already in memory: lists of arrays, and padded dictionaries as trainers have them.

Shapes: S semantic positions, N trajectories, T padded length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harts.trajectories.assembly import FlatColumn, assemble, missing_tokens
from harts.trajectories.columns import TOKEN_COLUMNS, bad_value, input_error
from harts.trajectories.record import TrajectoryBatch

PADDED_NAMES: Final = {
    "input_ids": "token_ids",
    "ref_logp": "ref_logprobs",
    "reward": "rewards",
    "tree_id": "tree_ids",
    "trajectory_id": "trajectory_ids",
}
"""Other names that padded dictionaries use, and the name here."""


def from_lists(token_ids: Sequence[Any], **columns: Any) -> TrajectoryBatch:
    """A batch from one sequence of token ids a trajectory.

    Args:
        token_ids: N sequences of integers.
        columns: `loss_mask`, `logprobs`, `ref_logprobs`, `advantages`, `identity` as N sequences
            of the same lengths; `rewards`, `tree_ids`, `trajectory_ids` as N entries; `extra`.

    Raises:
        InputError: naming trajectory, column and position.
    """
    lists = {name: columns.pop(name) for name in TOKEN_COLUMNS if columns.get(name) is not None}
    flat = {
        name: _flatten(name, values) for name, values in {"token_ids": token_ids, **lists}.items()
    }
    rest = {name: value for name, value in columns.items() if value is not None}
    return assemble(flat, describe_row=lambda row: f"trajectory {row}", **rest)


def from_padded(
    data: Mapping[str, Any], *, position_aligned: Collection[str] = ()
) -> TrajectoryBatch:
    """A batch from padded arrays, padded on either side.

    Args:
        data: `input_ids [N, T]`, optional `attention_mask [N, T]` (default: no padding), per-token
            columns [N, T] and per-row columns [N] under the names of `from_lists` (`ref_logp`
            and `reward` are understood too). Others are carried in `extra`. NumPy arrays or
            anything that turns into one, tensors included.
        position_aligned: columns whose entry i belongs to the log-prob position that predicts
            token i+1 (what is left after `torch.roll(..., -1)`); they are shifted to tokens here.

    Raises:
        InputError: a hole in the attention mask, a shape that fits no token or row, a bad value.
    """
    aligned = {PADDED_NAMES.get(name, name) for name in position_aligned}
    arrays = {PADDED_NAMES.get(name, name): _as_array(value) for name, value in data.items()}
    if "token_ids" not in arrays:
        raise missing_tokens("padded dictionary", list(arrays))
    shape = arrays["token_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise input_error(
            "padded dictionary, column 'input_ids'",
            expected="shape [N, T] of at least one row and one token",
            got=f"shape {list(shape)}",
            fix="Stack the trajectories to one padded array.",
        )
    attention = _checked_attention(arrays.pop("attention_mask", np.ones(shape, np.bool_)), shape)
    lengths = attention.sum(axis=1, dtype=np.int64)
    flat: dict[str, FlatColumn] = {}
    rest: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.shape == shape and name not in _ROW_NAMES:
            values = array[attention]
            if name in aligned:
                values = _to_tokens(values, lengths)
            if name in TOKEN_COLUMNS:
                flat[name] = FlatColumn(values=values, lengths=lengths)
            else:
                bounds = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
                extra[name] = pa.LargeListArray.from_arrays(bounds, pa.array(values))
        elif array.shape in ((shape[0],), (shape[0], 1)) and name not in TOKEN_COLUMNS:
            entries = array.reshape(-1)
            if name in _ROW_NAMES:
                rest[name] = entries if name == "rewards" else [str(entry) for entry in entries]
            else:
                extra[name] = pa.array(entries)
        else:
            raise input_error(
                f"padded dictionary, column {name!r}",
                expected=f"shape {list(shape)} by token or [{shape[0]}] by row",
                got=f"shape {list(array.shape)}",
                fix="Pad the column as input_ids is padded, or leave it out.",
            )
    if extra:
        rest["extra"] = pa.table(extra)
    return assemble(flat, describe_row=lambda row: f"trajectory {row}", **rest)


_ROW_NAMES: Final = ("rewards", "tree_ids", "trajectory_ids")


def _flatten(name: str, lists: Sequence[Any]) -> FlatColumn:
    column = TOKEN_COLUMNS[name]
    arrays = []
    for row, entries in enumerate(lists):
        array = _as_array(entries)
        where = f"trajectory {row}, column {name!r}"
        if array.ndim != 1 or (array.size and array.dtype.kind not in column.kinds):
            raise input_error(
                where,
                expected=f"a flat list of {column.expected}",
                got=f"{array.dtype} of shape {list(array.shape)}",
                fix="Give one number a token.",
            )
        # Cast one by one: joined first, an empty list or a uint64 makes its neighbours floats.
        bad = column.first_bad(array)
        if bad is not None:
            raise bad_value(f"{where}, position {bad}", column, array[bad])
        arrays.append(column.cast(array))
    lengths = np.array([array.size for array in arrays], np.int64)
    values = np.concatenate([np.zeros(0, column.dtype), *arrays])
    return FlatColumn(values=values, lengths=lengths)


def _as_array(value: Any) -> NDArray[Any]:
    """A NumPy array, also of a tensor on a device, under autograd or in bfloat16."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError:  # NumPy has no bfloat16
            value = value.float().numpy()
    return np.asarray(value)


def _checked_attention(mask: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    column = "padded dictionary, column 'attention_mask'"
    if mask.shape != shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise input_error(
            column,
            expected=f"0 or 1 in shape {list(shape)}, as input_ids",
            got=f"{mask.dtype} of shape {list(mask.shape)}",
            fix="Give 1 on tokens and 0 on padding.",
        )
    kept = mask.astype(np.bool_)
    first = kept.argmax(axis=1)
    last = kept.shape[1] - 1 - kept[:, ::-1].argmax(axis=1)
    holes = kept.any(axis=1) & (last - first + 1 != kept.sum(axis=1))
    if holes.any():
        row = int(np.argmax(holes))
        hole = int(first[row]) + int(np.argmin(kept[row, first[row] :]))
        raise input_error(
            f"padded dictionary, row {row}, column 'attention_mask', position {hole}",
            expected="one run of 1 with padding before or after it",
            got="0 between tokens",
            fix="Move the padding to one side; put tokens out of the loss with loss_mask.",
        )
    return kept


def _to_tokens(values: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[Any]:
    shifted = np.zeros_like(values)
    shifted[1:] = values[:-1]
    starts = np.cumsum(lengths) - lengths
    shifted[starts[lengths > 0]] = 0
    return shifted
