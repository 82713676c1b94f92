"""Where a run computes: what a configuration may ask for, and what moves with it."""

import os

import pytest
import torch

from harts.errors import InputError
from harts.models import TreePolicy
from harts.training import comparison, loop
from harts.training.checkpoint import Checkpoint, save_checkpoint
from harts.training.config import RunConfig
from harts.training.device import make_cublas_repeat, training_device
from harts.training.loop import Trainer
from harts.training.run import train
from tests.training.runs import Silent, config, run, start

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def a_gpu(monkeypatch):
    """PyTorch says that it sees a GPU; nothing computes on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # Set first, so that what a test leaves there goes away with it.
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_and_cpu_are_the_cpu_and_leave_the_environment_alone():
    assert training_device("auto") == training_device("cpu") == torch.device("cpu")
    assert VARIABLE not in os.environ


@pytest.mark.usefixtures("a_gpu")
def test_with_a_gpu_auto_and_cuda_are_the_gpu_and_cpu_stays_the_cpu():
    assert training_device("cpu") == torch.device("cpu")
    assert VARIABLE not in os.environ
    assert training_device("auto") == training_device("cuda") == torch.device("cuda")
    assert os.environ[VARIABLE] == ":4096:8"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("built_for", "words"), [(None, "without CUDA"), ("13.0", "sees none")])
def test_cuda_without_a_gpu_is_refused_with_the_reason_and_a_way_out(
    tmp_path, monkeypatch, built_for, words
):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(InputError, match=rf"device: cuda needs a GPU.*{words}.*device=cpu"):
        run(tmp_path, device="cuda")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("a_gpu")
def test_a_workspace_of_cublas_that_repeats_stays_and_another_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, ":16:8")
    make_cublas_repeat()
    assert os.environ[VARIABLE] == ":16:8"
    monkeypatch.setenv(VARIABLE, ":0:0")
    with pytest.raises(InputError, match=rf"{VARIABLE} to be :4096:8 or :16:8.*got ':0:0'"):
        training_device("cuda")


def test_an_unknown_device_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(InputError, match=r"device: expected one of auto, cpu, cuda, got 'gpu'"):
        config(tmp_path, device="gpu")


@pytest.mark.parametrize(
    ("changes", "words"), [({"device": "cpu"}, "got cpu"), ({"compile": True}, "got true")]
)
def test_megatron_takes_the_gpus_of_torchrun_and_compiles_nothing(changes, words):
    with pytest.raises(InputError, match=f"engine: megatron.*{words}"):
        RunConfig(engine="megatron", **changes)
    assert RunConfig(engine="megatron", device="cuda").device == "cuda"


def test_compilation_is_for_a_gpu(tmp_path):
    with pytest.raises(InputError, match=r"compile: true expects a GPU.*the CPU"):
        run(tmp_path, compile=True)
    assert not (tmp_path / "run").exists()


def test_compilation_is_of_the_layers_of_a_run_on_a_gpu_that_asks_for_it(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(TreePolicy, "compile_layers", lambda self: compiled.append(self))
    monkeypatch.setattr(loop, "_check_compilation", lambda *_: None)
    assert start(tmp_path).policy not in compiled
    assert [start(tmp_path, compile=True).policy] == compiled


def test_model_moments_and_weights_of_a_checkpoint_land_on_the_device_of_the_run(
    tmp_path, monkeypatch
):
    report = run(tmp_path, steps=2)
    monkeypatch.setattr(loop, "training_device", lambda _: torch.device("meta"))
    there = Trainer.start(config(tmp_path), Checkpoint.open(report.checkpoint))
    parameters = dict(there.model.named_parameters())
    for name, parameter in parameters.items():
        state = there.optimizer.state[parameter]
        moved = {parameter.device, state["exp_avg"].device, state["exp_avg_sq"].device}
        assert moved == {torch.device("meta")}, name
        assert state["exp_avg"].shape == parameter.shape
        # What AdamW itself makes: a count on the CPU.
        assert state["step"].device == torch.device("cpu")
        assert float(state["step"]) == 2
    assert all(b.device.type == "meta" for b in there.model.buffers())


def test_the_device_may_change_between_the_parts_of_a_run_and_the_change_is_told(tmp_path):
    run(tmp_path, steps=2, device="auto")
    observer = Silent()
    report = train(config(tmp_path, steps=3, device="cpu"), observer)
    assert [m.step for m in report.metrics] == [1, 2, 3]
    assert any("device: 'auto' -> 'cpu'" in text for text in observer.messages)
    assert any("parameters on the CPU" in text for text in observer.messages)


def test_the_state_of_a_gpu_generator_comes_back_on_a_gpu_and_is_skipped_on_the_cpu(
    tmp_path, monkeypatch
):
    trainer = start(tmp_path)
    state, given = torch.arange(16, dtype=torch.uint8), []
    checkpoint = {"model": trainer.model, "optimizer": trainer.optimizer, "keep": 2}
    more = {"config": trainer.config.as_mapping(), "data_fingerprint": "", "step": 1}
    gpu = torch.device("cuda", 0)
    with monkeypatch.context() as patch:
        patch.setattr("harts.training.checkpoint._gpu_of", lambda _: gpu)
        patch.setattr(torch.cuda, "get_rng_state", lambda _: state)
        patch.setattr(torch.cuda, "set_rng_state", lambda *args: given.append(args))
        saved = save_checkpoint(tmp_path / "checkpoints", **checkpoint, **more)
        saved.restore(trainer.model, trainer.optimizer)
    assert torch.equal(given[0][0], state)
    assert given[0][1] == gpu
    saved.restore(trainer.model, trainer.optimizer)
    assert len(given) == 1


def test_fresh_weights_are_drawn_on_the_cpu_for_any_device(tmp_path, monkeypatch):
    drawn = []
    build = loop.build_model

    def watched(model_config):
        model = build(model_config)
        drawn.append(model.device.type)
        return model

    monkeypatch.setattr(loop, "build_model", watched)
    monkeypatch.setattr(loop, "training_device", lambda _: torch.device("meta"))
    assert start(tmp_path).model.device.type == "meta"
    assert drawn == ["cpu"]


def test_only_compact_execution_of_the_comparison_is_on_the_device_of_the_run(
    tmp_path, monkeypatch
):
    asked = []
    copy = comparison.plain_copy

    def watched(model):
        made = copy(model)
        move = made.to
        made.to = lambda device: (asked.append(device), move(device))[1]
        return made

    monkeypatch.setattr(comparison, "plain_copy", watched)
    trainer = start(tmp_path)
    fidelity = comparison.measure_fidelity(
        trainer.model, trainer.compared_step(), 400, lambda _: None
    )
    assert fidelity.passed
    assert asked == [trainer.model.device]
