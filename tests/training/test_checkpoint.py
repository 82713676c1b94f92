import errno
import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from harts.errors import InputError, UnsupportedError
from harts.training import checkpoint as module
from harts.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoints,
    discard_unfinished,
    save_checkpoint,
    write_whole,
)
from harts.training.loop import Trainer
from harts.training.metrics import MetricsLog
from harts.training.model import load_model, numerics
from tests.training.runs import MODEL, Silent, config, run, start


def trained(folder, **changes):
    """A trainer after one step, so that the optimiser has a state and the expert bias moved."""
    trainer = start(folder, steps=1, **changes)
    folder.joinpath("run").mkdir(exist_ok=True)
    log = MetricsLog(folder / "run", 0)
    trainer.run(log, folder / "run" / "checkpoints", Silent())
    log.close()
    return trainer


def save(trainer: Trainer, folder, step: int, keep: int = 2) -> Checkpoint:
    return save_checkpoint(
        folder,
        step=step,
        model=trainer.model,
        optimizer=trainer.optimizer,
        config=trainer.config.as_mapping(),
        data_fingerprint=trainer.data_fingerprint,
        keep=keep,
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_moments_and_random_state_come_back_bit_for_bit(tmp_path, dtype):
    trainer = trained(tmp_path, model__dtype=dtype)
    saved = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    torch.manual_seed(11)
    again = Trainer.start(trainer.config, Checkpoint.open(saved))
    before, after = trainer.model.state_dict(), again.model.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        assert torch.equal(value, after[name]), name
    assert any("e_score_correction_bias" in n and v.any() for n, v in before.items())
    names = dict(trainer.model.named_parameters())
    for name, parameter in again.model.named_parameters():
        moments = trainer.optimizer.state[names[name]]
        for kind, value in again.optimizer.state[parameter].items():
            assert torch.equal(value, moments[kind]), (name, kind)
    assert again.steps_done == 1


def test_a_checkpoint_is_a_model_directory_of_the_library(tmp_path, trainer):
    saved = save(trainer, tmp_path, 1).path
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert type(loaded).__name__ == "BailingHybridForCausalLM"
    assert loaded.config._attn_implementation != "harts_tree"
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    tokens = torch.arange(10).unsqueeze(0)
    assert torch.isfinite(loaded(tokens).logits).all()
    assert {file.suffix for file in saved.iterdir()} == {".safetensors", ".json"}


def test_training_can_start_from_a_checkpoint_as_a_model_directory(tmp_path, trainer):
    saved = save(trainer, tmp_path, 1).path
    fresh = start(tmp_path, model={"path": str(saved)})
    assert torch.equal(fresh.model.lm_head.weight, trainer.model.lm_head.weight)
    assert fresh.steps_done == 0


def test_a_model_directory_without_all_weights_is_refused(tmp_path, trainer):
    saved = save(trainer, tmp_path, 1).path
    values = json.loads((saved / "config.json").read_text())
    values["mlp_layer_types"] = ["sparse", "sparse"]
    (saved / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"lacks \d+ weights"), numerics("float32"):
        load_model(saved, "float32")


def test_unreadable_weights_are_one_sentence_that_names_the_file(tmp_path, trainer):
    saved = save(trainer, tmp_path, 1).path
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"model\.safetensors are corrupt or cut off"):
        load_model(saved, "float32")
    weights.unlink()
    with pytest.raises(InputError, match=r"expected the weights model\.safetensors"):
        load_model(saved, "float32")
    (saved / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedError, match="gpt2"):
        load_model(saved, "float32")
    (saved / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        load_model(saved, "float32")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "training_state.safetensors", "training_state.json"]
)
def test_a_corrupt_newest_checkpoint_is_refused_with_the_one_before_it(tmp_path, name):
    report = run(tmp_path, steps=2, checkpoint_every=1)
    file = report.checkpoint / name
    file.write_bytes(file.read_bytes()[:100])
    older = report.checkpoint.with_name("step-000001")
    with pytest.raises(InputError, match=f"before it is {older}: .*resume={older}"):
        run(tmp_path, steps=3)
    run(tmp_path, steps=2, resume=str(older), output=str(tmp_path / "other"))
    shutil.rmtree(report.checkpoint)
    assert [m.step for m in run(tmp_path, steps=2).metrics] == [1, 2]


def test_every_file_of_a_checkpoint_has_the_mode_of_the_umask(tmp_path, trainer):
    before = os.umask(0o027)
    try:
        saved = save(trainer, tmp_path, 1).path
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in saved.iterdir()} == {0o640}


def test_only_the_newest_are_kept(tmp_path, trainer):
    for step in (1, 2, 3, 10):
        save(trainer, tmp_path, step, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003", "step-000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000010"]


def test_what_a_killed_run_left_is_never_a_checkpoint(tmp_path, trainer):
    good = save(trainer, tmp_path, 1).path
    for name in (".writing-step-000002", ".discarded-step-000000"):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "step-000003").mkdir()
    assert checkpoints(tmp_path) == [good]
    discard_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("failing", ["model", "training state", "json", "sync"])
def test_a_full_disk_is_one_error_and_leaves_the_last_good_checkpoint(
    tmp_path, trainer, monkeypatch, failing
):
    good = save(trainer, tmp_path, 1).path

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "model":
        monkeypatch.setattr(trainer.model, "save_pretrained", full)
    elif failing == "training state":
        monkeypatch.setattr(module, "save_file", full)
    elif failing == "json":
        monkeypatch.setattr(module.Path, "write_text", full)
    else:
        monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(CheckpointError, match=r"step-000002: No space left on device.*make room"):
        save(trainer, tmp_path, 2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    Checkpoint.open(good).restore(trainer.model, trainer.optimizer)


def test_a_text_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    write_whole(file, "old")

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        write_whole(file, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("config.yaml", "old")]


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected a checkpoint directory"):
        Checkpoint.open(tmp_path)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, trainer):
    saved = save(trainer, tmp_path, 1).path
    state = json.loads((saved / "training_state.json").read_text())
    (saved / "training_state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(InputError, match="version 99"):
        Checkpoint.open(saved)


def test_moments_of_another_model_are_refused(tmp_path, trainer):
    saved = save(trainer, tmp_path, 1)
    other = start(tmp_path, model__config={**MODEL, "hidden_size": 16})
    with pytest.raises(InputError, match="this model lacks"):
        saved.restore(other.model, other.optimizer)


def test_a_run_keeps_as_many_checkpoints_as_asked(tmp_path):
    report = run(tmp_path, steps=3, checkpoint_every=1, keep_checkpoints=1)
    assert checkpoints(tmp_path / "run" / "checkpoints") == [report.checkpoint]
    assert report.checkpoint.name == "step-000003"
    assert config(tmp_path).keep_checkpoints == 2
