"""Pictures: written, bounded in size and time, and the same bytes for the same plan."""

import re
import time
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from harts.errors import InputError
from harts.forest import PrefixForest
from harts.inspection.drawing import DISTINCT, Picture, call_colours, style
from harts.inspection.facts import choose_microbatch
from harts.inspection.grid import draw_grid
from harts.inspection.html import page, write_page
from harts.inspection.pictures import draw_all, make_folder, write_pictures
from harts.inspection.rounds import _Packed, draw_rounds
from harts.inspection.tables import all_tables
from harts.inspection.tree import draw_tree
from harts.inspection.valleys import _Runs, draw_valleys
from harts.planning.step import StepPlan, plan_step
from harts.trajectories import TrajectoryBatch, from_lists
from tests.forests import batch_of, random_batch

NAMES = ["valleys", "grid", "tree", "rounds"]
MOST_BYTES = 1_500_000


def drawn(batch: TrajectoryBatch, plan: StepPlan) -> list[Picture]:
    forest = PrefixForest.build(batch)
    return list(draw_all(batch, forest, plan, choose_microbatch(plan, None)))


@pytest.fixture(scope="module")
def pictures(batch: TrajectoryBatch, plan: StepPlan) -> list[Picture]:
    return drawn(batch, plan)


def check(pictures: list[Picture]) -> None:
    assert [p.name for p in pictures] == NAMES
    for picture in pictures:
        assert picture.png.startswith(b"\x89PNG")
        width, height = (int.from_bytes(picture.png[i : i + 4]) for i in (16, 20))
        assert 1000 < width < 2000
        assert 200 < height < 1500
        assert ElementTree.fromstring(picture.svg).tag.endswith("svg")
        assert max(len(picture.png), len(picture.svg)) < MOST_BYTES


def test_each_picture_is_a_png_and_an_svg(pictures: list[Picture]) -> None:
    check(pictures)


def test_the_same_plan_gives_the_same_bytes_whatever_the_settings_of_the_user(
    batch: TrajectoryBatch, plan: StepPlan, pictures: list[Picture]
) -> None:
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "svg.hashsalt": "x"}):
        again = drawn(batch, plan)
    for first, second in zip(pictures, again, strict=True):
        assert first.png == second.png, first.name
        assert first.svg == second.svg, first.name
    assert not any(b"dc:date" in p.svg for p in pictures)


def bushy(count: int) -> TrajectoryBatch:
    """Trajectories that leave a common stem and each other at many places."""
    rng = np.random.default_rng(1)
    made = [rng.integers(0, 5000, 300)]
    for _ in range(count - 1):
        base = made[int(rng.integers(max(0, len(made) - 200), len(made)))]
        tail = rng.integers(0, 5000, int(rng.integers(1, 60)))
        made.append(np.concatenate([base[: int(rng.integers(1, len(base) + 1))], tail]))
    return from_lists(token_ids=made, tree_ids=[f"tree {i % 40}" for i in range(count)])


def test_2000_trajectories_stay_within_time_and_size() -> None:
    batch = bushy(2000)
    whole = plan_step(batch, replicas=1, capacity=400_000, planner="contiguous")
    many = plan_step(batch, replicas=2, capacity=3_000, planner="contiguous")
    began = time.process_time()
    check(drawn(batch, whole))
    with style():
        for picture in (draw_grid(many), draw_valleys(PrefixForest.build(batch), many)):
            assert max(len(picture.png), len(picture.svg)) < MOST_BYTES
    assert time.process_time() - began < 15


def test_odd_plans_are_drawn() -> None:
    for tokens in ([[1]], [[1], [1, 2], [1, 2, 3], [1, 2, 3]]):
        batch = batch_of(tokens)
        check(drawn(batch, plan_step(batch, replicas=1, capacity=9, chunk_size=1)))


