import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from harts.cli import main
from harts.training import comparison
from harts.training.checkpoint import checkpoints
from harts.training.config import load_config
from harts.training.metrics import MetricsLog, read_metrics
from harts.trajectories import read_trajectories
from tests.training.runs import curve, run, settings

ROOT = Path(__file__).resolve().parents[2]

# Runs `harts train` in a process of its own, after lines that arrange its end.
CHILD = """
import sys
{arrange}
from harts.cli import main
main(["train", *sys.argv[1:]])
"""

KILL_WHILE_WRITING_A_CHECKPOINT = """
import os, signal
from harts.training import checkpoint
sync = checkpoint._sync
def dying_sync(path):
    if "step-000004" in str(path) and path.name == "training_state.json":
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)
checkpoint._sync = dying_sync
"""

KILL_AFTER_A_STEP = """
import os, signal
from harts.training.metrics import MetricsLog
append = MetricsLog.append
def dying_append(log, metrics):
    append(log, metrics)
    if metrics.step == 3:
        log._file.write('{"step": 4, "epo')
        log._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
MetricsLog.append = dying_append
"""

FILES_OF_A_DISK_THAT_IS_FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
"""


def write_config(folder: Path, **changes: object) -> Path:
    file = folder / "small.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(settings(folder, **changes))))
    return file


def command(*arguments: object) -> int:
    """`harts train` in this process; returns the exit status."""
    with pytest.raises(SystemExit) as caught:
        main(["train", *map(str, arguments)])
    return int(caught.value.code or 0)


def child(arrange: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    threads = str(torch.get_num_threads())  # another number of threads rounds differently
    return subprocess.run(
        [sys.executable, "-c", CHILD.format(arrange=arrange), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": threads, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("arrange", [KILL_WHILE_WRITING_A_CHECKPOINT, KILL_AFTER_A_STEP])
def test_the_same_command_after_a_kill_gives_the_curve_of_an_uninterrupted_run(tmp_path, arrange):
    file = write_config(tmp_path, steps=6)
    killed = child(arrange, file)
    assert killed.returncode == -9, killed.stderr
    found = checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in found] == ["step-000002"]
    assert command(file) == 0
    whole = run(tmp_path, steps=6, output=str(tmp_path / "whole"))
    resumed = read_metrics(tmp_path / "run")
    assert [m.step for m in resumed] == [1, 2, 3, 4, 5, 6]
    assert curve(resumed) == curve(whole.metrics)
    last = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (last / name).read_bytes() == (whole.checkpoint / name).read_bytes()
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"step-000004", "step-000006"}


def test_a_full_disk_is_one_error_exit_2_and_nothing_half_written(tmp_path):
    file = write_config(tmp_path, steps=2)
    assert command(file) == 0
    stopped = child(FILES_OF_A_DISK_THAT_IS_FULL, file, "steps=4")
    assert stopped.returncode == 2, stopped.stderr
    assert "step-000004" in stopped.stderr
    assert "make room" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    left = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert left == ["step-000002"]
    assert command(file, "steps=4") == 0
    assert [m.step for m in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_run_ends_with_a_table_and_a_model_that_the_library_loads(tmp_path, capsys):
    file = write_config(tmp_path, steps=2, comparison={"repeats": 1, "tokens": 400})
    assert command(file, "optimizer.learning_rate=1e-3") == 0
    shown = capsys.readouterr().out
    for words in (
        "tokens before sharing",
        "tokens after sharing",
        "compression",
        "calls",
        "replay",
        "loss",
        "margin",
        "trajectory-wise",
        "largest difference of a log-prob",
        "largest difference of a gradient",
        "checkpoint",
    ):
        assert words in shown, words
    saved = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert AutoModelForCausalLM.from_pretrained(saved).config.hidden_size == 32
    resolved = load_config(tmp_path / "run" / "config.yaml")
    assert resolved.optimizer.learning_rate == 1e-3
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_comparison_past_its_bound_is_said_and_exits_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparison, "relative_error", lambda *_: 1e-3)
    file = write_config(tmp_path, steps=1, comparison={"repeats": 1, "tokens": 400})
    assert command(file) == 1
    assert capsys.readouterr().out.count("PAST BOUND") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["fidelity_passed"] is False


def test_an_interrupt_is_one_line_with_the_newest_checkpoint_and_exit_130(
    tmp_path, capsys, monkeypatch
):
    append = MetricsLog.append

    def interrupted(log, metrics):
        append(log, metrics)
        if metrics.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(MetricsLog, "append", interrupted)
    file = write_config(tmp_path, steps=4)
    assert command(file) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert "step-000002, the same command goes on from it" in said
    assert command(write_config(tmp_path, steps=4), "resume=never", "checkpoint_every=9") == 130
    assert "no checkpoint was written yet" in capsys.readouterr().err
    monkeypatch.undo()
    assert command(file) == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.lerning_rate=1"], "optimizer.learning_rate"),
        (["steps"], "key=value"),
        (["engine=megatron"], "engine: megatron"),
        (["data=absent.jsonl"], "absent.jsonl"),
        (["plan.capacity=8"], "plan.capacity"),
        (["model.config.vocab_size=16"], "vocabulary size 16"),
        (["model.model_type=unheard-of"], "bailing_hybrid"),
        (["resume=nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_block_on_stderr_exit_2_and_no_run_directory(
    tmp_path, capsys, overrides, words
):
    assert command(write_config(tmp_path), *overrides) == 2
    shown = capsys.readouterr()
    assert words in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert not (tmp_path / "run").exists()


def test_the_example_file_is_two_trees_that_the_example_model_can_train_on():
    batch = read_trajectories(ROOT / "examples" / "rollouts.jsonl")
    config = load_config(ROOT / "examples" / "tiny.yaml", ["data=examples/rollouts.jsonl"])
    batch.check_vocabulary(config.model.config["vocab_size"])
    assert len(batch) == 12
    assert len(set(batch.tree_ids)) == 2
    for tree in set(batch.tree_ids):
        rewards = {r for r, t in zip(batch.rewards, batch.tree_ids, strict=True) if t == tree}
        assert rewards == {0.0, 1.0}
    assert batch.lengths.max() <= config.plan.capacity
