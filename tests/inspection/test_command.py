"""`harts inspect` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harts.cli import main
from harts.trajectories import TrajectoryBatch, write_trajectories


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    printed = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, printed.out, " ".join(printed.err.split())


@pytest.fixture
def workload(batch: TrajectoryBatch, tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    write_trajectories(batch, path)
    return path


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "inspect", "--help")
    assert status == 0
    assert "Example: harts inspect" in out


def test_without_options_every_table_is_shown_and_nothing_written(
    capsys: pytest.CaptureFixture[str], workload: Path, tmp_path: Path
) -> None:
    status, out, err = run(capsys, "inspect", workload)
    assert (status, err) == (0, "")
    for title in ("Summary of the step", "Rollout trees (3)", "Load", "Calls of microbatch 0"):
        assert title in out
    assert "65,536" in out
    assert list(tmp_path.iterdir()) == [workload]


def test_pictures_and_a_page_are_written(
    capsys: pytest.CaptureFixture[str], workload: Path, tmp_path: Path
) -> None:
    folder, html = tmp_path / "pictures", tmp_path / "pages" / "plan.html"
    options = ("--replicas", 2, "--capacity", 19, "--chunk-size", 4, "--microbatch", 1)
    status, out, err = run(capsys, "inspect", workload, *options, "--out", folder, "--html", html)
    assert (status, err) == (0, "")
    assert len(list(folder.iterdir())) == 8
    assert html.read_text().count("<svg") == 4
    assert out.count("wrote ") == 9
    assert "Calls of microbatch 1" in out


def test_a_saved_plan_shows_what_planning_now_would(
    capsys: pytest.CaptureFixture[str], workload: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    # Small chunks are not on `harts plan`'s defaults: the file must say what was planned.
    options = ("--replicas", 2, "--capacity", 19, "--chunk-size", 4)
    assert run(capsys, "plan", workload, *options, "--json", plan)[0] == 0
    saved = run(capsys, "inspect", workload, "--plan", plan)
    assert saved == run(capsys, "inspect", workload, *options)
    assert saved[0] == 0


def test_fillers_are_an_option(capsys: pytest.CaptureFixture[str], workload: Path) -> None:
    options = ("inspect", workload, "--replicas", 11)
    status, _, err = run(capsys, *options)
    assert status == 2
    assert "11" in err
    status, out, _ = run(capsys, *options, "--fillers")
    assert status == 0
    assert "filler microbatches of weight zero" in out


ERRORS = {
    "a microbatch that is not there": (("--microbatch", 7), ["microbatch 7", "--microbatch"]),
    "a plan file that is not there": (("--plan", "missing.json"), ["missing.json"]),
    "a plan and how to plan": (
        ("--plan", "missing.json", "--replicas", 2, "--fillers"),
        ["--plan", "got --replicas, --fillers"],
    ),
    "a capacity below a trajectory": (("--capacity", 4), ["capacity", "at least 14"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_block_and_exit_2(
    capsys: pytest.CaptureFixture[str], workload: Path, name: str
) -> None:
    options, expected = ERRORS[name]
    status, out, err = run(capsys, "inspect", workload, *options)
    assert (status, out) == (2, "")
    assert err.startswith("error:")
    assert "Traceback" not in err
    for part in expected:
        assert part in err


def test_a_plan_of_other_trajectories_is_refused(
    capsys: pytest.CaptureFixture[str], workload: Path, tmp_path: Path
) -> None:
    plan, other = tmp_path / "plan.json", tmp_path / "other.jsonl"
    run(capsys, "plan", workload, "--replicas", 1, "--capacity", 99, "--json", plan)
    other.write_text(json.dumps({"token_ids": [1, 2, 3]}) + "\n")
    status, _, err = run(capsys, "inspect", other, "--plan", plan)
    assert status == 2
    assert err.startswith("error:")


def test_a_target_that_cannot_be_written_is_an_error(
    capsys: pytest.CaptureFixture[str], workload: Path
) -> None:
    for option, target in (
        ("--out", workload / "pictures"),  # nothing fits under a regular file, root or not
        ("--html", workload / "page.html"),
    ):
        status, _, err = run(capsys, "inspect", workload, option, target)
        assert status == 2
        assert f"cannot make the folder {workload}" in err


def test_tables_need_neither_matplotlib_nor_torch_and_pictures_say_what_they_need(
    workload: Path, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from harts.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, "inspect", str(workload)]
    tables = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tables.returncode == 0, tables.stderr
    page = [*command, "--html", str(tmp_path / "page.html")]
    pictures = subprocess.run(page, capture_output=True, text=True, check=False)
    assert pictures.returncode == 2
    assert "need matplotlib" in pictures.stderr
    assert "pip install" in pictures.stderr
