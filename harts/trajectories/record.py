"""The first record of the flow: trajectories as flat arrays, checked once when they are built.

Shapes: S semantic positions (all tokens of all trajectories), N trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from harts.trajectories.columns import (
    TOKEN_COLUMNS,
    TokenColumn,
    bad_value,
    empty_trajectory,
    input_error,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Provenance:
    """Where each trajectory came from, so that an error can name the file and the row.

    `files` are names; `file_of [N]` indexes them; `row [N]` counts from 0 within the file.
    """

    files: tuple[str, ...]
    file_of: NDArray[np.int32]
    row: NDArray[np.int64]

    @classmethod
    def single(cls, file: str, rows: int) -> Provenance:
        """All `rows` rows of one file, in order."""
        return cls(
            files=(file,),
            file_of=np.zeros(rows, np.int32),
            row=np.arange(rows, dtype=np.int64),
        )

    def describe(self, index: int) -> str:
        """`file 'a.parquet', row 3` for trajectory `index`."""
        return f"file {self.files[self.file_of[index]]!r}, row {self.row[index]}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryBatch:
    """N complete trajectories with their RL metadata (the semantic positions of section 2.1).

    Every column is aligned to tokens: entry i belongs to token i. `at_positions` is the one place
    where a column is turned to log-prob positions. Arrays are read-only and are not copied when
    they already have the right type, so do not write to them through another name either.

    Attributes:
        tokens: [S] int32, trajectory after trajectory.
        offsets: [N+1] int64; trajectory x is `tokens[offsets[x]:offsets[x+1]]`, never empty.
        loss_mask: [S] bool, true where the policy produced the token.
        rewards: [N] float64, NaN where unknown.
        tree_ids, trajectory_ids: [N] names; a tree is the group of group-relative advantages.
        logprobs, ref_logprobs: [S] float32 or None, log-prob OF token i under the behaviour and the
            reference policy. Finite where the loss mask is 1; a non-finite value elsewhere, or at
            the first token of a trajectory, is stored as 0 so that 0 x NaN cannot reach a loss.
        advantages: [S] float32 or None, finite everywhere.
        identity: [S] int64 or None; tokens share a compact row only where it is equal as well.
        extra: unknown columns of the input, one row a trajectory, or None.
        provenance: the file and row of each trajectory, or None.

    Raises:
        InputError: naming file (when known), row, column and position, on construction.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    tree_ids: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    logprobs: NDArray[np.float32] | None = None
    ref_logprobs: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    identity: NDArray[np.int64] | None = None
    extra: pa.Table | None = None
    provenance: Provenance | None = None

    @classmethod
    def from_flat(
        cls,
        tokens: ArrayLike,
        offsets: ArrayLike,
        *,
        loss_mask: ArrayLike | None = None,
        rewards: ArrayLike | None = None,
        tree_ids: Sequence[str] | None = None,
        trajectory_ids: Sequence[str] | None = None,
        **rest: Any,
    ) -> TrajectoryBatch:
        """A batch with the defaults of the file format filled in.

        Defaults: the loss mask is 1 on all but the first token of each trajectory, rewards are
        unknown, one tree "0", trajectories named by row number. `rest` are other attributes.
        """
        flat = np.asarray(tokens)
        bounds = np.atleast_1d(np.asarray(offsets))
        rows = max(0, bounds.size - 1)
        if loss_mask is None:
            loss_mask = np.ones(flat.shape, np.bool_)
            starts = bounds[:-1]
            # Offsets are only validated later, so a wrong one must not fail here first.
            loss_mask[starts[(starts >= 0) & (starts < flat.size)].astype(np.int64)] = False
        return cls(
            tokens=flat,
            offsets=bounds,
            loss_mask=np.asarray(loss_mask),
            rewards=np.full(rows, np.nan) if rewards is None else np.asarray(rewards),
            tree_ids=("0",) * rows if tree_ids is None else tuple(tree_ids),
            trajectory_ids=tuple(
                map(str, range(rows)) if trajectory_ids is None else trajectory_ids
            ),
            **rest,
        )

    def __post_init__(self) -> None:
        self._set("offsets", self._checked_offsets())
        self._check_counts()
        for column in TOKEN_COLUMNS.values():
            values = getattr(self, column.attribute)
            if values is not None:
                self._set(column.attribute, self._checked_column(column, np.asarray(values)))
        for name in ("logprobs", "ref_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, self._finite_where_needed(name))
        if self.advantages is not None:
            self._refuse_at("advantages", ~np.isfinite(self.advantages))
        self._set("rewards", self._checked_rewards())

    def __len__(self) -> int:
        return self.offsets.size - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens in each trajectory."""
        return np.diff(self.offsets)

    @property
    def raw_tokens(self) -> int:
        """S, the token occurrences before sharing."""
        return self.tokens.size

    @property
    def position_offsets(self) -> NDArray[np.int64]:
        """[N+1] bounds of each trajectory's log-prob positions in what `at_positions` returns."""
        return self.offsets - np.arange(self.offsets.size)

    def trajectory(self, index: int) -> NDArray[np.int32]:
        """The tokens of one trajectory, a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def at_positions(self, column: NDArray[Any]) -> NDArray[Any]:
        """Turn a token-aligned column [S, ...] into a position-aligned one [S-N, ...].

        The log-prob at position i predicts token i+1, so the entry of each trajectory's first
        token, which nothing predicts, is dropped. The border for alignment is here and only here.
        """
        if column.shape[:1] != (self.raw_tokens,):
            raise input_error(
                "at_positions",
                expected=f"a column of {self.raw_tokens} entries, one a token",
                got=f"shape {column.shape}",
                fix="Pass a token-aligned column of this batch.",
            )
        keep = np.ones(self.raw_tokens, np.bool_)
        keep[self.offsets[:-1]] = False
        return column[keep]

    def select(self, indices: ArrayLike) -> TrajectoryBatch:
        """The trajectories at `indices`, in that order; a row may be taken more than once."""
        rows = np.asarray(indices, dtype=np.int64).reshape(-1)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise input_error(
                "select",
                expected=f"row indices from 0 to {len(self) - 1}",
                got=f"{rows[(rows < 0) | (rows >= len(self))][0]}",
                fix="Use indices of this batch.",
            )
        bounds = [(self.offsets[row], self.offsets[row + 1]) for row in rows]
        columns: dict[str, Any] = {}
        for column in TOKEN_COLUMNS.values():
            values = getattr(self, column.attribute)
            if values is not None:
                parts = [values[start:end] for start, end in bounds]
                columns[column.attribute] = np.concatenate([values[:0], *parts])
        source = self.provenance
        return TrajectoryBatch(
            offsets=np.concatenate([[0], np.cumsum(self.lengths[rows])]).astype(np.int64),
            rewards=self.rewards[rows],
            tree_ids=tuple(self.tree_ids[row] for row in rows),
            trajectory_ids=tuple(self.trajectory_ids[row] for row in rows),
            extra=None if self.extra is None else self.extra.take(pa.array(rows)),
            provenance=None
            if source is None
            else Provenance(files=source.files, file_of=source.file_of[rows], row=source.row[rows]),
            **columns,
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a token id that a model with `vocab_size` embeddings does not have."""
        if int(self.tokens.max()) < vocab_size:
            return
        index = int(np.argmax(self.tokens >= vocab_size))
        raise input_error(
            self.describe_token(index, "token_ids"),
            expected=f"token ids below the vocabulary size {vocab_size}",
            got=self.tokens[index],
            fix="Use the model whose tokenizer made these trajectories, or tokenize them again.",
        )

    def describe_row(self, row: int) -> str:
        """`file 'a.parquet', row 3`, or `trajectory 3` when the batch came from no file."""
        return f"trajectory {row}" if self.provenance is None else self.provenance.describe(row)

    def describe_token(self, index: int, column: str) -> str:
        """Where flat token `index` is: file, row, column and position in its trajectory."""
        row = int(np.searchsorted(self.offsets, index, side="right")) - 1
        position = index - int(self.offsets[row])
        return f"{self.describe_row(row)}, column {column!r}, position {position}"

    def _set(self, name: str, value: NDArray[Any]) -> None:
        value = value.view()
        value.flags.writeable = False
        object.__setattr__(self, name, value)

    def _checked_offsets(self) -> NDArray[np.int64]:
        offsets = np.asarray(self.offsets)
        size = np.asarray(self.tokens).size
        if (
            offsets.ndim != 1
            or offsets.dtype.kind not in "iu"
            or offsets.size < 2
            or offsets[0] != 0
            or offsets[-1] != size
        ):
            got = f"{offsets[0]} to {offsets[-1]}" if offsets.ndim == 1 and offsets.size else "none"
            raise input_error(
                "trajectory offsets",
                expected=f"at least one trajectory, integer offsets from 0 to {size} tokens",
                got=f"{offsets.size} offsets, {got}",
                fix="Give N+1 offsets, each where a trajectory starts, the last where all end.",
            )
        offsets = offsets.astype(np.int64, copy=False)
        lengths = np.diff(offsets)
        if lengths.min() <= 0:
            row = int(np.argmax(lengths <= 0))
            got = "an empty trajectory" if lengths[row] == 0 else "offsets that fall"
            raise empty_trajectory(self.describe_row(row), got)
        return offsets

    def _check_counts(self) -> None:
        counts: dict[str, tuple[int, int]] = {
            "tree_ids": (len(self.tree_ids), len(self)),
            "trajectory_ids": (len(self.trajectory_ids), len(self)),
            "rewards": (np.asarray(self.rewards).size, len(self)),
        }
        if self.extra is not None:
            counts["extra"] = (self.extra.num_rows, len(self))
        if self.provenance is not None:
            counts["provenance"] = (self.provenance.row.size, len(self))
        for name, (got, expected) in counts.items():
            if got != expected:
                raise input_error(
                    f"column {name!r}",
                    expected=f"{expected} entries, one a trajectory",
                    got=got,
                    fix="Give every trajectory one entry.",
                )

    def _checked_column(self, column: TokenColumn, values: NDArray[Any]) -> NDArray[Any]:
        size = int(self.offsets[-1])
        if values.shape != (size,) or values.dtype.kind not in column.kinds:
            raise input_error(
                f"column {column.name!r}",
                expected=f"{size} {column.expected} in a flat array",
                got=f"{values.dtype} of shape {values.shape}",
                fix="Give every token of every trajectory one entry.",
            )
        bad = column.first_bad(values)
        if bad is not None:
            raise bad_value(self.describe_token(bad, column.name), column, values[bad])
        return column.cast(values)

    def _finite_where_needed(self, name: str) -> NDArray[Any]:
        values: NDArray[np.float32] = getattr(self, name)
        wrong = ~np.isfinite(values)
        if not wrong.any():
            return values
        needed = self.loss_mask.copy()
        needed[self.offsets[:-1]] = False
        self._refuse_at(name, wrong & needed)
        return np.where(wrong, np.float32(0), values)

    def _refuse_at(self, name: str, wrong: NDArray[np.bool_]) -> None:
        if not wrong.any():
            return
        index = int(np.argmax(wrong))
        where = "" if name == "advantages" else " where the loss mask is 1"
        raise input_error(
            self.describe_token(index, name),
            expected=f"a finite number{where}",
            got=getattr(self, name)[index],
            fix="Correct the value, or set the token's loss_mask to 0 and the value to 0.",
        )

    def _checked_rewards(self) -> NDArray[np.float64]:
        rewards = np.asarray(self.rewards)
        if rewards.ndim != 1 or rewards.dtype.kind not in "biuf":
            raise input_error(
                "column 'reward'",
                expected="one number a trajectory",
                got=f"{rewards.dtype} of shape {rewards.shape}",
                fix="Give a float, NaN where the reward is unknown.",
            )
        infinite = np.isinf(rewards)
        if infinite.any():
            row = int(np.argmax(infinite))
            raise input_error(
                f"{self.describe_row(row)}, column 'reward'",
                expected="a finite number, or NaN where the reward is unknown",
                got=rewards[row],
                fix="Correct the reward.",
            )
        return rewards.astype(np.float64, copy=False)
