import dataclasses
import json

import numpy as np
import pytest
import torch

from harts.errors import InputError, PlanError
from harts.objectives import GRPO
from harts.training import loop
from harts.training.checkpoint import Checkpoint, checkpoints
from harts.training.comparison import ComparisonConfig, measure_fidelity, time_step
from harts.training.data import TrainingData, TreeSampler
from harts.training.loop import TrainingError
from harts.training.metrics import read_metrics
from harts.training.report import final_table, summary
from harts.training.run import train
from tests.training.runs import Silent, config, curve, rollouts, run, start


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("whole")
    report = run(folder)
    return folder, report


def weights(checkpoint):
    return (checkpoint / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_numbers(tmp_path, whole):
    again = run(tmp_path)
    assert curve(again.metrics) == curve(whole[1].metrics)
    assert weights(again.checkpoint) == weights(whole[1].checkpoint)
    other = run(tmp_path, resume="never", seed=1)
    assert curve(other.metrics) != curve(again.metrics)


def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(tmp_path, whole):
    run(tmp_path, steps=2)
    resumed = run(tmp_path, steps=4)
    assert curve(resumed.metrics) == curve(whole[1].metrics)
    assert curve(read_metrics(tmp_path / "run")) == curve(whole[1].metrics)
    assert weights(resumed.checkpoint) == weights(whole[1].checkpoint)


def test_steps_after_the_checkpoint_and_a_cut_line_are_trimmed(tmp_path, whole):
    run(tmp_path, steps=2)
    file = tmp_path / "run" / "metrics.jsonl"
    later = [json.dumps(m.as_mapping()) for m in whole[1].metrics[2:]]
    file.write_text(file.read_text() + later[0] + "\n" + later[1][:25])
    resumed = run(tmp_path)
    assert [m.step for m in resumed.metrics] == [1, 2, 3, 4]
    assert curve(read_metrics(tmp_path / "run")) == curve(whole[1].metrics)


def test_a_run_killed_before_its_first_checkpoint_starts_afresh(tmp_path, whole):
    (tmp_path / "run").mkdir()
    line = json.dumps(whole[1].metrics[0].as_mapping()) + "\n"
    (tmp_path / "run" / "metrics.jsonl").write_text(line)
    assert curve(run(tmp_path).metrics) == curve(whole[1].metrics)


def test_a_named_checkpoint_goes_on_in_another_directory(tmp_path, whole):
    first = checkpoints(whole[0] / "run" / "checkpoints")[0]
    assert first.name == "step-000002"
    resumed = run(tmp_path, resume=str(first))
    assert curve(resumed.metrics) == curve(whole[1].metrics[2:])
    assert weights(resumed.checkpoint) == weights(whole[1].checkpoint)


def test_an_older_checkpoint_does_not_go_on_under_newer_ones(whole):
    older = checkpoints(whole[0] / "run" / "checkpoints")[0]
    with pytest.raises(InputError, match="newer"):
        run(whole[0], resume=str(older))


def test_a_finished_run_reports_again_and_trains_no_further(tmp_path):
    run(tmp_path, steps=2)
    observer = Silent()
    report = train(config(tmp_path, steps=2), observer)
    assert observer.steps == []
    assert any("0 steps left" in text for text in observer.messages)
    assert len(report.metrics) == 2


def test_settings_changed_on_the_way_are_told_and_a_finished_run_keeps_its_own(tmp_path):
    run(tmp_path, steps=2)
    kept = (tmp_path / "run" / "config.yaml").read_text()
    observer = Silent()
    train(config(tmp_path, steps=2, optimizer__learning_rate=0.5), observer)
    told = [text for text in observer.messages if text.startswith("changed since")]
    assert len(told) == 1
    assert "optimizer.learning_rate: 0.003 -> 0.5" in told[0]
    assert (tmp_path / "run" / "config.yaml").read_text() == kept
    observer = Silent()
    train(config(tmp_path, steps=3, optimizer__learning_rate=0.5), observer)
    assert any("steps: 2 -> 3" in text for text in observer.messages)
    assert "learning_rate: 0.5" in (tmp_path / "run" / "config.yaml").read_text()


def test_resume_never_moves_the_earlier_run_aside(tmp_path):
    run(tmp_path, steps=2)
    run(tmp_path, steps=1, resume="never")
    assert len(read_metrics(tmp_path / "run")) == 1
    assert len(read_metrics(tmp_path / "run.1")) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__config__hidden_size": 16}, r"model\.config\.hidden_size = 32.* has 16"),
        ({"model__dtype": "float64"}, r"model\.dtype = 'float32'.* has 'float64'"),
        ({"model__config__rms_norm_eps": 1e-5}, r"rms_norm_eps = None.* has 1e-05"),
        ({"seed": 5}, r"seed = 0.* has 5"),
        ({"trees_per_step": 3}, "trees_per_step"),
        ({"batch": rollouts(seed=1)}, "other trajectories"),
        ({"steps": 1}, "has 4 steps done"),
    ],
)
def test_going_on_with_another_model_or_other_data_is_refused(whole, tmp_path, changes, words):
    saved = str(whole[1].checkpoint)
    with pytest.raises(InputError, match=words):
        run(tmp_path, resume=saved, **changes)
    assert not (tmp_path / "run").exists()


