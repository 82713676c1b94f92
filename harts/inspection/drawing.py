"""What all pictures share: colours, a frame measured in pixels, bytes that depend on input only.

Pictures are laid out by hand in inches, so that a figure knows how many pixels a token, a row or
a cell gets before it draws, and can choose what to label, what to join and what to rasterise.
"""

import io
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]

DPI = 120
WIDTH = 11.0
INK, MUTED, FAINT = "#222222", "#666666", "#e4e4e4"
REPLAY, REPLAY_NARROW, HATCH = "#f4f4f4", "#bbbbbb", "/////"
# Okabe and Ito, without black and yellow: told apart with any colour vision.
DISTINCT = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
VECTOR_SHAPES = 1_500
"""Layers of a picture with more shapes than this are stored as pixels, also in SVG."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "hatch.color": MUTED,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "text.parse_math": False,  # a dollar sign in an id is a dollar sign
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One finished figure in both forms."""

    name: str
    caption: str
    """How to read it, in a sentence or two."""
    png: bytes
    svg: bytes


def style() -> AbstractContextManager[None]:
    """The settings under which figures must be made, whatever the user's own are."""
    settings: Any = {**matplotlib.rcParamsDefault, **_STYLE}
    return matplotlib.rc_context(settings)


def finish(name: str, caption: str, figure: Figure) -> Picture:
    """Turn a figure into bytes; the same figure gives the same bytes. Call under `style`."""
    FigureCanvasAgg(figure)
    # An id in a script without a glyph here shows as boxes; a warning would not help.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return _rendered(name, caption, figure)


def _rendered(name: str, caption: str, figure: Figure) -> Picture:
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    # A salt of its own keeps a picture's ids apart from another's on one HTML page.
    with matplotlib.rc_context({"svg.hashsalt": f"harts-{name}"}):
        figure.savefig(svg, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    return Picture(name=name, caption=caption, png=png.getvalue(), svg=svg.getvalue())


class Frame:
    """A figure whose panels are placed in inches from its top left corner."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height), facecolor="white")
        self.height = height

    def panel(self, *, left: float, top: float, width: float, height: float) -> Axes:
        """Axes whose upper left corner lies ``left`` and ``top`` inches inside the figure."""
        box = (left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height)
        return self.figure.add_axes(box)

    def title(self, title: str, subtitle: str, left: float = 0.25) -> None:
        """A bold line and a plain one at the top; they take 0.65 inches."""
        for text, top, size, weight in ((title, 0.2, 12, "bold"), (subtitle, 0.44, 9, "normal")):
            self.figure.text(
                left / WIDTH,
                1 - top / self.height,
                text,
                va="center",
                fontsize=size,
                fontweight=weight,
                color=INK if weight == "bold" else MUTED,
            )

    def legend(self, entries: Sequence[tuple[Artist, str]], *, columns: int = 6) -> None:
        """A legend along the lower edge: 0.25 inches for each row of ``columns`` entries."""
        handles, labels = [e[0] for e in entries], [e[1] for e in entries]
        self.figure.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.2 / WIDTH, 0.02 / self.height),
            ncols=columns,
            fontsize=8.5,
            handlelength=1.6,
            columnspacing=1.6,
            borderaxespad=0.2,
        )


def legend_height(entries: int, columns: int = 6) -> float:
    """Inches that `Frame.legend` needs."""
    return 0.12 + 0.22 * -(-entries // columns)


def replay_patch(hatched: bool, chunk_size: int) -> tuple[Patch, str]:
    """Legend entry for replay intervals, as they are drawn when narrow or wide."""
    if hatched:
        patch = Patch(facecolor=REPLAY, edgecolor=MUTED, hatch=HATCH, linewidth=0.5)
    else:
        patch = Patch(facecolor=REPLAY_NARROW)
    return patch, f"replay, below {chunk_size} tokens each"


def call_colours(calls: int) -> list[str]:
    """One colour a call; many calls get a scale from dark to light in their order."""
    if calls <= len(DISTINCT):
        return list(DISTINCT[:calls])
    return [to_hex(c) for c in colormaps["viridis"](np.linspace(0.05, 0.95, calls))]


def lighter(colour: str, by: float = 0.45) -> str:
    """``colour`` mixed with white."""
    red, green, blue = (c + (1 - c) * by for c in to_rgb(colour))
    return to_hex((red, green, blue))


def text_colour(background: str) -> str:
    """Black or white, whichever is easier to read on ``background``."""
    red, green, blue = to_rgb(background)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else INK


def text_pixels(text: str, size: float) -> float:
    """About how wide ``text`` of ``size`` points is; on the safe side."""
    return len(text) * size * 0.66 * DPI / 72


def rectangles(left: ArrayLike, right: ArrayLike, low: ArrayLike, high: ArrayLike) -> Float:
    """[n, 4, 2] corners of n upright rectangles."""
    x0, x1, y0, y1 = np.broadcast_arrays(*(np.asarray(a, float) for a in (left, right, low, high)))
    return np.stack([np.stack([x0, y0], -1), np.stack([x0, y1], -1), np.stack([x1, y1], -1),
                     np.stack([x1, y0], -1)], axis=-2)  # fmt: skip


def draw_boxes(axes: Axes, corners: Float, *, crowded: bool = False, **look: Any) -> None:
    """Filled shapes as one layer; where it is crowded as pixels, thin ones fading but not lost."""
    if len(corners):
        snap = False if crowded else None
        layer = PolyCollection(list(corners), rasterized=crowded, snap=snap, **look)
        axes.add_collection(layer, autolim=False)


def draw_segments(axes: Axes, ends: Float, *, crowded: bool = False, **look: Any) -> None:
    """Straight lines [n, 2, 2] as one layer, stored as pixels where it is crowded."""
    if len(ends):
        layer = LineCollection(list(ends), rasterized=crowded, **look)
        axes.add_collection(layer, autolim=False)


def lines(x0: ArrayLike, y0: ArrayLike, x1: ArrayLike, y1: ArrayLike) -> Float:
    """[n, 2, 2] end points of n lines."""
    a, b, c, d = np.broadcast_arrays(*(np.asarray(v, float) for v in (x0, y0, x1, y1)))
    return np.stack([np.stack([a, b], -1), np.stack([c, d], -1)], axis=-2)


def thousands(axes: Axes, *, x: bool = True, y: bool = False) -> None:
    """Tick labels as 12,000."""
    if x:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    if y:
        axes.yaxis.set_major_formatter("{x:,.0f}")
