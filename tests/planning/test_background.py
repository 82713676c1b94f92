"""Planning in another process: same plans, errors passed on, nothing left behind."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harts.errors import HartsError, InputError, PlanError
from harts.planning import background
from harts.planning.background import (
    MOST_OPEN,
    BackgroundPlanner,
    BackgroundPlanningError,
    PlanningCancelledError,
)
from harts.planning.messages import pack, unpack
from harts.planning.step import StepPlan, plan_step
from harts.trajectories import TrajectoryBatch
from harts.trajectories.record import Provenance
from tests.forests import batch_of, random_batch

PATIENCE = 60.0
"""Seconds after which a plan of a few tokens counts as lost, on a busy machine too."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def shared_planner() -> Iterator[BackgroundPlanner]:
    """One for all tests that leave its worker alive: starting one takes a while."""
    with BackgroundPlanner() as planner:
        yield planner


def tiny() -> TrajectoryBatch:
    return batch_of([[1, 2, 3], [1, 2, 4], [5, 6]])


def content(plan: StepPlan) -> dict[str, object]:
    return {k: v for k, v in plan.to_json().items() if k != "timings_s"}


def alive(process: int) -> bool:
    """Whether a child of this process runs; a dead one is not even a zombie any more."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def runs(process: int) -> bool:
    """Whether any process runs; one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(number) for number in listed}


def test_plans_equal_those_made_here(shared_planner: BackgroundPlanner) -> None:
    rng = np.random.default_rng(0)
    for i in range(12):
        batch = random_batch(rng, trajectories=6)
        options = {
            "replicas": 4 if i % 2 else 2,
            "capacity": int(batch.lengths.max()) + 30,
            "chunk_size": 4,
            "share": i % 3 > 0,
            "fillers": True,
        }
        made = shared_planner.submit(batch, **options).result(PATIENCE)
        here = plan_step(batch, **options)
        assert content(made) == content(here)
        for a, b in zip(made.microbatches, here.microbatches, strict=True):
            assert a.calls == b.calls
            for name in ("members", "lengths", "lcp", "segment_member"):
                x, y = getattr(a.forest, name), getattr(b.forest, name)
                assert x.dtype == y.dtype
                assert np.array_equal(x, y)
                assert x.flags.writeable


def test_identity_keys_reach_the_worker(shared_planner: BackgroundPlanner) -> None:
    batch = batch_of([[1, 2], [1, 2]], identity=[[0, 1], [0, 2]])
    plan = shared_planner.submit(batch, replicas=1, capacity=10).result(PATIENCE)
    assert plan.merged_tokens == 3


def test_jobs_end_in_order_and_their_results_may_be_taken_in_any(
    shared_planner: BackgroundPlanner,
) -> None:
    batches = [batch_of([[i, i + 1, i + 2][: 1 + i % 3]]) for i in range(8)]
    handles = [shared_planner.submit(b, replicas=1, capacity=10) for b in batches]
    assert handles[-1].result(PATIENCE).raw_tokens == batches[-1].raw_tokens
    assert all(handle.done() for handle in handles)
    for handle, batch in zip(handles, batches, strict=True):
        assert handle.result().raw_tokens == batch.raw_tokens
        assert handle.result() is handle.result()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"replicas": 1, "capacity": 2}, PlanError),
        ({"replicas": 5, "capacity": 10}, PlanError),
        ({"replicas": 1, "capacity": 10, "planner": "fast"}, InputError),
    ],
)
def test_an_error_of_planning_keeps_its_type_and_message(
    shared_planner: BackgroundPlanner, options: dict[str, object], kind: type[HartsError]
) -> None:
    batch = dataclasses.replace(tiny(), provenance=Provenance.single("a.jsonl", 3))
    with pytest.raises(kind) as here:
        plan_step(batch, **options)  # type: ignore[arg-type]
    with pytest.raises(kind) as there:
        shared_planner.submit(batch, **options).result(PATIENCE)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)


def test_any_other_error_is_wrapped_and_the_worker_goes_on(
    shared_planner: BackgroundPlanner,
) -> None:
    handle = shared_planner.submit(tiny(), replicas="two", capacity=10)
    with pytest.raises(BackgroundPlanningError, match=r"unexpectedly: TypeError: .*plan_step") as e:
        handle.result(PATIENCE)
    assert "in plan_step" in e.value.__notes__[0]
    process = shared_planner.process_id
    assert shared_planner.submit(tiny(), replicas=1, capacity=10).result(PATIENCE).slots == 1
    assert shared_planner.process_id == process


