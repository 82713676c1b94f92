"""Picture: how much neighbours in lexicographic order share, and where the plan cuts them apart.

Shapes: N trajectories in lexicographic order · K microbatches.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harts.forest import Int, PrefixForest
from harts.inspection.drawing import (
    DISTINCT,
    DPI,
    INK,
    MUTED,
    VECTOR_SHAPES,
    WIDTH,
    Frame,
    Picture,
    draw_segments,
    finish,
    legend_height,
    lighter,
    lines,
    text_pixels,
    thousands,
)
from harts.inspection.facts import counted_work, microbatch_of_rows
from harts.planning.step import StepPlan

_LCP, _CUT, _LENGTH = DISTINCT[0], DISTINCT[3], "#ececec"
_LABELLED_CUTS = 40
_CAPTION = (
    "Trajectories in lexicographic order. Blue: tokens that each shares with the one before it; a "
    "cut there runs exactly these once more (Eq. 6), so good cuts lie in valleys. Below: the "
    "microbatch of each trajectory, in order of first members; a staircase is a contiguous plan, "
    "steps out of it are members taken from elsewhere."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Runs:
    """Neighbours in lexicographic order that share a microbatch, as [start, stop) runs."""

    start: Int
    stop: Int
    microbatch: Int
    """Numbered in the order in which they first occur."""
    number: Int
    """[K] number in the plan of each microbatch, in that order."""

    @classmethod
    def of(cls, holder: Int) -> Self:
        """Runs of ``holder`` [N], the microbatch of each sorted trajectory."""
        changes = np.flatnonzero(np.diff(holder)) + 1
        start = np.concatenate([[0], changes])
        number, first, inverse = np.unique(holder, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return cls(
            start=start,
            stop=np.append(changes, len(holder)),
            microbatch=rank[inverse][start],
            number=number[np.argsort(first)],
        )

    @property
    def contiguous(self) -> bool:
        """Whether each microbatch is one run."""
        return len(self.start) == len(self.number)


def draw_valleys(forest: PrefixForest, plan: StepPlan) -> Picture:
    """Adjacent LCPs with the cuts, and each trajectory's microbatch; under `drawing.style`."""
    runs = _Runs.of(microbatch_of_rows(plan, len(forest.members))[forest.members])
    count = len(runs.number)
    left, height = 0.95, 3.3
    width = WIDTH - left - 0.35
    strip = float(np.clip(0.14 * count, 0.4, 2.2))
    legend = _legend(len(forest.members) > width * DPI / 2, runs.contiguous)
    frame = Frame(0.75 + height + 0.12 + strip + 0.55 + legend_height(len(legend), 5))
    upper = frame.panel(left=left, top=0.75, width=width, height=height)
    _draw_profile(upper, forest, int(width * DPI / 2))
    _draw_cuts(upper, forest, runs, width * DPI)
    lower = frame.panel(left=left, top=0.87 + height, width=width, height=strip)
    _draw_strip(lower, runs, strip * DPI)
    for axes in (upper, lower):
        axes.set_xlim(0, len(forest.members))
    upper.tick_params(labelbottom=False)
    lower.set_xlabel("trajectory, in lexicographic order of tokens")
    thousands(lower)
    repeated = counted_work(plan) - plan.merged_tokens
    kind = "Each is a run of neighbours" if runs.contiguous else f"In {len(runs.start):,} runs"
    frame.title(
        f"Where the plan cuts {len(forest.members):,} trajectories into {count:,} microbatches",
        f"{kind}; prefixes that several microbatches hold are repeated: {repeated:,} tokens more "
        f"than the {plan.merged_tokens:,} of one trie ({repeated / plan.merged_tokens:+.2%})",
    )
    frame.legend(legend, columns=5)
    return finish("valleys", _CAPTION, frame.figure)


