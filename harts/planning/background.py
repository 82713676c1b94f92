"""Plan a step in another process while this one trains.

    with BackgroundPlanner() as planner:
        ahead = planner.submit(batch, replicas=4, capacity=65536)
        train_the_step_before()
        plan = ahead.result()

The worker is a fresh interpreter that imports planning and nothing else: no torch, and nothing of
the caller's main module. It keeps nothing between jobs, so the way to cancel one is to kill it.

A planner and its handles belong to one thread.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import time
import traceback
from types import TracebackType
from typing import IO, Any, Self

from harts.errors import HartsError
from harts.planning.messages import pack, receive, send
from harts.planning.step import StepPlan, plan_step
from harts.trajectories import TrajectoryBatch

MOST_OPEN = 64
"""Jobs that may be open at a time; each holds a copy of its tokens."""


class BackgroundPlanningError(HartsError):
    """The planning process failed in a way that trajectories and settings do not explain."""


class PlanningCancelledError(HartsError):
    """The result of a job was asked for after it was cancelled."""


class PlanHandle:
    """A plan in the making, from `BackgroundPlanner.submit`."""

    def __init__(self, planner: "BackgroundPlanner", number: int, message: IO[bytes]) -> None:
        self._planner = planner
        self._outcome: StepPlan | HartsError | None = None
        self.number = number
        self.message = message

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        self._planner._advance(self, 0.0)
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> StepPlan:
        """Wait for the plan, at most ``timeout`` seconds.

        Raises:
            HartsError: what `plan_step` raised in the worker, with its own type and message.
            BackgroundPlanningError: the worker died or failed in another way.
            PlanningCancelledError: the job was cancelled, or its planner was closed.
            TimeoutError: no plan yet; the job goes on.
        """
        self._planner._advance(self, timeout)
        if self._outcome is None:
            raise TimeoutError(f"no plan after {timeout} s; wait longer or cancel it")
        if isinstance(self._outcome, HartsError):
            raise self._outcome
        return self._outcome

    def cancel(self) -> bool:
        """Stop the computation; False if it had ended. The planner's other jobs go on."""
        if self.done():
            return False
        self._planner._drop(self, PlanningCancelledError("this plan was cancelled"))
        return True

    def _settle(self, outcome: StepPlan | HartsError) -> None:
        self._outcome = outcome
        self.message.close()


class BackgroundPlanner:
    """A process that plans jobs one after the other, started with the first.

    A context manager: leaving it stops the process and cancels the jobs that are still open.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._open: list[PlanHandle] = []
        """Jobs without an outcome; the worker has all of them and is at the first."""
        self._submitted = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process_id(self) -> int | None:
        """The worker's process, None while there is none."""
        return None if self._worker is None else self._worker.process.pid

    def submit(self, batch: TrajectoryBatch, **options: Any) -> PlanHandle:
        """Begin to plan ``batch``; ``options`` are the keyword arguments of `plan_step`.

        What planning needs of the batch is copied here.

        Raises:
            BackgroundPlanningError: the planner is closed, has too many open jobs, or has no memory
                for the copy.
        """
        if self._closed:
            raise BackgroundPlanningError("this planner is closed; make another BackgroundPlanner")
        self._advance(None, 0.0)
        if len(self._open) >= MOST_OPEN:
            raise BackgroundPlanningError(
                f"{MOST_OPEN} plans are open already; take their results or cancel them first"
            )
        columns = {
            "tokens": batch.tokens,
            "offsets": batch.offsets,
            "identity": batch.identity,
            "provenance": batch.provenance,
        }
        try:
            handle = PlanHandle(self, self._submitted, pack((columns, options)))
        except OSError as error:
            raise _no_resources(error) from error
        self._submitted += 1
        self._open.append(handle)
        self._hand_over([handle])
        return handle

    def close(self) -> None:
        """Stop the process; open jobs are cancelled. Closing twice is once."""
        self._closed = True
        self._stop_worker()
        for handle in self._open:
            handle._settle(PlanningCancelledError("the planner was closed before this plan ended"))
        self._open = []

    def _advance(self, handle: PlanHandle | None, timeout: float | None) -> None:
        """Take outcomes until ``handle`` has one or ``timeout`` is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._worker is not None and (handle is None or handle in self._open):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._worker.channel.settimeout(left)
            try:
                message = receive(self._worker.channel)
            except (TimeoutError, BlockingIOError):
                return
            if message is None:
                self._worker_died()
                continue
            number, outcome = message
            (done,) = (h for h in self._open if h.number == number)
            self._open.remove(done)
            done._settle(outcome)

    def _drop(self, handle: PlanHandle, outcome: HartsError) -> None:
        """Settle a job that the worker has, and give the others to a new worker."""
        self._stop_worker()
        self._open.remove(handle)
        handle._settle(outcome)
        self._hand_over(self._open)

    def _worker_died(self) -> None:
        """The job that the worker was at fails; it may have been what killed it."""
        assert self._worker is not None
        how = self._worker.how_it_ended()
        if not self._open:
            self._stop_worker()
            return
        error = BackgroundPlanningError(
            f"the planning process ended by {how} before it had a plan. If memory ran out, plan "
            "fewer trajectories at a time; to plan without another process, use plan_step, or "
            "plan.background=false in a training configuration."
        )
        self._drop(self._open[0], error)

    def _hand_over(self, handles: list[PlanHandle]) -> None:
        """Give jobs to the worker; where none can be started they fail."""
        if handles and self._worker is None:
            try:
                self._worker = _Worker()
            except OSError as error:
                for handle in self._open:
                    handle._settle(_no_resources(error))
                self._open = []
                return
        for handle in handles:
            assert self._worker is not None
            self._worker.channel.settimeout(None)
            # A worker that is gone is noticed when outcomes are taken.
            with contextlib.suppress(ConnectionError):
                send(self._worker.channel, handle.number, handle.message)

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def _no_resources(error: OSError) -> BackgroundPlanningError:
    return BackgroundPlanningError(
        f"cannot plan in another process: {error.strerror}. Free memory, or plan in this one: "
        "plan_step, or plan.background=false in a training configuration."
    )


class _Worker:
    """A process that serves jobs from a socket."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        program = (
            "import sys; sys.path[:] = sys.argv[2:]; "
            "from harts.planning.background import serve; serve(int(sys.argv[1]))"
        )
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the caller, who then stops this process.
                start_new_session=True,
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    def how_it_ended(self) -> str:
        """The cause of an end that has begun."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.poll()
        if code is None:
            return "closing its socket"
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def stop(self) -> None:
        """End the process, whatever it is at, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.channel.close()


def serve(descriptor: int) -> None:
    """Plan jobs from a socket until its other end is closed: the worker's program."""
    with socket.socket(fileno=descriptor) as channel:
        while (job := receive(channel)) is not None:
            number, (columns, options) = job
            with pack(_outcome(columns, options)) as message:
                try:
                    send(channel, number, message)
                except ConnectionError:
                    return


def _outcome(columns: dict[str, Any], options: dict[str, Any]) -> StepPlan | HartsError:
    try:
        return plan_step(TrajectoryBatch.from_flat(**columns), **options)
    except HartsError as error:
        return error
    except Exception as error:
        wrapped = BackgroundPlanningError(
            f"planning failed unexpectedly: {type(error).__name__}: {error}. Plan the same "
            "trajectories with plan_step, or with plan.background=false in a training "
            "configuration, to see where."
        )
        wrapped.add_note("In the planning process:\n" + traceback.format_exc())
        return wrapped
