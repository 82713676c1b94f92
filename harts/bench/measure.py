"""Times and peak memory, measured so that only their ratios have to be trusted."""

import multiprocessing
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from harts.errors import HartsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure beside the bound that it must meet."""

    name: str
    value: float
    unit: str
    bound: float
    at_least: bool = False
    """The bound is a floor, not a ceiling."""
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the figure meets its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def side_by_side(
    work: Mapping[str, Callable[[], object]], repeats: int, progress: Callable[[str], None]
) -> dict[str, float]:
    """Median seconds of each piece of work, run in turns; one round before it is not timed."""
    spent: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name, run in work.items():
            progress(f"{name}, {repeat} of {repeats}")
            began = time.perf_counter()
            run()
            spent[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in spent.items()}


def peak_extra_bytes(prepare: Callable[[], Callable[[], object]]) -> int:
    """Peak resident memory that a piece of work adds, measured in a process of its own.

    ``prepare``, which must pickle, makes the inputs and returns the work on them.

    Raises:
        HartsError: the process ended without a figure, most likely for want of memory.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(prepare, sender))
    process.start()
    sender.close()
    try:
        extra: int = receiver.recv()
    except EOFError as error:
        process.join()
        raise HartsError(
            f"measuring the memory of {prepare} ended with status {process.exitcode}: "
            "expected a figure; free some memory and run again"
        ) from error
    process.join()
    return extra


def _measure_peak(prepare: Callable[[], Callable[[], object]], sender: Any) -> None:
    work = prepare()
    # The peak that getrusage reports is inherited from the parent; this one starts here.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    work()
    sender.send(_status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    """A memory figure of this process, as Linux reports it in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise HartsError(f"expected {field} in /proc/self/status; memory is measured on Linux only")


def environment() -> dict[str, Any]:
    """What a reader needs to run a benchmark again: commit, device, versions."""
    packages = ("harts", "torch", "transformers", "numpy", "pyarrow")
    return {
        "commit": commit(),
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def commit() -> str:
    """Commit of the checkout that holds this file, marked where files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
