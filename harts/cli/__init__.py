"""The command line: one module a command, errors as one readable block (DESIGN section 4)."""

import os
import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from harts import __version__
from harts.cli.bench import bench
from harts.cli.check import check
from harts.cli.fidelity import fidelity
from harts.cli.inspect import inspect
from harts.cli.plan import plan
from harts.cli.synth import synth
from harts.cli.train import train
from harts.errors import HartsError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _complain("interrupted", "stopped before it was done (Ctrl-C).")
            raise typer.Exit(128 + signal.SIGINT) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train hybrid-attention agents on rollout trees: every shared token once.",
)
for command in (plan, inspect, check, fidelity, train, synth):
    app.command()(command)
app.add_typer(bench, name="bench")

_debug = False


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    global _debug
    _debug = debug


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the answer is no, 2 bad usage or input.

    Ctrl-C exits with 130, as shells expect.
    """
    # Threads that spin while they wait slow a step many times over when other programs run. The
    # thread library reads this when torch is imported, which commands do late.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(arguments)
    except HartsError as error:
        if _debug:
            raise
        _complain("error", str(error))
        sys.exit(2)
    except Exception as error:
        if _debug:
            raise
        _complain(
            "unexpected error",
            f"{type(error).__name__}: {error}\nThis is a fault in HARTS or below it. Run again "
            "with `harts --debug ...` for the traceback, and please report it.",
        )
        sys.exit(2)


def _complain(title: str, message: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold red]{title}:[/] ", end="")
    # A path must come out whole, to be copied: the terminal wraps, not we.
    console.print(message, markup=False, soft_wrap=True)
