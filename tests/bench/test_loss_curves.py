"""``benchmarks/loss_curves.py``: what it holds against what, and that it runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import loss_curves

ROOT = Path(__file__).resolve().parents[2]


def test_each_curve_is_held_against_the_other_trajectory_wise_ones() -> None:
    curves = {"compact": np.full(4, 2.0), "a": np.zeros(4), "b": np.ones(4), "c": np.full(4, 5.0)}
    found = loss_curves.deviations(curves)
    assert found == pytest.approx({"compact": 0.0, "a": 3.0, "b": 1.5, "c": 4.5})


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