def test_what_shapes_only_later_steps_may_change(tmp_path):
    run(tmp_path, steps=2)
    report = run(tmp_path, steps=3, optimizer__learning_rate=1e-4)
    assert [m.learning_rate for m in report.metrics] == [3e-3, 3e-3, 1e-4]


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_lives(tmp_path):
    class Second(Silent):
        def step_done(self, _metrics) -> None:
            with pytest.raises(InputError, match="another run is writing"):
                run(tmp_path)
            self.steps.append(_metrics)

    observer = Second()
    train(config(tmp_path, steps=1), observer)
    assert len(observer.steps) == 1


def test_good_tries_become_likelier_than_bad_ones(tmp_path):
    metrics = run(tmp_path, steps=8, optimizer__learning_rate=2e-2, trees_per_step=3).metrics
    assert abs(metrics[0].margin) < 0.1
    assert metrics[-1].margin > metrics[0].margin + 0.5


def test_microbatches_and_replicas_change_neither_loss_nor_gradient(tmp_path):
    changes = {"router__load_balancing_coefficient": 0.0, "model__dtype": "float64"}
    one = run(tmp_path, steps=2, plan__capacity=4096, **changes)
    many = run(tmp_path, steps=2, plan__capacity=100, plan__replicas=2, resume="never", **changes)
    assert one.metrics[0].microbatches == 1
    assert many.metrics[0].microbatches > 2
    for a, b in zip(one.metrics, many.metrics, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-9, abs=1e-12)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-9)
        assert b.logprob_above == pytest.approx(a.logprob_above, rel=1e-9)


def test_recomputation_changes_no_number(tmp_path, whole):
    report = run(tmp_path, recompute="selective")
    for a, b in zip(report.metrics, whole[1].metrics, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)


def test_every_tree_is_drawn_once_an_epoch():
    data = TrainingData.of(rollouts(trees=5, tries=2), GRPO())
    sampler = TreeSampler(data=data, trees_per_step=2, seed=3)
    steps = [sampler.rows(step) for step in range(6)]
    assert sampler.steps_per_epoch == 3
    assert [len(rows) for rows in steps] == [4, 4, 2] * 2
    for epoch in (steps[:3], steps[3:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(10))
    assert any(a.tolist() != b.tolist() for a, b in zip(steps[:3], steps[3:], strict=True))


def test_trees_without_a_reward_are_left_out():
    batch = rollouts(trees=3, tries=2)
    rewards = np.array([1.0, 0.0, np.nan, np.nan, np.nan, 1.0])
    data = TrainingData.of(dataclasses.replace(batch, rewards=rewards), GRPO())
    assert [rows.tolist() for rows in data.trees] == [[0, 1], [4, 5]]
    assert data.unusable_trees == 1
    with pytest.raises(InputError, match="reward"):
        TrainingData.of(dataclasses.replace(batch, rewards=np.full(6, np.nan)), GRPO())


@pytest.mark.parametrize(
    "column", ["tokens", "rewards", "loss_mask", "tree_ids", "logprobs", "advantages"]
)
def test_the_fingerprint_of_the_data_sees_every_column(column):
    batch = rollouts()
    changed = {
        "tokens": np.where(np.arange(batch.raw_tokens) == 7, 1 + batch.tokens, batch.tokens),
        "rewards": batch.rewards[::-1].copy(),
        "loss_mask": batch.loss_mask & (np.arange(batch.raw_tokens) != 7),
        "tree_ids": tuple(f"x{t}" for t in batch.tree_ids),
        "logprobs": np.zeros(batch.raw_tokens, np.float32),
        "advantages": np.ones(batch.raw_tokens, np.float32),
    }
    other = dataclasses.replace(batch, **{column: changed[column]})
    prints = {TrainingData.of(b, GRPO()).fingerprint() for b in (batch, other, rollouts())}
    assert len(prints) == 2


def test_a_trajectory_longer_than_the_capacity_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(PlanError, match=r"row 0.* 82 tokens.*plan\.capacity"):
        run(tmp_path, plan__capacity=81)
    assert not (tmp_path / "run").exists()


def test_a_token_beyond_the_vocabulary_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(InputError, match="vocabulary size 32"):
        run(tmp_path, model__config__vocab_size=32)
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "clip_gradients", lambda *_: float("nan"))
    trainer = start(tmp_path)
    before = trainer.model.lm_head.weight.detach().clone()
    with pytest.raises(TrainingError, match=r"step 1: .*learning_rate"):
        trainer._step(0, Silent())
    assert torch.equal(before, trainer.model.lm_head.weight)


