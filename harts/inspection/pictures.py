"""All pictures of a plan, and the files they are written to."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from harts.errors import InputError
from harts.forest import PrefixForest
from harts.inspection.drawing import Picture, style
from harts.inspection.grid import draw_grid
from harts.inspection.rounds import draw_rounds
from harts.inspection.tree import draw_tree
from harts.inspection.valleys import draw_valleys
from harts.planning.step import StepPlan
from harts.trajectories import TrajectoryBatch


def draw_all(
    batch: TrajectoryBatch, forest: PrefixForest, plan: StepPlan, microbatch: int
) -> Iterator[Picture]:
    """From the whole step to one microbatch: valleys, grid, tree, rounds."""
    shown = plan.microbatches[microbatch]
    with style():
        pictures = (
            draw_valleys(forest, plan),
            draw_grid(plan),
            draw_tree(batch, shown, microbatch),
            draw_rounds(shown, microbatch),
        )
    yield from pictures


def make_folder(folder: Path) -> None:
    """Make a folder for what will be drawn, so that a wrong one is told before the work.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error


def write_pictures(pictures: Sequence[Picture], folder: Path) -> list[Path]:
    """Write each picture as PNG and SVG into ``folder``; return the files.

    Raises:
        InputError: a file cannot be written.
    """
    written = []
    for picture in pictures:
        for suffix, content in (("png", picture.png), ("svg", picture.svg)):
            path = folder / f"{picture.name}.{suffix}"
            try:
                path.write_bytes(content)
            except OSError as error:
                raise InputError(f"cannot write the picture {path}: {error.strerror}") from error
            written.append(path)
    return written
