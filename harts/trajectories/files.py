"""Reading files: which reader an extension gets, and several files as one batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from harts.trajectories.columns import input_error
from harts.trajectories.concatenation import concatenate
from harts.trajectories.json_lines import read_json_lines
from harts.trajectories.parquet import read_parquet
from harts.trajectories.record import TrajectoryBatch

READERS: Final[dict[str, Callable[[Path], TrajectoryBatch]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
}


def read_trajectories(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> TrajectoryBatch:
    """Read one file or several, Parquet (.parquet) or JSON lines (.jsonl, .json), in order.

    One row a trajectory: `token_ids` lists (required), optional lists `loss_mask`, `logprobs`,
    `ref_logprobs`, `advantages`, `identity` of the same lengths, optional `reward`, `tree_id`,
    `trajectory_id`. Rewards are numbers, or true and false for 1 and 0. Unknown columns are carried
    in `extra`; one whose JSON values have no type in common is carried as text, each in its JSON
    form, and such a file is read more slowly.

    Raises:
        InputError: naming file, row, column, what was expected, what came and what to change.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise input_error(
            "read_trajectories", expected="at least one file", got="none", fix="Name a file."
        )
    return concatenate([_read(Path(path)) for path in several])


def _read(path: Path) -> TrajectoryBatch:
    where = f"file {str(path)!r}"
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise input_error(
            where,
            expected=f"a name that ends in {', '.join(READERS)}",
            got=path.suffix or "no extension",
            fix="Rename the file or convert it to Parquet or JSON lines.",
        )
    if not path.is_file():
        got = "a directory" if path.is_dir() else "no such file"
        raise input_error(where, expected="a readable file", got=got, fix="Check the path.")
    return reader(path)
