"""Picture: the rollout trees of one microbatch, and which call runs what."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harts.forest import PrefixForest
from harts.inspection.drawing import (
    DPI,
    FAINT,
    HATCH,
    INK,
    MUTED,
    REPLAY,
    REPLAY_NARROW,
    VECTOR_SHAPES,
    WIDTH,
    Frame,
    Picture,
    call_colours,
    draw_boxes,
    draw_segments,
    finish,
    legend_height,
    lines,
    rectangles,
    replay_patch,
    text_colour,
    text_pixels,
    thousands,
)
from harts.inspection.facts import ForestFacts, child_counts
from harts.inspection.tree_rows import TreeRows, early_ends
from harts.planning.step import Microbatch
from harts.trajectories import TrajectoryBatch

NAMED_ROWS = 48
_SHORT = 22
_CAPTION = (
    "Each row is one packed sequence: hatched replay, then segments that run without a break. "
    "Upright lines lead from a fork to the branches that leave there; a filled mark is a fork on "
    "the chunk grid (no replay), a hollow one lies off it. Colour is the call that runs the row."
)


class _View:
    """A microbatch in the pixels of its panel."""

    def __init__(self, batch: TrajectoryBatch, microbatch: Microbatch, number: int) -> None:
        self.batch, self.microbatch, self.number = batch, microbatch, number
        self.forest: PrefixForest = microbatch.forest
        self.rows = TreeRows.of(microbatch)
        self.colours = call_colours(len(microbatch.calls.rounds))
        self.chunk_size = microbatch.calls.chunk_size
        self.named = len(self.rows) <= NAMED_ROWS
        self.trees = len({batch.tree_ids[row] for row in self.forest.members.tolist()})
        self.names = _row_names(self.rows, self.forest, batch) if self.named else []
        self.left = max([text_pixels(name, 7.5) / DPI + 0.35 for name in self.names], default=0.6)
        self.width = WIDTH - self.left - 0.35
        self.height = float(np.clip(0.24 * len(self.rows), 1.2, 9.0))
        self.longest = int(self.forest.segment_end.max())
        self.row_pixels = self.height * DPI / (len(self.rows) + 0.6)
        self.tokens_a_pixel = self.longest * 1.02 / (self.width * DPI)
        self.crowded = len(self.forest.segment_parent) > VECTOR_SHAPES
        # Where rows are thinner than a pixel each still gets one, over its neighbours.
        self.half = 0.36 if self.row_pixels >= 4 else max(0.5, 0.55 / self.row_pixels)
        self.hatched = self.row_pixels >= 6 and self.chunk_size / self.tokens_a_pixel >= 5


def draw_tree(batch: TrajectoryBatch, microbatch: Microbatch, number: int) -> Picture:
    """Segments over token position, stacked depth first; call under `drawing.style`."""
    view = _View(batch, microbatch, number)
    legend = _legend(view)
    columns = 7 if len(legend) <= 7 else 6
    frame = Frame(0.75 + view.height + 0.55 + legend_height(len(legend), columns))
    axes = frame.panel(left=view.left, top=0.75, width=view.width, height=view.height)
    axes.set_xlim(0, view.longest * 1.02)
    axes.set_ylim(len(view.rows) - 0.2, -0.8)
    _draw_grid(axes, view)
    _draw_bars(axes, view)
    _draw_forks(axes, view)
    _draw_labels(axes, view)
    axes.set_xlabel("position in the trajectory (tokens)")
    thousands(axes)
    facts = ForestFacts.of(view.forest, view.chunk_size)
    frame.title(
        f"Rollout trees of microbatch {number} (slot {microbatch.slot}, "
        f"replica {microbatch.replica})",
        f"{facts.trajectories:,} trajectories of {view.trees:,} rollout "
        f"{'tree' if view.trees == 1 else 'trees'}: {facts.raw_tokens:,} tokens, "
        f"{facts.compact_tokens:,} after sharing ({facts.compression:.2f} x); forks: "
        f"{facts.forks_on_grid:,} on the grid of {view.chunk_size}, {facts.forks_off_grid:,} off; "
        f"{microbatch.calls.replay_tokens:,} tokens replayed",
    )
    frame.legend(legend, columns=columns)
    return finish("tree", _CAPTION, frame.figure)


def _draw_grid(axes: Axes, view: _View) -> None:
    """Chunk boundaries where they stay apart; else the axis would turn grey."""
    if view.chunk_size / view.tokens_a_pixel >= 8:
        at = np.arange(view.chunk_size, view.longest + 1, view.chunk_size)
        draw_segments(
            axes,
            lines(at, -0.8, at, len(view.rows) - 0.2),
            colors=FAINT,
            linewidths=0.7,
            zorder=0,
        )


def _draw_bars(axes: Axes, view: _View) -> None:
    forest, rows, half = view.forest, view.rows, view.half
    # What is narrower than a pixel would fade out.
    right = np.maximum(forest.segment_end, forest.segment_start + view.tokens_a_pixel)
    edge = 0.8 if view.row_pixels >= 8 else 0.0
    for call, colour in enumerate(view.colours):
        of_call = np.flatnonzero(rows.segment_call == call)
        row = rows.segment_row[of_call]
        boxes = rectangles(forest.segment_start[of_call], right[of_call], row - half, row + half)
        look = {"facecolors": colour, "edgecolors": "white", "linewidths": edge, "zorder": 2}
        draw_boxes(axes, boxes, crowded=view.crowded, **look)
    replays = np.flatnonzero(rows.row_replay < rows.row_start)
    draw_boxes(
        axes,
        rectangles(
            rows.row_replay[replays], rows.row_start[replays], replays - half, replays + half
        ),
        facecolors=REPLAY if view.hatched else REPLAY_NARROW,
        edgecolors=MUTED,
        linewidths=0.5 if view.hatched else 0.0,
        hatch=HATCH if view.hatched else None,
        crowded=view.crowded,
        zorder=1.5,
    )
    if len(rows.root_rows) > 1 and view.row_pixels * len(rows) / len(rows.root_rows) >= 6:
        at = rows.root_rows[1:] - 0.5
        draw_segments(
            axes, lines(0, at, view.longest * 1.02, at), colors=MUTED, linewidths=0.5, zorder=1
        )


def _draw_forks(axes: Axes, view: _View) -> None:
    forest, rows = view.forest, view.rows
    forks = np.flatnonzero(child_counts(forest) > 0)
    at, row = forest.segment_end[forks], rows.segment_row[forks]
    draw_segments(
        axes,
        lines(at, row, at, rows.last_child_row[forks]),
        colors=INK if view.named else MUTED,
        crowded=view.crowded,
        linewidths=float(np.clip(view.row_pixels / 16, 0.25, 1.0)),
        zorder=1,
    )
    size = float(np.clip(view.row_pixels * 0.3, 2.0, 5.5))
    on_grid = at % view.chunk_size == 0
    # The few on the grid lie on top of the many off it, and stay visible.
    for chosen, fill, order in ((~on_grid, "white", 3), (on_grid, INK, 4)):
        axes.plot(
            at[chosen],
            row[chosen],
            linestyle="none",
            marker="o",
            markersize=size,
            markerfacecolor=fill,
            markeredgecolor=INK,
            markeredgewidth=min(0.8, size / 5),
            zorder=order,
            rasterized=view.crowded,
            clip_on=False,
        )
    segment, end = early_ends(forest)
    if len(segment):
        row = rows.segment_row[segment]
        draw_segments(
            axes,
            lines(end, row - 1.3 * view.half, end, row + 1.3 * view.half),
            crowded=view.crowded,
            colors=INK,
            linewidths=1.4 if view.row_pixels >= 8 else 0.8,
            zorder=2.5,
        )


def _draw_labels(axes: Axes, view: _View) -> None:
    axes.spines["left"].set_visible(False)
    if not view.named:
        axes.set_ylabel(f"{len(view.rows):,} packed sequences, depth first")
        axes.set_yticks([])
        return
    axes.set_yticks(range(len(view.rows)), view.names, fontsize=7.5, color=INK)
    axes.tick_params(axis="y", length=0)
    forest, rows = view.forest, view.rows
    for segment, length in enumerate(forest.segment_lengths.tolist()):
        text = f"{length:,}"
        if text_pixels(text, 7) + 14 < length / view.tokens_a_pixel:
            axes.text(
                float(forest.segment_start[segment] + forest.segment_end[segment]) / 2,
                float(rows.segment_row[segment]),
                text,
                fontsize=7,
                ha="center",
                va="center_baseline",
                color=text_colour(view.colours[rows.segment_call[segment]]),
                zorder=5,
            )


def _row_names(rows: TreeRows, forest: PrefixForest, batch: TrajectoryBatch) -> list[str]:
    """The trajectory that ends at the end of each row, and how many more equal it."""
    ids, names = batch.trajectory_ids, []
    for leaf in rows.row_leaf.tolist():
        last = int(forest.segment_member[leaf])
        equal, at = 0, last
        while at > 0 and forest.lcp[at] == forest.lengths[at] == forest.lengths[at - 1]:
            equal, at = equal + 1, at - 1
        name = ids[forest.members[at]]
        name = name if len(name) <= _SHORT else f"…{name[1 - _SHORT :]}"
        names.append(f"{name} (+{equal})" if equal else name)
    return names


def _legend(view: _View) -> list[tuple[Patch | Line2D, str]]:
    calls = list(range(len(view.colours)))
    if len(calls) > 8:
        calls = sorted({0, len(calls) // 4, len(calls) // 2, 3 * len(calls) // 4, calls[-1]})
    entries: list[tuple[Patch | Line2D, str]] = [
        (Patch(facecolor=view.colours[c]), f"call {c + 1}") for c in calls
    ]
    entries += [
        replay_patch(view.hatched, view.chunk_size),
        (_mark(INK), "fork on the chunk grid"),
        (_mark("white"), "fork off the grid"),
    ]
    if len(early_ends(view.forest)[0]):
        tick = Line2D([], [], color=INK, linestyle="none", marker="|", markersize=9)
        entries.append((tick, "a trajectory ends here"))
    return entries


def _mark(fill: str) -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="none",
        marker="o",
        markersize=5.5,
        markerfacecolor=fill,
        markeredgecolor=INK,
    )
