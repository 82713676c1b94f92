"""What every ``harts bench`` shares: options, the table of verdicts, and the file of figures."""

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from harts.errors import InputError
from harts.files import check_writable, replace_text

if TYPE_CHECKING:
    from harts.bench.measure import Result

Data = Annotated[
    list[Path] | None, typer.Option(help="Trajectory files; default: synthetic workloads.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")]
Json = Annotated[Path | None, typer.Option(help="Write the figures here.")]


def check_json(json: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if json is not None:
        check_writable(json, "the figures")


def check_names(files: Sequence[Path]) -> None:
    """Refuse two files of one name, by which figures are told apart."""
    stems = [file.stem for file in files]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise InputError(
            f"--data names {twice[0]!r} more than once, and figures are told apart by the names of "
            "their files: give each file once, under a name of its own"
        )


def finish(
    title: str, results: Sequence["Result"], figures: dict[str, Any], json: Path | None
) -> None:
    """Show the verdicts and write the figures; exit status 1 when a bound is missed."""
    _show(title, results)
    if json is not None:
        verdicts = [{**asdict(r), "passed": r.passed} for r in results]
        write_figures(json, {**figures, "results": verdicts})
    if not all(r.passed for r in results):
        raise typer.Exit(1)


def _show(title: str, results: Sequence["Result"]) -> None:
    table = Table(title=title)
    for column in ("figure", "value", "bound", "", "how"):
        table.add_column(column)
    for r in results:
        verdict = "[green]ok[/]" if r.passed else "[bold red]MISSED[/]"
        bound = f"{'>=' if r.at_least else '<='} {r.bound:g} {r.unit}"
        table.add_row(r.name, f"{r.value:.3f} {r.unit}", bound, verdict, r.detail)
    Console().print(table)


def write_figures(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, all of it or nothing."""
    replace_text(path, json_format.dumps(report, indent=1) + "\n", "the figures")
