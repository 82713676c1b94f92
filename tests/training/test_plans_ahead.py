"""Plans made while the step before trains: they change no number, and fillers train through."""

import os
from pathlib import Path

import numpy as np
import pytest

from harts.errors import PlanError
from harts.planning.background import BackgroundPlanner, PlanHandle
from harts.training import loop
from harts.training.metrics import StepMetrics
from harts.training.run import train
from harts.trajectories import TrajectoryBatch
from tests.training.runs import Silent, config, curve, rollouts, run


def weights(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[PlanHandle]:
    """What a run submits, in order, with every plan worth a process."""
    handles: list[PlanHandle] = []
    submit = BackgroundPlanner.submit

    def recorded(self: BackgroundPlanner, *args: object, **options: object) -> PlanHandle:
        handles.append(submit(self, *args, **options))
        return handles[-1]

    monkeypatch.setattr(BackgroundPlanner, "submit", recorded)
    monkeypatch.setattr(loop, "WORTH_A_PROCESS_S", 0.0)
    return handles


def test_a_run_and_its_resumption_equal_a_run_without_background_planning(
    tmp_path: Path, submitted: list[PlanHandle]
) -> None:
    here = run(tmp_path, steps=3, plan__background=False)
    assert submitted == []
    run(tmp_path, steps=1, resume="never")
    ahead = run(tmp_path, steps=3)
    assert len(submitted) == 1, "the plan of step 3, while step 2 trained"
    assert curve(ahead.metrics) == curve(here.metrics)
    assert weights(ahead.checkpoint) == weights(
        tmp_path / "run.1" / "checkpoints" / here.checkpoint.name
    )


def test_the_next_plan_is_begun_before_a_step_trains_and_no_process_is_left(
    tmp_path: Path, submitted: list[PlanHandle]
) -> None:
    begun: list[int] = []
    processes: set[int | None] = set()

    class Watching(Silent):
        def planned(self, _step: int, _plan: object) -> None:
            begun.append(len(submitted))

        def step_done(self, metrics: StepMetrics) -> None:
            super().step_done(metrics)
            processes.add(submitted[-1]._planner.process_id)

    train(config(tmp_path, steps=3), Watching())
    assert begun == [1, 2, 2], "the last step has no next one"
    (process,) = processes
    assert process is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_quick_plans_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WORTH_A_PROCESS_S", 60.0)
    monkeypatch.setattr(BackgroundPlanner, "submit", None)
    assert len(run(tmp_path, steps=2).metrics) == 2


def uneven() -> TrajectoryBatch:
    """A tree of three trajectories and one of two."""
    return rollouts(trees=2, tries=3).select(np.arange(5))


@pytest.mark.parametrize("background", [True, False])
def test_a_step_that_cannot_be_planned_stops_the_run_with_the_way_out(
    tmp_path: Path,
    submitted: list[PlanHandle],
    background: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Steps after the first epoch are not all planned before the run.
    monkeypatch.setattr(loop, "check_steps", lambda *_: None)
    changes = {"plan__replicas": 3, "trees_per_step": 1, "plan__background": background}
    with pytest.raises(PlanError, match=r"2 trajectories cannot fill 3.*plan\.fillers=true"):
        run(tmp_path, uneven(), steps=4, **changes)
    assert bool(submitted) == background


def test_fillers_change_no_loss_and_train_through(
    tmp_path: Path, submitted: list[PlanHandle]
) -> None:
    changes = {"trees_per_step": 1, "steps": 2, "model__dtype": "float64"}
    changes |= {"router__load_balancing_coefficient": 0.0}
    one = run(tmp_path, uneven(), plan__replicas=1, **changes)
    many = run(tmp_path, plan__replicas=5, plan__fillers=True, resume="never", **changes)
    assert submitted
    assert [m.microbatches for m in many.metrics] == [5, 5]
    for a, b in zip(one.metrics, many.metrics, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-9, abs=1e-12)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-9)
        assert b.expert_load == a.expert_load
