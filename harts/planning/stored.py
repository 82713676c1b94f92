"""Plans as files: the JSON of ``harts plan --json``, written with its batch's digest, and read.

A file is not trusted. What it says is compared with its trajectories, and the plan is verified as
a whole, so a plan that loads is valid for the batch it was loaded with.

Shapes: S semantic positions · N trajectories · V segments of one microbatch.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import numpy as np

from harts.errors import InputError, PlanError
from harts.forest import PrefixForest
from harts.planning.calls import CallPlan, PackedSequence, StateRef
from harts.planning.schedule import Objective
from harts.planning.step import PLAN_VERSION, Microbatch, StepPlan
from harts.planning.verify import (
    check_coverage,
    check_filler,
    check_segments,
    describe,
    refuse,
    verify_plan,
)
from harts.trajectories import TrajectoryBatch


def batch_digest(batch: TrajectoryBatch) -> str:
    """SHA-256 of everything in a batch that planning sees: tokens, bounds and identity keys."""
    digest = hashlib.sha256()
    for column in (batch.offsets, batch.tokens, batch.identity):
        if column is not None:
            content = np.ascontiguousarray(column)
            digest.update(content.nbytes.to_bytes(8, "little"))
            digest.update(content.data)
    return digest.hexdigest()


def save_plan(plan: StepPlan, path: Path, batch: TrajectoryBatch) -> None:
    """Write a plan with the digest of its batch, by which `load_plan` knows every other batch.

    Raises:
        InputError: the file cannot be written.
    """
    dataclasses.replace(plan, batch_digest=batch_digest(batch)).save(path)


def load_plan(path: Path, batch: TrajectoryBatch) -> StepPlan:
    """Read a plan of ``batch`` and verify it.

    A plan without a digest loads with any batch for which it is valid: equal in the number, lengths
    and common prefixes of trajectories, though maybe not in their tokens.

    Raises:
        InputError: the file cannot be read, is no JSON, has another version, or lacks a key; the
            message names the key.
        PlanError: the plan is not valid, or not a plan of this batch.
    """
    document = _read(path)
    _check_version(document)
    digest = _checked_digest(document, batch)
    raw, merged = document["raw_tokens"].integer(), document["merged_tokens"].integer()
    listed = document["microbatches"].items()
    members = [entry["members"].integers() for entry in listed]
    marks = [entry.find("filler") for entry in listed]
    fillers = [mark is not None and mark.boolean() for mark in marks]
    # Rows must exist before forests can be built from them.
    check_coverage({k: rows for k, rows in enumerate(members) if not fillers[k]}, len(batch))
    for k, rows in enumerate(members):
        if fillers[k]:
            check_filler(f"microbatch {k}", rows, len(batch))
    # The place of each row in the sorted order; without sharing, merged tokens equal raw tokens.
    forest = PrefixForest.build(batch, share=merged != raw)
    place = np.argsort(forest.members)
    chunk_size = document["chunk_size"].integer()
    plan = StepPlan(
        replicas=document["D"].integer(),
        capacity=document["T"].integer(),
        chunk_size=chunk_size,
        objective=Objective(*document["objective"].integers(3)),
        lower_bound=document["lower_bound"].integer(),
        raw_tokens=raw,
        merged_tokens=merged,
        timings_s={key: value.number() for key, value in document["timings_s"].entries().items()},
        microbatches=tuple(
            _microbatch(k, entry, forest.subset(np.sort(place[rows])), chunk_size, filler)
            for k, (entry, rows, filler) in enumerate(zip(listed, members, fillers, strict=True))
        ),
        batch_digest=digest,
    )
    verify_plan(plan, batch)
    for k, (entry, microbatch) in enumerate(zip(listed, plan.microbatches, strict=True)):
        _check_written_totals(k, entry, microbatch)
    return plan


def _checked_digest(document: "_Value", batch: TrajectoryBatch) -> str | None:
    written = document.find("batch_digest")
    if written is None:
        return None
    digest, own = written.text(), batch_digest(batch)
    if digest != own:
        raise PlanError(
            f"{document.path} is a plan of other trajectories: expected those with digest "
            f"{digest[:16]}..., got {own[:16]}... Give the planned files in the planned order, or "
            "plan these."
        )
    return digest


def _check_version(document: "_Value") -> None:
    version = document["version"].integer()
    if version != PLAN_VERSION:
        raise InputError(
            f"{document.path}, key version: expected {PLAN_VERSION}, got {version}: another "
            "release of HARTS wrote this plan. Plan again with this one."
        )


def _microbatch(
    number: int, entry: "_Value", forest: PrefixForest, chunk_size: int, filler: bool
) -> Microbatch:
    """One microbatch, its tree compared with that of its trajectories."""
    microbatch = Microbatch(
        replica=entry["replica"].integer(),
        slot=entry["slot"].integer(),
        forest=forest,
        calls=CallPlan(
            chunk_size=chunk_size,
            rounds=tuple(
                tuple(_sequence(sequence) for sequence in packed.items())
                for packed in entry["calls"]["rounds"].items()
            ),
        ),
        filler=filler,
    )
    where = describe(number, microbatch)
    check_segments(where, (forest.lengths, forest.lcp), _tree(where, entry["tree"]["segments"]))
    return microbatch


def _check_written_totals(number: int, entry: "_Value", microbatch: Microbatch) -> None:
    for name, total in (
        ("compact_tokens", microbatch.compact_tokens),
        ("replay_tokens", microbatch.calls.replay_tokens),
    ):
        written = entry[name].integer()
        if written != total:
            refuse(name.replace("_", " "), describe(number, microbatch), total, written)


def _tree(where: str, listed: "_Value") -> tuple[list[int], list[int], list[int]]:
    """Parent, start and end, each [V], of a file's segments."""
    parent: list[int] = []
    start: list[int] = []
    end: list[int] = []
    for v, segment in enumerate(listed.items()):
        number, parent_id = segment["id"].integer(), segment["parent"]
        above = None if parent_id.content is None else parent_id.integer()
        if number != v:
            refuse("segments", f"{where}, segment {v}", f"id {v}, its place in the list", number)
        if above is not None and not 0 <= above < v:
            refuse("segments", f"{where}, segment {v}", f"a parent of 0 to {v - 1}, or null", above)
        parent.append(-1 if above is None else above)
        start.append(0 if above is None else end[above])
        end.append(start[v] + segment["len"].integer())
    return parent, start, end


