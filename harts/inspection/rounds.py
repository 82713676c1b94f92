"""Picture: the linear-attention calls of one microbatch, as the kernel sees them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from harts.forest import Int
from harts.inspection.drawing import (
    DPI,
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
    lighter,
    lines,
    rectangles,
    replay_patch,
    text_colour,
    text_pixels,
    thousands,
)
from harts.inspection.facts import call_facts
from harts.planning.calls import PackedSequence
from harts.planning.step import Microbatch

_HALF = 0.27
_CAPTION = (
    "One row a call; its packed sequences lie end to end as in the kernel's input, in two shades "
    "to tell neighbours apart. Hatched rows are replay: they update the state and write nothing. "
    "Ticks below a bar are chunk boundaries whose states later calls start from."
)


class _Packed:
    """Packed rows of one call: where sequences and their own rows start, and requested states."""

    def __init__(self, packed: tuple[PackedSequence, ...], segment_lengths: Int) -> None:
        replay = np.array([s.replay[1] - s.replay[0] for s in packed], np.int64)
        own = np.array([int(segment_lengths[list(s.chain)].sum()) for s in packed], np.int64)
        self.end = np.cumsum(replay + own)
        self.start = self.end - replay - own
        self.own_start = self.start + replay
        self.own = own
        # Positions count from the first token that the sequence runs: the start of its replay.
        self.states = np.array(
            [
                int(at) + boundary - s.replay[0]
                for s, at in zip(packed, self.start, strict=True)
                for boundary in s.boundaries
            ],
            np.int64,
        )

    def wide_replays(self, rows_a_pixel: float) -> NDArray[np.bool_]:
        """Which sequences' replay is wide enough to be hatched."""
        return (self.own_start - self.start) / rows_a_pixel >= 5


def draw_rounds(microbatch: Microbatch, number: int) -> Picture:
    """Calls as rows over packed token rows; call under `drawing.style`."""
    lengths = microbatch.forest.segment_lengths
    calls = [_Packed(packed, lengths) for packed in microbatch.calls.rounds]
    height = float(np.clip(0.62 * len(calls), 1.0, 9.0))
    frame = Frame(0.75 + height + 0.55 + legend_height(1))
    left = 0.7
    width = WIDTH - left - 0.35
    axes = frame.panel(left=left, top=0.75, width=width, height=height)
    longest = max(int(c.end[-1]) for c in calls)
    axes.set_xlim(0, longest * 1.005)
    axes.set_ylim(len(calls) - 0.4, -0.62)
    rows_a_pixel = longest * 1.005 / (width * DPI)
    row_pixels = height * DPI / (len(calls) + 0.22)
    crowded = len(microbatch.calls.sequences) > VECTOR_SHAPES // 2
    for r, (call, colour) in enumerate(zip(calls, call_colours(len(calls)), strict=True)):
        _draw_call(axes, r, call, colour, rows_a_pixel, row_pixels, crowded)
    if row_pixels >= 30:
        _annotate(axes, microbatch)
    axes.set_yticks(range(len(calls)), [str(r + 1) for r in range(len(calls))], color=INK)
    axes.set_ylabel("call")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("packed rows of the call (tokens, replay included)")
    thousands(axes)
    replay = microbatch.calls.replay_tokens
    frame.title(
        f"Linear-attention calls of microbatch {number} (slot {microbatch.slot}, "
        f"replica {microbatch.replica})",
        f"{len(calls)} {'call' if len(calls) == 1 else 'calls'} a layer for "
        f"{len(microbatch.calls.sequences):,} packed sequences and "
        f"{microbatch.compact_tokens:,} own rows; "
        f"{replay:,} rows replayed ({replay / microbatch.compact_tokens:.1%})",
    )
    hatched = any(bool(call.wide_replays(rows_a_pixel).any()) for call in calls)
    frame.legend(_legend(hatched, microbatch.calls.chunk_size))
    return finish("rounds", _CAPTION, frame.figure)


def _draw_call(
    axes: Axes,
    r: int,
    call: _Packed,
    colour: str,
    rows_a_pixel: float,
    row_pixels: float,
    crowded: bool,
) -> None:
    shades = (colour, lighter(colour, 0.3))
    # Below the sequences: between shapes thinner than a pixel the page would shine through.
    whole = rectangles([0], call.end[-1:], r - _HALF, r + _HALF)
    draw_boxes(axes, whole, facecolors=colour, linewidths=0, zorder=1)
    for parity, shade in enumerate(shades):
        boxes = rectangles(call.own_start, call.end, r - _HALF, r + _HALF)[parity::2]
        draw_boxes(axes, boxes, crowded=crowded, facecolors=shade, linewidths=0, zorder=2)
    replays = call.own_start > call.start
    boxes = rectangles(call.start, call.own_start, r - _HALF, r + _HALF)[replays]
    wide = call.wide_replays(rows_a_pixel)[replays]
    for chosen, fill, hatch in ((wide, REPLAY, HATCH), (~wide, REPLAY_NARROW, None)):
        edge = 0.4 if hatch else 0.0
        draw_boxes(
            axes,
            boxes[chosen],
            facecolors=fill,
            edgecolors=MUTED,
            linewidths=edge,
            hatch=hatch,
            crowded=crowded,
            zorder=2,
        )
    if (call.end[-1] / len(call.end)) / rows_a_pixel >= 4:
        at = call.end[:-1]
        borders = lines(at, r - _HALF, at, r + _HALF)
        draw_segments(axes, borders, crowded=crowded, colors="white", linewidths=1.0, zorder=3)
    foot = lines(call.states, r + _HALF, call.states, r + _HALF + 0.13)
    draw_segments(axes, foot, crowded=crowded, colors=INK, linewidths=0.9, zorder=3)
    for i, own in enumerate(call.own.tolist()):
        text = f"{own:,}"
        if row_pixels >= 24 and text_pixels(text, 7.5) + 6 < own / rows_a_pixel:
            axes.text(
                float(call.own_start[i] + call.end[i]) / 2,
                r,
                text,
                fontsize=7.5,
                ha="center",
                va="center_baseline",
                color=text_colour(shades[i % 2]),
                zorder=4,
            )


def _annotate(axes: Axes, microbatch: Microbatch) -> None:
    """What each bar holds, above it."""
    for r, f in enumerate(call_facts(microbatch.calls, microbatch.forest.segment_lengths)):
        axes.text(
            0,
            r - _HALF - 0.05,
            f"{f.sequences:,} {'sequence' if f.sequences == 1 else 'sequences'}, "
            f"{f.own_rows:,} own rows, {f.replay_rows:,} replayed, "
            f"{f.states:,} {'state' if f.states == 1 else 'states'} handed out",
            fontsize=8,
            va="bottom",
            color=MUTED,
        )


def _legend(hatched: bool, chunk_size: int) -> list[tuple[Patch | Line2D, str]]:
    tick = Line2D([], [], color=INK, linestyle="none", marker="|", markersize=7)
    return [
        (Patch(facecolor=MUTED), "own rows (colour: call, shades: neighbours)"),
        replay_patch(hatched, chunk_size),
        (tick, "boundary state handed out"),
    ]