def test_many_replicas_and_many_calls_are_drawn() -> None:
    wide = plan_step(batch_of([[i, i] for i in range(70)]), replicas=70, capacity=2)
    binary = batch_of([[*f"{i:08b}".encode()] for i in range(256)])
    (deep,) = plan_step(binary, replicas=1, capacity=9999, chunk_size=1).microbatches
    assert len(deep.calls.rounds) > len(DISTINCT)
    with style():
        for picture in (draw_grid(wide), draw_tree(binary, deep, 0), draw_rounds(deep, 0)):
            assert max(len(picture.png), len(picture.svg)) < MOST_BYTES


def test_ids_are_plain_text() -> None:
    """Neither mathematics, nor markup, nor letters that the font lacks are a failure."""
    ids = ["$", "$x", "$\\frac$", "日本語", "<b>&", "a\nb", "{}", "%", "", "\\"]
    odd = from_lists(token_ids=[[i, i] for i in range(10)], trajectory_ids=ids)
    one = plan_step(odd, replicas=1, capacity=99)
    with warnings.catch_warnings(), style():
        warnings.simplefilter("error")
        assert draw_tree(odd, one.microbatches[0], 0).png


def test_many_calls_have_colours_of_their_own() -> None:
    for count in (1, len(DISTINCT), len(DISTINCT) + 1, 30):
        assert len(set(call_colours(count))) == count


def test_requested_states_lie_on_chunk_boundaries_of_their_sequence() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        plan = plan_step(random_batch(rng), replicas=1, capacity=999, chunk_size=4)
        (microbatch,) = plan.microbatches
        for packed in microbatch.calls.rounds:
            laid = _Packed(packed, microbatch.forest.segment_lengths)
            states = iter(laid.states.tolist())
            for sequence, start, end in zip(packed, laid.start, laid.end, strict=True):
                for _ in sequence.boundaries:
                    at = next(states)
                    assert (at - start) % 4 == 0
                    assert start <= at <= end


def test_runs_of_neighbours_are_told_from_members_taken_elsewhere() -> None:
    contiguous = _Runs.of(np.array([5, 5, 2, 2, 2, 9]))
    assert contiguous.contiguous
    assert contiguous.start.tolist() == [0, 2, 5]
    assert contiguous.stop.tolist() == [2, 5, 6]
    assert contiguous.microbatch.tolist() == [0, 1, 2]
    assert contiguous.number.tolist() == [5, 2, 9]
    mixed = _Runs.of(np.array([5, 2, 5]))
    assert not mixed.contiguous
    assert mixed.microbatch.tolist() == [0, 1, 0]


def test_files_are_written_and_a_folder_that_cannot_be_is_an_error(
    pictures: list[Picture], tmp_path: Path
) -> None:
    make_folder(tmp_path / "new" / "folder")
    paths = write_pictures(pictures, tmp_path / "new" / "folder")
    assert [p.name for p in paths] == [f"{n}.{s}" for n in NAMES for s in ("png", "svg")]
    assert all(p.stat().st_size > 1000 for p in paths)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the picture"):
        write_pictures(pictures, tmp_path / "file")
    with pytest.raises(InputError, match="cannot write the page"):
        write_page("", tmp_path / "file" / "page.html")


class _Checker(HTMLParser):
    """Collects ids, references and tags left open."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[k] for k in ("href", "xlink:href", "src") if k in values]


def references(text: str) -> Iterator[str]:
    yield from re.findall(r"url\(#([^)]+)\)", text)


def test_the_page_is_whole_and_needs_nothing_else(
    batch: TrajectoryBatch, plan: StepPlan, pictures: list[Picture]
) -> None:
    tables = all_tables(batch, PrefixForest.build(batch), plan, 0)
    text = page("Plan <of> a step", tables, pictures)
    assert "Plan &lt;of&gt; a step" in text
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert not checker.tags & {"script", "link", "iframe", "object"}
    assert len(checker.ids) == len(set(checker.ids))
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in checker.links)
    local = {link[1:] for link in checker.links if link.startswith("#")} | set(references(text))
    assert local <= set(checker.ids)
    for table in tables:
        for row in table.rows:
            assert all(f"<td>{cell}</td>" in text for cell in row)
    assert text == page("Plan <of> a step", tables, pictures)
