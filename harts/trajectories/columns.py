"""What the per-token columns are called, what they may hold, and how an error about them reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError


def input_error(where: str, *, expected: str, got: object, fix: str) -> InputError:
    """An `InputError` in the one form that all ingestion errors have."""
    # Messages of other libraries bring their own full stop.
    return InputError(f"{where}: expected {expected}, got {str(got).removesuffix('.')}. {fix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumn:
    """One per-token column: its name in files, its attribute in the record and what it may hold."""

    name: str
    attribute: str
    dtype: type[np.generic]
    kinds: str  # NumPy dtype kinds accepted, e.g. "iu" for signed and unsigned integers
    expected: str
    minimum: int | None = None
    maximum: int | None = None

    def first_bad(self, values: NDArray[Any]) -> int | None:
        """The first index whose value is outside the column's range, or None."""
        if self.minimum is None or self.maximum is None or values.size == 0:
            return None
        if self.dtype is np.bool_ and values.dtype.kind == "f":
            good = (values == 0) | (values == 1)
        elif self.minimum <= values.min() and values.max() <= self.maximum:
            return None
        else:
            good = (values >= self.minimum) & (values <= self.maximum)
        return None if bool(good.all()) else int(np.argmin(good))

    def cast(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values in the record's dtype; call it only where `first_bad` found nothing."""
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values.astype(self.dtype, copy=False))


INT64: Final = np.iinfo(np.int64)
_FLOAT: Final[dict[str, Any]] = {"dtype": np.float32, "kinds": "fiu", "expected": "numbers"}
TOKEN_COLUMNS: Final[dict[str, TokenColumn]] = {
    column.name: column
    for column in (
        TokenColumn(
            name="token_ids",
            attribute="tokens",
            dtype=np.int32,
            kinds="iu",
            expected="integers from 0 to 2147483647",
            minimum=0,
            maximum=int(np.iinfo(np.int32).max),
        ),
        TokenColumn(
            name="loss_mask",
            attribute="loss_mask",
            dtype=np.bool_,
            kinds="biuf",
            expected="0 or 1",
            minimum=0,
            maximum=1,
        ),
        TokenColumn(name="logprobs", attribute="logprobs", **_FLOAT),
        TokenColumn(name="ref_logprobs", attribute="ref_logprobs", **_FLOAT),
        TokenColumn(name="advantages", attribute="advantages", **_FLOAT),
        TokenColumn(
            name="identity",
            attribute="identity",
            dtype=np.int64,
            kinds="iu",
            expected="integers of 64 bits",
            minimum=int(INT64.min),
            maximum=int(INT64.max),
        ),
    )
}
"""Every per-token column by its name in files; `token_ids` comes first and is required."""


def bad_value(where: str, column: TokenColumn, got: object) -> InputError:
    """The error for one value outside its column's range."""
    if isinstance(got, float) and got.is_integer():
        got = int(got)  # a file's 2, read into a column of floats
    return input_error(where, expected=column.expected, got=got, fix="Correct the value.")


def empty_trajectory(where: str, got: str = "an empty trajectory") -> InputError:
    """The error for a trajectory without tokens; ``where`` names its row."""
    return input_error(
        f"{where}, column 'token_ids'",
        expected="at least one token",
        got=got,
        fix="Remove the trajectory or give it its tokens.",
    )
