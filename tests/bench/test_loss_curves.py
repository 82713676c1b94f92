"""``benchmarks/loss_curves.py``: what it holds against what, and that it runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import loss_curves
from harts.errors import InputError
from harts.models import prepare
from harts.models.families import family_named
from tests.forests import batch_of

ROOT = Path(__file__).resolve().parents[2]


def test_each_curve_is_held_against_the_other_trajectory_wise_ones() -> None:
    curves = {"compact": np.full(4, 2.0), "a": np.zeros(4), "b": np.ones(4), "c": np.full(4, 5.0)}
    found = loss_curves.deviations(curves)
    assert found == pytest.approx({"compact": 0.0, "a": 3.0, "b": 1.5, "c": 4.5})


def test_only_trees_whose_rewards_differ_are_trained_on() -> None:
    batch = batch_of(
        [[1, 2, 3], [1, 2, 4], [5, 6], [5, 7]],
        tree_ids=["same", "same", "other", "other"],
        rewards=[1.0, 1.0, 0.0, 1.0],
    )
    assert [tree.tree_ids[0] for tree in loss_curves.steps_of(batch, 3)] == ["other"] * 3
    with pytest.raises(InputError, match="no tree"):
        loss_curves.steps_of(batch.select(np.arange(2)), 3)


def test_bfloat16_weights_follow_float32_ones() -> None:
    """A step is lost to rounding in most weights of bfloat16; thirty together are not."""
    tree = batch_of([[1, 2, 3], [1, 2, 4]], tree_ids=["a", "a"], rewards=[0.0, 1.0])
    policy = prepare(family_named("qwen3").small_model(50).bfloat16())
    before = [p.detach().clone() for p in policy.parameters()]
    targets = loss_curves.targets_of(policy, [tree], 16)
    loss_curves.train(policy, [tree] * 30, targets * 30, 16, True, 1e-5)
    moved = sum(int((p != b).sum()) for p, b in zip(policy.parameters(), before, strict=True))
    whole = sum(b.numel() for b in before)
    assert moved > 0.3 * whole


def test_two_small_steps_run_in_every_way(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(loss_curves.main)
    figures, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    options = {
        "--data": ROOT / "examples/rollouts.jsonl",
        "--model": "small",
        "--device": "cpu",
        "--steps": 2,
        "--capacity": 1_024,
        "--json": figures,
        "--plot": picture,
    }
    words = [str(word) for pair in options.items() for word in pair]
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (0, 1), result.output
    report = json.loads(figures.read_text())
    losses = np.array(list(report["losses"].values()))
    assert losses.shape == (4, 2)
    assert np.abs(losses - losses[0]).max() < 1e-4
    assert np.abs(losses).max() > 1e-3, "a loss that says nothing"
    assert picture.read_bytes().startswith(b"\x89PNG")
