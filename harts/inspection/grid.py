"""Picture: the load of every slot and replica, and how even it is."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import MaxNLocator, PercentFormatter

from harts.forest import Int
from harts.inspection.drawing import (
    DISTINCT,
    DPI,
    INK,
    MUTED,
    WIDTH,
    Frame,
    Picture,
    draw_boxes,
    finish,
    rectangles,
    text_colour,
    text_pixels,
    thousands,
)
from harts.inspection.facts import counted_work, imbalance, works
from harts.planning.step import StepPlan

_COLOURS = "cividis"
_CAPTION = (
    "Each cell is a microbatch, coloured by its compact tokens as a share of the capacity. Right: "
    "the total of each replica, with the mean. Below: how far the heaviest replica of each slot is "
    "above the mean (Eq. 23); the others wait for it."
)


def draw_grid(plan: StepPlan) -> Picture:
    """Slots across, replicas down; call under `drawing.style`."""
    work = works(plan)
    left, right_width, gap, below = 0.85, 2.3, 0.25, 1.1
    width = WIDTH - left - right_width - gap - 0.35
    height = float(np.clip(0.42 * plan.replicas, 0.85, 5.5))
    frame = Frame(0.75 + height + 0.2 + below + 1.1)
    cells = frame.panel(left=left, top=0.75, width=width, height=height)
    shares = work.T / plan.capacity
    shown = cells.imshow(shares, aspect="auto", cmap=_COLOURS, vmin=0, vmax=1)
    _separate(cells, plan, width * DPI / plan.slots, height * DPI / plan.replicas)
    _write_loads(cells, work, plan.capacity, width, height)
    cells.set_yticks(_some(plan.replicas, 16))
    cells.set_ylabel("replica")
    cells.tick_params(labelbottom=False, bottom=False, left=False)
    _draw_imbalance(frame.panel(left=left, top=0.95 + height, width=width, height=below), work)
    totals = frame.panel(left=left + width + gap, top=0.75, width=right_width, height=height)
    _draw_totals(totals, work)
    scale = frame.panel(left=left, top=frame.height - 0.4, width=2.4, height=0.12)
    frame.figure.colorbar(shown, cax=scale, orientation="horizontal", format=PercentFormatter(1))
    frame.figure.text(
        (left + 2.6) / WIDTH,
        0.34 / frame.height,
        f"compact tokens of a microbatch, share of the capacity of {plan.capacity:,}",
        va="center",
        fontsize=8.5,
        color=MUTED,
    )
    counted = counted_work(plan)
    fillers = len(plan.microbatches) - len(plan.counted)
    also = f"; crosses: {fillers:,} fillers of weight zero" if fillers else ""
    frame.title(
        f"Load of {plan.slots:,} {'slot' if plan.slots == 1 else 'slots'} x "
        f"{plan.replicas} {'replica' if plan.replicas == 1 else 'replicas'}",
        f"{counted:,} compact tokens, {counted / plan.lower_bound - 1:.2%} above the lower bound; "
        f"microbatches fill {work.mean() / plan.capacity:.1%} of the capacity on average{also}",
    )
    return finish("grid", _CAPTION, frame.figure)


def _separate(axes: Axes, plan: StepPlan, cell_width: float, cell_height: float) -> None:
    """White lines between cells that are wide enough to spare them."""
    if cell_width >= 8:
        for j in range(1, plan.slots):
            axes.axvline(j - 0.5, color="white", linewidth=1.0)
    if cell_height >= 8:
        for d in range(1, plan.replicas):
            axes.axhline(d - 0.5, color="white", linewidth=1.0)
    axes.spines[:].set_visible(False)
    fillers = [(m.slot, m.replica) for m in plan.microbatches if m.filler]
    if fillers:
        at = np.array(fillers)
        corners = rectangles(at[:, 0] - 0.5, at[:, 0] + 0.5, at[:, 1] - 0.5, at[:, 1] + 0.5)
        draw_boxes(axes, corners, facecolors="none", edgecolors="white", linewidths=0, hatch="xxx")


def _write_loads(axes: Axes, work: Int, capacity: int, width: float, height: float) -> None:
    """Numbers in the cells: whole where they fit, else in thousands, else none."""
    slots, replicas = work.shape
    room, size = width * DPI / slots - 6, 7.5
    if height * DPI / replicas < 16:
        return
    for written in ("{:,}".format, lambda w: f"{w / 1000:.1f}k", lambda w: f"{w / 1000:.0f}k"):
        if max(text_pixels(written(w), size) for w in work.ravel().tolist()) <= room:
            break
    else:
        return
    for (j, d), w in np.ndenumerate(work):
        background = to_hex(colormaps[_COLOURS](w / capacity))
        axes.text(
            j, d, written(int(w)), fontsize=size, ha="center", va="center",
            color=text_colour(background),
        )  # fmt: skip


def _draw_imbalance(axes: Axes, work: Int) -> None:
    uneven = imbalance(work) * 100
    slots = np.arange(len(uneven) + 1) - 0.5
    axes.stairs(uneven, slots, fill=True, color=DISTINCT[3], linewidth=0)
    if len(uneven) <= 60:
        for j in slots[1:-1].tolist():
            axes.axvline(j, color="white", linewidth=1.0)
    axes.set_xlim(-0.5, len(uneven) - 0.5)
    axes.set_ylim(0, float(uneven.max()) * 1.3 or 1.0)
    axes.set_xticks(_some(len(uneven), 20))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.set(xlabel="slot", ylabel="imbalance (%)")
    p50, p95 = np.quantile(uneven, [0.5, 0.95])
    axes.text(
        0.995, 0.99, f"P50 {p50:.3f}%, P95 {p95:.3f}%, largest {uneven.max():.3f}%",
        transform=axes.transAxes, ha="right", va="top", fontsize=8, color=INK,
    )  # fmt: skip


def _draw_totals(axes: Axes, work: Int) -> None:
    totals = work.sum(axis=0)
    replicas, mean = len(totals), float(totals.mean())
    edges = np.arange(replicas + 1) - 0.5
    axes.stairs(totals, edges, orientation="horizontal", fill=True, color=DISTINCT[4], linewidth=0)
    for d in edges[1:-1].tolist() if replicas <= 60 else []:
        axes.axhline(d, color="white", linewidth=2.0)
    axes.axvline(mean, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_ylim(replicas - 0.5, -0.5)
    axes.set_xlim(0, max(mean, float(totals.max())) * 1.04)
    if replicas <= 14:
        for d, total in enumerate(totals.tolist()):
            excess = round(total / mean - 1, 5) + 0.0  # no "-0.000%"
            axes.text(
                mean * 0.03, d, f"{total:,} ({excess:+.3%})", fontsize=8, va="center_baseline",
                color=INK,
            )  # fmt: skip
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    thousands(axes)
    axes.set_xlabel(f"total of a replica (dashes: mean)\nimbalance {float(imbalance(totals)):.3%}")


def _some(count: int, most: int) -> range:
    """Evenly spaced ones of ``count`` numbers, to label."""
    return range(0, count, -(-count // most))
