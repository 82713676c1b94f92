"""The picture of a run: loss, and log-probs of good and bad tries, over the steps."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harts.training.checkpoint import writing
from harts.training.metrics import StepMetrics

_GOOD, _BAD, _PLAIN = "#0072b2", "#d55e00", "#444444"


def save_plot(metrics: Sequence[StepMetrics], path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        CheckpointError: it cannot be written.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, logprobs = figure.subplots(1, 2)
    steps = [m.step for m in metrics]
    _line(loss, steps, [m.loss for m in metrics], _PLAIN, None)
    loss.set(title="Loss", xlabel="optimiser step", ylabel="loss")
    _line(logprobs, steps, [m.logprob_above for m in metrics], _GOOD, "better than average")
    _line(logprobs, steps, [m.logprob_below for m in metrics], _BAD, "worse than average")
    logprobs.set(
        title="Good tries become likelier than bad ones",
        xlabel="optimiser step",
        ylabel="mean log-prob of a token (nats)",
    )
    logprobs.legend(title="tries that ended", frameon=False)
    FigureCanvasAgg(figure)
    temporary = path.with_name(f".{path.name}.writing")
    with writing(path):
        try:
            figure.savefig(temporary, format="png", dpi=120)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _line(
    axes: Axes, steps: Sequence[int], values: Sequence[float | None], colour: str, label: str | None
) -> None:
    """A line with gaps where a step has no value."""
    shown = [float("nan") if v is None else v for v in values]
    axes.plot(steps, shown, color=colour, label=label, marker="o", markersize=3, linewidth=1.5)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