def _sequence(entry: "_Value") -> PackedSequence:
    state = entry["init"]
    low, high = entry["replay"].integers(2)
    return PackedSequence(
        chain=tuple(entry["chain"].integers()),
        initial_state=None
        if state.content is None
        else StateRef(segment=state["seg"].integer(), position=state["pos"].integer()),
        replay=(low, high),
        boundaries=tuple(entry["request"].integers()),
    )


def _read(path: Path) -> "_Value":
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is no plan: expected the JSON that harts plan --json writes, got {error}. "
            "Plan again with --json."
        ) from error
    return _Value(content=content, path=path, key="")


_INT64 = np.iinfo(np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A JSON value that knows its place in the file; every reading checks the type."""

    content: Any
    path: Path
    key: str

    def __getitem__(self, key: str) -> "_Value":
        found = self.find(key)
        if found is None:
            self._below(None, key).refuse("this key", "none")
        return found

    def find(self, key: str) -> "_Value | None":
        """The value of a key that may be absent."""
        if not isinstance(self.content, dict):
            self.refuse("an object")
        return self._below(self.content[key], key) if key in self.content else None

    def entries(self) -> "dict[str, _Value]":
        """All keys of an object."""
        if not isinstance(self.content, dict):
            self.refuse("an object")
        return {key: self._below(value, key) for key, value in self.content.items()}

    def items(self) -> "list[_Value]":
        """The entries of a list."""
        if not isinstance(self.content, list):
            self.refuse("a list")
        return [
            _Value(content=value, path=self.path, key=f"{self.key}[{i}]")
            for i, value in enumerate(self.content)
        ]

    def integer(self) -> int:
        """A whole number of 64 bits; ``true`` is none."""
        if type(self.content) is not int or not _INT64.min <= self.content <= _INT64.max:
            self.refuse("a whole number")
        return int(self.content)

    def integers(self, count: int | None = None) -> list[int]:
        """A list of whole numbers, of ``count`` of them if given."""
        numbers = [value.integer() for value in self.items()]
        if count is not None and len(numbers) != count:
            self.refuse(f"{count} whole numbers")
        return numbers

    def number(self) -> float:
        """Any finite number."""
        if type(self.content) not in (int, float) or not abs(self.content) <= sys.float_info.max:
            self.refuse("a number")
        return float(self.content)

    def boolean(self) -> bool:
        """``true`` or ``false``."""
        if not isinstance(self.content, bool):
            self.refuse("true or false")
        return bool(self.content)

    def text(self) -> str:
        """A string."""
        if not isinstance(self.content, str):
            self.refuse("text")
        return str(self.content)

    def refuse(self, expected: str, got: str | None = None) -> NoReturn:
        """Raise the InputError that names the file and the key."""
        place = f"key {self.key}" if self.key else "as a whole"
        found = shorten(repr(self.content), 60) if got is None else got
        raise InputError(
            f"{self.path}, {place}: expected {expected}, got {found}. Plan again with --json."
        )

    def _below(self, content: Any, key: str) -> "_Value":
        return _Value(content=content, path=self.path, key=f"{self.key}.{key}" if self.key else key)
