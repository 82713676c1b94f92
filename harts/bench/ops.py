"""``harts bench ops``: operators on a GPU, gated on correctness and measured against a yardstick.

Each part is a module of its own with ``measure(progress, trees) -> Report``; a part is imported
when it is asked for, since parts need different packages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts.bench.measure import Result, environment
from harts.bench.packed_files import packed_file
from harts.errors import InputError, UnsupportedError

Progress = Callable[[str], None]
Trees = Mapping[str, Callable[[], list[NDArray[np.int32]]]]
"""Name to a function that makes trajectories of 65,536 compact rows."""

PARTS = {
    "delta-rule": "harts.bench.ops_delta_rule",
    "attention": "harts.bench.ops_attention",
    "convolution": "harts.bench.ops_convolution",
    "log-probs": "harts.bench.ops_logprobs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures with bounds, and everything else that was measured."""

    results: list[Result]
    figures: dict[str, Any] = field(default_factory=dict)
    """Name to number; units are in the names: _ms, _gib, _ratio."""


def measure_parts(
    names: Sequence[str], progress: Progress, files: Sequence[Path] = ()
) -> dict[str, Report]:
    """Run the named parts on the current GPU, one after the other.

    With files of trajectories each part measures those, cut to 65,536 compact rows, instead of
    its own trees.

    Raises:
        InputError: no such part, or a file is too small.
        UnsupportedError: no GPU.
        HartsError: a part could not be measured.
    """
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise InputError(f"bench ops: parts are {', '.join(PARTS)}; got {', '.join(unknown)}.")
    if not torch.cuda.is_available():
        raise UnsupportedError("bench ops measures a GPU and found none: run it on one.")
    packed = {path.stem: packed_file(path) for path in files}
    trees = {name: partial(_same, tokens) for name, tokens in packed.items()} or None
    reports = {}
    for name in names:
        progress(name)
        reports[name] = import_module(PARTS[name]).measure(progress, trees)
    return reports


def _same(tokens: list[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    return tokens


def environment_of(device: str) -> dict[str, Any]:
    """What ran: this machine for ``cpu``, its GPU else."""
    return environment() if device == "cpu" else gpu_environment()


def gpu_environment() -> dict[str, Any]:
    """Device and versions, beside `harts.bench.measure.environment`."""
    major, minor = torch.cuda.get_device_capability()
    found = {}
    for name in ("torch", "triton", "fla-core", "flash-attn-4"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return {
        "device": torch.cuda.get_device_name(),
        "compute_capability": f"{major}.{minor}",
        "cuda": torch.version.cuda,
        "versions": found,
    }


def median_ms(work: Callable[[], object], repeats: int = 15, warm_up: int = 3) -> float:
    """Median milliseconds of GPU time, by events around each run."""
    times = []
    for repeat in range(warm_up + repeats):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= warm_up:
            times.append(begin.elapsed_time(end))
    times.sort()
    return float(times[len(times) // 2])


def peak_gib(work: Callable[[], object]) -> float:
    """Peak GiB allocated on the GPU while work runs, its inputs included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated()) / 2**30