@linux
def test_the_worker_loads_planning_but_no_torch(shared_planner: BackgroundPlanner) -> None:
    import torch  # noqa: F401  (this process has it, so a fork would as well)

    shared_planner.submit(tiny(), replicas=1, capacity=10).result(PATIENCE)
    mapped = Path(f"/proc/{shared_planner.process_id}/maps").read_text()
    assert "numpy" in mapped
    assert "torch" not in mapped
    assert "torch" in Path("/proc/self/maps").read_text()


def test_a_script_without_a_main_guard_may_use_it(tmp_path: Path) -> None:
    """The worker must not import the caller's main module, which would start yet another one."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "print('main')\n"
        "from harts.planning.background import BackgroundPlanner\n"
        "from harts.trajectories import TrajectoryBatch\n"
        "with BackgroundPlanner() as planner:\n"
        "    batch = TrajectoryBatch.from_flat([1, 2, 3], [0, 3])\n"
        "    print(planner.submit(batch, replicas=1, capacity=9).result().raw_tokens)\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (run.stdout, run.stderr) == ("main\n3\n", "")


# Waiting, cancelling, dying


@pytest.fixture
def stopped() -> Iterator[BackgroundPlanner]:
    """A planner whose worker is stopped: whatever it is given takes forever."""
    with BackgroundPlanner() as planner:
        planner.submit(tiny(), replicas=1, capacity=10).result(PATIENCE)
        assert planner.process_id is not None
        os.kill(planner.process_id, signal.SIGSTOP)
        yield planner


def test_a_result_that_takes_too_long_times_out_and_can_be_waited_for_again(
    stopped: BackgroundPlanner,
) -> None:
    handle = stopped.submit(tiny(), replicas=1, capacity=10)
    assert not handle.done()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        handle.result(0.05)
    assert stopped.process_id is not None
    os.kill(stopped.process_id, signal.SIGCONT)
    assert handle.result(PATIENCE).raw_tokens == 8
    assert handle.done()
    assert not handle.cancel(), "it has ended"


def test_cancelling_kills_the_computation_and_other_jobs_go_on(stopped: BackgroundPlanner) -> None:
    first = stopped.submit(tiny(), replicas=1, capacity=10)
    second = stopped.submit(tiny(), replicas=3, capacity=10)
    process = stopped.process_id
    assert process is not None
    assert first.cancel()
    assert not alive(process)
    assert first.done()
    with pytest.raises(PlanningCancelledError):
        first.result()
    assert not first.cancel()
    assert second.result(PATIENCE).replicas == 3
    assert stopped.process_id != process


def test_a_waiting_job_can_be_cancelled_and_the_one_before_it_ends(
    stopped: BackgroundPlanner,
) -> None:
    first = stopped.submit(tiny(), replicas=1, capacity=10)
    second = stopped.submit(tiny(), replicas=3, capacity=10)
    assert second.cancel()
    assert first.result(PATIENCE).replicas == 1


def test_cancelling_the_only_job_leaves_no_worker_until_the_next(
    stopped: BackgroundPlanner,
) -> None:
    assert stopped.submit(tiny(), replicas=1, capacity=10).cancel()
    assert stopped.process_id is None
    assert stopped.submit(tiny(), replicas=1, capacity=10).result(PATIENCE).raw_tokens == 8


def test_a_killed_worker_fails_the_job_it_was_at_and_only_that(stopped: BackgroundPlanner) -> None:
    first = stopped.submit(tiny(), replicas=1, capacity=10)
    second = stopped.submit(tiny(), replicas=3, capacity=10)
    assert stopped.process_id is not None
    os.kill(stopped.process_id, signal.SIGKILL)
    with pytest.raises(BackgroundPlanningError, match=r"signal SIGKILL.*memory.*plan_step"):
        first.result(PATIENCE)
    assert second.result(PATIENCE).replicas == 3


def test_a_worker_killed_between_jobs_is_replaced(stopped: BackgroundPlanner) -> None:
    process = stopped.process_id
    assert process is not None
    os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    assert stopped.submit(tiny(), replicas=1, capacity=10).result(PATIENCE).raw_tokens == 8
    assert not alive(process)


def test_a_worker_that_cannot_start_is_an_error_and_no_endless_loop(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with BackgroundPlanner() as planner:
        handles = [planner.submit(tiny(), replicas=1, capacity=10) for _ in range(2)]
        for handle in handles:
            with pytest.raises(BackgroundPlanningError, match="exit status 1"):
                handle.result(PATIENCE)
    assert "ModuleNotFoundError" in capfd.readouterr().err


def test_no_process_to_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(background.subprocess, "Popen", refuse)
    with BackgroundPlanner() as planner:
        handle = planner.submit(tiny(), replicas=1, capacity=10)
        with pytest.raises(BackgroundPlanningError, match=r"Resource temporarily.*plan_step"):
            handle.result(PATIENCE)


def test_too_many_open_jobs_are_refused(stopped: BackgroundPlanner) -> None:
    for _ in range(MOST_OPEN):
        stopped.submit(tiny(), replicas=1, capacity=10)
    with pytest.raises(BackgroundPlanningError, match="are open already"):
        stopped.submit(tiny(), replicas=1, capacity=10)


def test_leaving_cancels_what_is_open_and_ends_the_process(stopped: BackgroundPlanner) -> None:
    handle = stopped.submit(tiny(), replicas=1, capacity=10)
    process = stopped.process_id
    assert process is not None
    stopped.close()
    assert not alive(process)
    with pytest.raises(PlanningCancelledError, match="closed"):
        handle.result()
    with pytest.raises(BackgroundPlanningError, match="closed"):
        stopped.submit(tiny(), replicas=1, capacity=10)
    stopped.close()


@linux
def test_nothing_is_left_behind() -> None:
    def left() -> tuple[int, set[int], set[str]]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), children(), set(os.listdir("/dev/shm"))

    def use() -> None:
        with BackgroundPlanner() as planner:
            planner.submit(tiny(), replicas=1, capacity=10).result(PATIENCE)
            with pytest.raises(PlanError):
                planner.submit(tiny(), replicas=1, capacity=1).result(PATIENCE)
            planner.submit(tiny(), replicas=1, capacity=10).cancel()
            assert planner.process_id is None or alive(planner.process_id)
            planner.submit(tiny(), replicas=1, capacity=10)
            raise KeyboardInterrupt

    before = left()
    with pytest.raises(KeyboardInterrupt):
        use()
    assert left() == before


@linux
def test_a_worker_ends_when_its_caller_is_killed() -> None:
    program = (
        "import os, sys, signal\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from harts.planning.background import BackgroundPlanner\n"
        "from harts.trajectories import TrajectoryBatch\n"
        "planner = BackgroundPlanner()\n"
        "batch = TrajectoryBatch.from_flat([1, 2, 3], [0, 3])\n"
        "planner.submit(batch, replicas=1, capacity=9).result()\n"
        "print(planner.process_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    worker = int(run.stdout)
    deadline = time.monotonic() + PATIENCE
    while runs(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Messages


def test_a_message_gives_back_its_value_with_mapped_arrays() -> None:
    value = {
        "odd": np.arange(7, dtype=np.int8),
        "large": np.arange(100_003, dtype=np.int32),
        "empty": np.empty(0, np.float64),
        "strided": np.arange(10)[::3],
        "plain": [None, "text", 1 << 80],
    }
    with pack(value) as file:
        found = unpack(file.fileno())
    gc.collect()
    for name in ("odd", "large", "empty", "strided"):
        assert np.array_equal(found[name], value[name])
        assert found[name].dtype == value[name].dtype
        assert found[name].flags.aligned
    assert found["plain"] == value["plain"]
    assert not found["large"].flags.owndata
    found["large"][0] = 9  # a private copy of that page


def test_a_message_that_does_not_fit_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Full:
        def write(self, _data: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr("harts.planning.messages._nameless_file", Full)
    with BackgroundPlanner() as planner:
        with pytest.raises(BackgroundPlanningError, match="No space left"):
            planner.submit(tiny(), replicas=1, capacity=10)
        assert planner.process_id is None
    assert closed == [True]