def _draw_profile(axes: Axes, forest: PrefixForest, strips: int) -> None:
    """Lengths and adjacent LCPs; strips of two pixels keep the lowest valley when they are many."""
    n = len(forest.members)
    bounds = np.unique(np.linspace(0, n, min(n, strips) + 1).astype(np.int64))
    lengths = np.maximum.reduceat(forest.lengths, bounds[:-1])
    highest = np.maximum.reduceat(forest.lcp, bounds[:-1])
    lowest = np.minimum.reduceat(forest.lcp, bounds[:-1])
    axes.stairs(lengths, bounds, fill=True, color=_LENGTH, linewidth=0, zorder=1)
    # An LCP belongs to the border between two trajectories, half a step before the second.
    borders = bounds - 0.5
    if len(bounds) <= n:
        axes.stairs(highest, borders, fill=True, color=lighter(_LCP, 0.6), linewidth=0, zorder=2)
    axes.stairs(lowest, borders, fill=True, color=_LCP, linewidth=0, zorder=3)
    axes.set_ylim(0, int(forest.lengths.max()) * 1.05)
    axes.set_ylabel("tokens")
    thousands(axes, x=False, y=True)


def _draw_cuts(axes: Axes, forest: PrefixForest, runs: _Runs, width_pixels: float) -> None:
    cuts = runs.start[1:]
    paid = forest.lcp[cuts]
    top = axes.get_ylim()[1]
    few = len(cuts) <= _LABELLED_CUTS
    # Many lines would hide the valleys that they point at: then they only show above the profile.
    if few or len(cuts) * 4 <= width_pixels:
        draw_segments(
            axes,
            lines(cuts, paid, cuts, top),
            colors=_CUT,
            linewidths=1.1 if few else 0.4,
            alpha=0.8 if few else 0.5,
            zorder=4 if few else 0,
        )
    axes.plot(
        cuts,
        paid,
        linestyle="none",
        marker="v",
        markersize=4.5 if few else 2.5,
        color=_CUT,
        markeredgewidth=0,
        zorder=5,
        clip_on=False,
        rasterized=len(cuts) > VECTOR_SHAPES,
    )
    if not few:
        return
    room = np.diff(cuts, append=len(forest.members)) * width_pixels / len(forest.members)
    for cut, lcp, pixels in zip(cuts.tolist(), paid.tolist(), room.tolist(), strict=True):
        if text_pixels(f"{lcp:,}", 7.5) + 4 <= pixels:
            axes.annotate(
                f"{lcp:,}",
                (cut, top),
                (2, -2),
                textcoords="offset points",
                fontsize=7.5,
                color=_CUT,
                va="top",
                zorder=6,
            )


def _draw_strip(axes: Axes, runs: _Runs, height_pixels: float) -> None:
    """One row a microbatch, by first member; with its number in the plan where that fits."""
    count = len(runs.number)
    row_pixels = height_pixels / count
    width = float(np.clip(row_pixels * 0.7, 2.0, 10.0)) * 72 / DPI
    for colour_number, colour in enumerate(DISTINCT):
        own = runs.microbatch % len(DISTINCT) == colour_number
        row = runs.microbatch[own]
        # Square caps reach out by half the width: single members stay visible.
        draw_segments(
            axes,
            lines(runs.start[own], row, runs.stop[own], row),
            colors=colour,
            linewidths=width,
            crowded=len(runs.start) > VECTOR_SHAPES,
            capstyle="butt" if row_pixels >= 6 else "projecting",
        )
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_yticks(range(count), map(str, runs.number)) if row_pixels >= 12 else axes.set_yticks(
        []
    )
    axes.set_ylabel("microbatch" if height_pixels >= 80 else "micro-\nbatch", color=INK)
    axes.tick_params(axis="y", length=0, colors=MUTED)


def _legend(joined: bool, contiguous: bool) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [
        (Patch(facecolor=_LENGTH), "length of the trajectory"),
        (
            Patch(facecolor=_LCP),
            "shared with the one before" + (", lowest nearby" if joined else ""),
        ),
    ]
    if joined:
        entries.append((Patch(facecolor=lighter(_LCP, 0.6)), "highest nearby"))
    cut = "cut, and tokens it repeats" if contiguous else "the microbatch changes"
    return [*entries, (Line2D([], [], color=_CUT, marker="v", markersize=4.5, linewidth=1.1), cut)]
