"""`harts train` on a GPU: repeats itself after a kill, and goes on with what the CPU began.

Every run is a process of its own, as PyTorch reads how cuBLAS is to work once a process.
"""

import json
from pathlib import Path

import pytest
import torch

from harts.training.metrics import StepMetrics, read_metrics
from tests.training.runs import curve
from tests.training.test_cli_train import KILL_AFTER_A_STEP, ROOT, child

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EXAMPLE = ROOT / "examples" / "tiny.yaml"
THREE_STEPS = ("steps=3", "checkpoint_every=1", "keep_checkpoints=3")
COMPARED = ("comparison.repeats=1", "comparison.tokens=600")
ALONE = ("comparison.enabled=false",)
COMPILED_SIZES = (
    "model.dtype=bfloat16",
    "model.config.hidden_size=128",
    "model.config.head_dim=64",
)
"""What the compiled delta rule takes: bfloat16, and heads of 64."""


def train(output: Path, *overrides: str) -> list[StepMetrics]:
    done = child("", EXAMPLE, f"output={output}", *THREE_STEPS, *overrides)
    assert done.returncode == 0, done.stderr
    return read_metrics(output)


@pytest.mark.parametrize("sizes", [(), COMPILED_SIZES], ids=["float32", "bfloat16"])
def test_a_killed_run_goes_on_to_the_losses_and_weights_of_a_whole_one_bit_for_bit(tmp_path, sizes):
    settings = ("device=cuda", *ALONE, *sizes)
    whole = train(tmp_path / "whole", *settings)
    assert [m.step for m in whole] == [1, 2, 3]
    output = f"output={tmp_path / 'killed'}"
    killed = child(KILL_AFTER_A_STEP, EXAMPLE, output, *THREE_STEPS, *settings)
    assert killed.returncode == -9, killed.stderr
    newest = tmp_path / "killed" / "checkpoints"
    assert max(path.name for path in newest.iterdir()) == "step-000002"
    assert curve(train(tmp_path / "killed", *settings)) == curve(whole)
    for file in ("model.safetensors", "training_state.safetensors"):
        ends = [
            tmp_path / run / "checkpoints" / "step-000003" / file for run in ("whole", "killed")
        ]
        assert ends[0].read_bytes() == ends[1].read_bytes()


def test_the_gpu_goes_on_from_a_checkpoint_of_the_cpu_to_its_losses_and_back(tmp_path):
    cpu = train(tmp_path / "cpu", "device=cpu", *ALONE)
    first = tmp_path / "cpu" / "checkpoints" / "step-000001"
    gpu = train(tmp_path / "gpu", "device=cuda", f"resume={first}", *ALONE)
    second = tmp_path / "gpu" / "checkpoints" / "step-000002"
    back = train(tmp_path / "back", "device=cpu", f"resume={second}", *ALONE)
    assert [m.step for m in (*gpu, *back)] == [2, 3, 3]
    for found, expected in zip((*gpu, *back), (*cpu[1:], cpu[2]), strict=True):
        assert found.loss == pytest.approx(expected.loss, abs=1e-4)
        # On the own policy the loss hardly depends on the weights; the log-probs do.
        assert found.logprob_above == pytest.approx(expected.logprob_above, abs=1e-4)
        assert found.logprob_below == pytest.approx(expected.logprob_below, abs=1e-4)


def test_both_devices_begin_with_the_same_weights(tmp_path):
    cpu, gpu = (
        train(tmp_path / d, f"device={d}", "optimizer.learning_rate=1e-20", "steps=1", *ALONE)
        for d in ("cpu", "cuda")
    )
    assert gpu[0].logprob_above == pytest.approx(cpu[0].logprob_above, abs=1e-5)


@pytest.mark.parametrize("sizes", [(), COMPILED_SIZES], ids=["float32", "bfloat16"])
def test_the_comparison_in_float64_passes_on_a_gpu(tmp_path, sizes):
    train(tmp_path / "run", "device=cuda", "steps=1", *COMPARED, *sizes)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["fidelity_passed"] is True
    assert summary["largest_gradient_difference"] > 0


def test_compiled_layers_train_and_go_on(tmp_path):
    settings = ("device=cuda", "compile=true", *ALONE, *COMPILED_SIZES)
    plain = train(tmp_path / "plain", "device=cuda", *ALONE, *COMPILED_SIZES)
    train(tmp_path / "run", "steps=2", *settings)
    fused = train(tmp_path / "run", *settings)
    assert [m.step for m in fused] == [1, 2, 3]
    for a, b in zip(fused, plain, strict=True):
        assert a.logprob_above == pytest.approx(b.logprob_above, abs=3e-2)
