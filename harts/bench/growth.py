"""Planning time and peak memory as steps grow, and the time to load a step from Parquet.

Each size is measured in a process of its own, so that its peak is its own. Steps are synthetic: the
first trajectories of the paper's first step, and beyond its size several steps of different seeds
one after the other, which share nothing.

Shapes: S semantic positions · N trajectories.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harts.bench.measure import Result, peak_extra_bytes
from harts.errors import HartsError
from harts.planning.step import plan_step
from harts.synth import synthesize
from harts.trajectories import TrajectoryBatch, read_trajectories, write_trajectories

Progress = Callable[[str], None]

SIZES = (1_000_000, 3_000_000, 10_000_000, 42_000_000, 130_000_000, 420_000_000)
"""Tokens of the steps."""
PRESET = "table2-1"
"""A step of 42.3M tokens."""
REPEATS = 3
"""Times that each step is planned."""
TOKEN_BYTES = np.dtype(np.int32).itemsize
NEEDED_BYTES = 24
"""Memory a token that making and planning a step takes, with some to spare."""
REPLICAS, CAPACITY = 4, 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPoint:
    """One size: its planning time by stage and the peak that planning adds to the tokens.

    ``processor_s`` is the processor's share of that time, which others on the machine prolong less.
    """

    tokens: int
    trajectories: int
    seconds: Mapping[str, float]
    processor_s: float
    extra_bytes: int

    @property
    def planning_s(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())

    @property
    def peak_over_tokens(self) -> float:
        """Tokens and what planning adds to them, over the tokens alone, in bytes."""
        return 1 + self.extra_bytes / (TOKEN_BYTES * self.tokens)

    def to_json(self) -> dict[str, Any]:
        """Every figure."""
        return {
            **asdict(self),
            "planning_s": self.planning_s,
            "peak_over_tokens": self.peak_over_tokens,
        }


def tiled_step(tokens: int, preset: str = PRESET) -> TrajectoryBatch:
    """A step of at most ``tokens`` tokens: synthetic steps of seeds 0, 1, ... behind each other.

    The last one is cut after a trajectory. Steps are copied into place one at a time, so the peak
    is the result and one step.
    """
    flat, mask = np.empty(tokens, np.int32), np.empty(tokens, np.bool_)
    bounds, tree_ids, seed = [0], list[str](), 0
    while True:
        part = synthesize(preset, seed)
        ends = part.offsets[1:]
        kept = int(np.searchsorted(ends, tokens - bounds[-1], side="right"))
        start, size = bounds[-1], int(part.offsets[kept])
        flat[start : start + size] = part.tokens[:size]
        mask[start : start + size] = part.loss_mask[:size]
        bounds += (ends[:kept] + start).tolist()
        tree_ids += [f"step-{seed}/{name}" for name in part.tree_ids[:kept]]
        seed += 1
        if kept < len(part):
            break
    return TrajectoryBatch.from_flat(
        flat[: bounds[-1]], bounds, loss_mask=mask[: bounds[-1]], tree_ids=tree_ids
    )


def prepare_planning(tokens: int, preset: str, report: Path) -> Callable[[], None]:
    """Make a step and return the planning of it, which writes its median times to ``report``."""
    batch = tiled_step(tokens, preset)

    def run() -> None:
        times = []
        for _ in range(REPEATS):
            began = time.process_time()
            plan = plan_step(batch, replicas=REPLICAS, capacity=CAPACITY)
            processor_s = time.process_time() - began
            times.append(({k: t for k, t in plan.timings_s.items() if k != "load"}, processor_s))
            del plan
        seconds, processor_s = sorted(times, key=lambda pair: sum(pair[0].values()))[REPEATS // 2]
        figures = {
            "tokens": batch.raw_tokens,
            "trajectories": len(batch),
            "seconds": seconds,
            "processor_s": processor_s,
        }
        report.write_text(json.dumps(figures))

    return run


def measure_growth(
    largest: int, progress: Progress, sizes: Sequence[int] = SIZES, preset: str = PRESET
) -> Iterator[GrowthPoint]:
    """Plan steps of each size up to ``largest`` tokens, in processes of their own.

    ``preset`` names the synthetic step that larger ones are made of.

    Raises:
        HartsError: there is not enough free memory for a size.
    """
    for tokens in sizes:
        if tokens > largest:
            break
        progress(f"growth: planning {tokens / 1e6:g}M tokens")
        _require_memory(tokens * NEEDED_BYTES)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "figures.json"
            extra = peak_extra_bytes(partial(prepare_planning, tokens, preset, report))
            yield GrowthPoint(**json.loads(report.read_text()), extra_bytes=extra)


def measure_load(progress: Progress) -> tuple[int, float]:
    """Tokens of the first synthetic step, and the median seconds to read it from Parquet."""
    progress("growth: writing a step as Parquet")
    batch = synthesize(PRESET, 0)
    tokens, spent = batch.raw_tokens, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.parquet"
        write_trajectories(batch, path)
        del batch
        for repeat in range(3):
            progress(f"growth: reading {tokens / 1e6:.1f}M tokens, {repeat + 1} of 3")
            began = time.perf_counter()
            read = read_trajectories([path])
            spent.append(time.perf_counter() - began)
            del read
    return tokens, median(spent)


def judge_growth(points: Sequence[GrowthPoint], load: tuple[int, float]) -> Iterator[Result]:
    """Bounds on time at 42M and 420M tokens, on loading, and on memory at every size."""
    bounds = {42_000_000: 0.5, 420_000_000: 6.0}
    for size, bound in bounds.items():
        for point in points:
            if abs(point.tokens / size - 1) < 0.05:
                stages = ", ".join(f"{k} {t:.3f}" for k, t in point.seconds.items())
                yield Result(
                    name=f"planning time at {size // 1_000_000}M tokens",
                    value=point.planning_s,
                    unit="s",
                    bound=bound,
                    detail=f"{point.trajectories:,} trajectories: {stages} s; "
                    f"{point.processor_s:.3f} s of a processor",
                )
    if points:
        # A small step's peak is mostly what any process takes.
        worst = max(points[len(points) // 2 :], key=lambda point: point.peak_over_tokens)
        yield Result(
            name="peak memory of planning over token bytes",
            value=worst.peak_over_tokens,
            unit="x",
            bound=4.0,
            detail=f"tokens included, at {worst.tokens / 1e6:.0f}M: "
            f"{worst.extra_bytes / 1e6:,.0f} MB added",
        )
    yield Result(
        name="load of the 42M-token Parquet file",
        value=load[1],
        unit="s",
        bound=1.0,
        detail=f"{load[0]:,} tokens",
    )


def plot_growth(points: Sequence[GrowthPoint], path: Path) -> None:
    """Planning time by stage and peak memory against tokens, on logarithmic axes, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    tokens = [point.tokens for point in points]
    for stage in points[0].seconds:
        left.loglog(tokens, [p.seconds[stage] for p in points], "o-", lw=1, ms=3, label=stage)
    left.loglog(tokens, [p.planning_s for p in points], "ko-", label="all")
    left.loglog([42e6, 420e6], [0.5, 6.0], "rx", label="bounds")
    left.set(xlabel="tokens", ylabel="seconds", title="planning time")
    right.semilogx(tokens, [p.peak_over_tokens for p in points], "ko-", label="planning and tokens")
    right.axhline(4.0, color="r", lw=1, ls="--", label="bound")
    right.set(xlabel="tokens", ylabel="times the token bytes", title="peak memory", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _require_memory(needed: int) -> None:
    """Refuse a size that the free memory of this machine cannot hold."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            available = int(line.split()[1]) * 1024
            if available < needed:
                raise HartsError(
                    f"measuring this size needs about {needed / 1e9:.0f} GB of free memory, "
                    f"{available / 1e9:.0f} GB are free; free some or lower --growth-tokens"
                )