def test_an_update_that_breaks_a_weight_stops_the_run_before_a_checkpoint(tmp_path):
    changes = {"optimizer__learning_rate": 1e3, "optimizer__weight_decay": 1e99}
    with pytest.raises(TrainingError, match=r"step 1: .*infinite or NaN.*learning_rate"):
        run(tmp_path, checkpoint_every=1, **changes)
    assert checkpoints(tmp_path / "run" / "checkpoints") == []


def test_the_comparison_measures_both_ways_on_the_same_step(tmp_path):
    trainer = start(tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    step = trainer.compared_step()
    times = time_step(trainer.policy, step, 1, lambda _: None)
    assert times.shared_plan.raw_tokens == times.trajectory_wise_plan.objective.total_work
    assert times.shared_plan.objective.total_work < times.shared_plan.raw_tokens
    fidelity = measure_fidelity(trainer.model, step, 400, lambda _: None)
    assert fidelity.compact_tokens < fidelity.tokens
    assert 0 <= fidelity.logprob < 1e-12
    assert 0 < fidelity.gradient < 1e-9
    assert all(p.grad is None for p in trainer.model.parameters())
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_comparison_sees_a_wrong_convolution(tmp_path, monkeypatch):
    import harts.models.linear_attention as family

    right = family.tree_causal_convolution

    def shifted(x, *args, **kwargs):
        return right(x.roll(1, 0), *args, **kwargs)

    trainer = start(tmp_path)
    monkeypatch.setattr(family, "tree_causal_convolution", shifted)
    fidelity = measure_fidelity(trainer.model, trainer.compared_step(), 400, lambda _: None)
    assert not fidelity.passed
    assert not dataclasses.replace(fidelity, logprob=0.0, gradient=float("nan")).passed
    assert fidelity.logprob > 1e-6
    assert fidelity.gradient > 1e-3


def test_a_run_leaves_what_it_promises(tmp_path):
    report = run(tmp_path, steps=2, comparison={"repeats": 1, "tokens": 400})
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "loss.png", "tensorboard", "checkpoints"} <= names
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    values = summary(report)
    steps = [6, 3]  # trajectories: two of the three trees, then the one that is left
    assert values["tokens_before_sharing"] == sum(n * 82 for n in steps)
    assert values["tokens_after_sharing"] == sum(n // 3 * 70 + n * 12 for n in steps)
    assert values["largest_gradient_difference"] < 1e-9
    assert values["fidelity_passed"] is True
    assert final_table(report).row_count > 10
    assert ComparisonConfig().enabled


def test_data_columns_of_the_behaviour_policy_enter_the_loss(tmp_path):
    batch = rollouts()
    low = dataclasses.replace(batch, logprobs=np.full(batch.raw_tokens, -4.0, np.float32))
    metrics = run(tmp_path, low, steps=1).metrics[0]
    assert metrics.objective["ratio"] == pytest.approx(np.exp(-4.16 + 4.0), rel=0.1)
    assert Checkpoint.open(checkpoints(tmp_path / "run" / "checkpoints")[-1]).step == 1
