"""The command line as a user meets it: exit status, stdout, one readable block on stderr."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from harts.cli import main
from harts.trajectories import read_trajectories


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    printed = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, printed.out, printed.err


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    rows = [
        {"token_ids": [1, 2, 3, 4], "tree_id": "a", "reward": 1.0},
        {"token_ids": [1, 2, 3, 5, 6], "tree_id": "a", "reward": 0.0},
        {"token_ids": [1, 2, 9], "tree_id": "a", "reward": 0.5},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "command", ["plan", "inspect", "check", "fidelity", "train", "bench", "synth"]
)
def test_every_command_has_help_with_an_example(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"harts {command}" in out
    assert "Example:" in out


def test_plan_shows_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], workload: Path, tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    status, out, err = run(
        capsys, "plan", workload, "--replicas", 1, "--capacity", 64, "--json", target
    )
    assert (status, err) == (0, "")
    assert "compression" in out
    plan = json.loads(target.read_text())
    assert plan["objective"] == [7, 7, 7]
    assert plan["timings_s"]["load"] > 0


def test_synth_writes_the_same_file_for_the_same_seed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        assert run(capsys, "synth", "--preset", "tiny", "--seed", 3, "--out", path)[0] == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(read_trajectories([paths[0]])) > 10


def test_check_passes_on_a_small_file(capsys: pytest.CaptureFixture[str], workload: Path) -> None:
    status, out, _ = run(capsys, "check", "--data", workload, "--steps", 2)
    assert status == 0, out
    assert "every gradient" in out
    assert "PAST BOUND" not in out


def test_check_exits_1_when_a_bound_is_passed(
    capsys: pytest.CaptureFixture[str], workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import harts.models.policy as policy_module

    exact = policy_module.mapped_logprobs
    monkeypatch.setattr(
        policy_module, "mapped_logprobs", lambda *a, **k: exact(*a, **k) * (1 + 1e-8)
    )
    status, out, _ = run(capsys, "check", "--data", workload, "--steps", 0)
    assert status == 1
    assert "PAST BOUND" in out


BAD_INPUT = {
    "a missing file": ("missing.jsonl", None, ["missing.jsonl"]),
    "a missing column": ("a.jsonl", '{"reward": 1.0}\n', ["a.jsonl", "token_ids"]),
    "a wrong type": ("a.jsonl", '{"token_ids": "text"}\n', ["a.jsonl", "token_ids"]),
    "an empty trajectory": ("a.jsonl", '{"token_ids": []}\n', ["a.jsonl", "row 0"]),
    "a NaN advantage": (
        "a.jsonl",
        '{"token_ids": [1, 2], "advantages": [0.0, NaN]}\n',
        ["a.jsonl", "advantages"],
    ),
    "no Parquet file at all": ("a.parquet", "not parquet", ["a.parquet"]),
    "an unknown extension": ("a.txt", "1 2 3", ["a.txt", ".parquet"]),
    "a trajectory longer than capacity": (
        "a.jsonl",
        '{"token_ids": [1]}\n{"token_ids": [1, 2, 3, 4, 5]}\n',
        ["a.jsonl', row 1 has 5 tokens", "at least 5"],
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_clear_error_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    file, content, expected = BAD_INPUT[name]
    if content is not None:
        (tmp_path / file).write_text(content)
    target = tmp_path / "plan.json"
    status, out, err = run(
        capsys, "plan", tmp_path / file, "--replicas", 1, "--capacity", 4, "--json", target
    )
    assert status == 2
    assert out == ""
    flat = " ".join(err.split())
    assert flat.startswith("error:")
    assert "Traceback" not in err
    for part in expected:
        assert part in flat
    assert not target.exists()


def test_a_token_beyond_the_vocabulary_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"token_ids": [1, 2000000000], "advantages": [0.0, 1.0]}\n')
    status, _, err = run(
        capsys, "train", "examples/tiny.yaml", f"data={path}", f"output={tmp_path / 'run'}"
    )
    assert status == 2
    assert "2000000000" in err.replace(",", "")
    assert "vocab" in err


def test_an_unknown_model_class_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], workload: Path
) -> None:
    status, _, err = run(capsys, "check", "--data", workload, "--model", "gpt2")
    assert status == 2
    assert "'gpt2'" in err
    assert "bailing_hybrid" in err


def test_bad_usage_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "plan")
    assert status == 2
    assert "Missing argument" in err
    assert run(capsys, "plan", "x.jsonl", "--replicas", "many", "--capacity", 3)[0] == 2


BAD_ARGUMENTS = {
    "no replicas": ("plan", "x.jsonl", "--replicas", 0, "--capacity", 4),
    "no chunk": ("plan", "x.jsonl", "--replicas", 1, "--capacity", 4, "--chunk-size", 0),
    "capacity past int64": ("plan", "x.jsonl", "--replicas", 1, "--capacity", 10**20 - 1),
    "no replicas to inspect": ("inspect", "x.jsonl", "--replicas", 0),
    "a negative seed": ("synth", "--preset", "tiny", "--out", "x.jsonl", "--seed", -1),
    "no repeats": ("bench", "cpu-step", "--repeats", 0),
    "negative tokens": ("bench", "cpu-step", "--tokens", -5),
    "replicas from 0": ("bench", "planning", "--replicas", "0-2"),
    "half a limit": ("bench", "planning", "--ortools-limits", "1"),
    "nothing to check": ("check", "--tokens", 0),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_numbers_out_of_range_are_bad_usage(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = run(capsys, *BAD_ARGUMENTS[name])
    assert (status, out) == (2, "")
    assert "Usage:" in err
    assert "unexpected" not in err


def test_a_capacity_that_holds_everything_may_be_as_large_as_it_likes(
    capsys: pytest.CaptureFixture[str], workload: Path
) -> None:
    status, out, err = run(capsys, "plan", workload, "--replicas", 1, "--capacity", 2**63 - 1)
    assert (status, err) == (0, "")
    assert "1 x 1" in out


@pytest.mark.parametrize("command", [("plan", "--replicas", 1, "--capacity", 64), ("bench",)])
@pytest.mark.parametrize("target", [".", "missing/figures.json", "rollouts.jsonl/figures.json"])
def test_a_report_that_cannot_be_written_is_told_before_any_work(
    capsys: pytest.CaptureFixture[str],
    workload: Path,
    command: tuple[object, ...],
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was done before the target was checked")

    monkeypatch.setattr(import_module("harts.cli.plan"), "read_trajectories", work)
    monkeypatch.setattr("harts.bench.cpu_step.cpu_step", work)
    first, *rest = command
    named = workload if first == "plan" else "cpu-step"
    status, _, err = run(capsys, first, named, *rest, "--json", workload.parent / target)
    flat = " ".join(err.split())
    assert status == 2
    assert flat.startswith("error: cannot write the ")
    assert [path.name for path in workload.parent.iterdir()] == [workload.name]


def test_a_bench_report_replaces_the_old_one_whole(tmp_path: Path) -> None:
    from harts.cli.bench_report import write_figures

    path = tmp_path / "figures.json"
    path.write_text("old")
    write_figures(path, {"results": []})
    assert json.loads(path.read_text()) == {"results": []}
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_is_one_line_and_exit_130(
    capsys: pytest.CaptureFixture[str], workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("harts.cli.plan"), "read_trajectories", stopped)
    status, out, err = run(capsys, "plan", workload, "--replicas", 1, "--capacity", 64)
    assert (status, out) == (130, "")
    assert err == "interrupted: stopped before it was done (Ctrl-C).\n"


def test_check_names_the_worst_parameter_in_full_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import harts.checking as checking
    from harts.fidelity import Comparison

    parameter = "model.layers.12.attention.some_rather_long_projection_name.weight"
    row = Comparison(name=f"all (worst {parameter})", error=1e-12, bound=1e-9)
    monkeypatch.setattr(checking, "check_batch", lambda *_: [row])
    monkeypatch.setenv("COLUMNS", "70")
    status, out, _ = run(capsys, "check", "--data", workload)
    assert status == 0
    cells = [line.split("│")[1].strip() for line in out.splitlines() if line.count("│") == 5]
    assert parameter.removeprefix("model.layers.") in "".join(cells)


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match=r"missing\.jsonl"):
        main(["--debug", "plan", "missing.jsonl", "--replicas", "1", "--capacity", "4"])


def test_a_plan_runs_without_torch(workload: Path) -> None:
    """A planner beside a rollout server must not load PyTorch."""
    code = (
        "import sys\n"
        "from harts.cli import main\n"
        "try:\n"
        f"    main(['plan', {str(workload)!r}, '--replicas', '1', '--capacity', '64'])\n"
        "except SystemExit as stopped:\n"
        "    assert stopped.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_fidelity_shows_errors_by_depth_and_writes_picture_and_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture, figures = tmp_path / "replay.png", tmp_path / "replay.json"
    status, out, err = run(
        capsys, "fidelity", "--tokens", 600, "--pinned", "--plot", picture, "--json", figures
    )
    assert (status, err) == (0, "")
    assert "no replay" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(figures.read_text())
    assert sum(row["positions"] for row in report["depths"]) < report["tokens"] <= 600
    status, _, err = run(capsys, "fidelity", "--device", "tpu")
    assert status == 2
    assert "cpu or cuda, got 'tpu'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fidelity", "--device", "cuda"), "no GPU was found"),
        (("bench", "step", "--data", "a/x.parquet", "--data", "b/x.parquet"), "'x' more than once"),
        (("bench", "step", "--device", "cpu", "--model", "small", "--capacity", 9), "table2-1"),
        (
            ("plan", "WORKLOAD", "--replicas", 10**9, "--capacity", 64, "--fillers"),
            "65,536",
        ),
    ],
)
def test_what_cannot_run_is_one_clear_error(
    capsys: pytest.CaptureFixture[str],
    workload: Path,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    given = [workload if a == "WORKLOAD" else a for a in arguments]
    status, _, err = run(capsys, *given)
    flat = " ".join(err.split())
    assert status == 2
    assert flat.startswith("error: ")
    assert message in flat


def test_fidelity_refuses_a_file_in_which_nothing_is_predicted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"token_ids": [3]}) + "\n")
    status, _, err = run(capsys, "fidelity", "--data", path)
    assert status == 2
    assert "nothing that is predicted" in " ".join(err.split())


def test_fidelity_shows_whole_numbers_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "fidelity", "--tokens", 300)
    assert "…" not in out
