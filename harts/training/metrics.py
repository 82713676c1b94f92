"""What each step measured, and the files it goes to: JSON lines and TensorBoard.

Shapes: P semantic log-prob positions · E experts.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from harts.errors import InputError
from harts.objectives import StepTargets
from harts.planning.step import StepPlan
from harts.training.checkpoint import write_whole, writing
from harts.training.step import StepOutcome

FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl; everything but ``seconds`` repeats exactly with the same seed."""

    step: int
    """Steps done, this one included."""
    epoch: float
    """Passes over all trees, this step included."""
    learning_rate: float
    loss: float
    policy_loss: float
    z_loss: float
    load_balancing_loss: float
    grad_norm: float
    """Before clipping."""
    objective: dict[str, float]
    """What the objective measured, such as ratio and clip_fraction."""
    logprob_above: float | None
    """Mean log-prob of the tokens of better-than-average tries, before this step's update."""
    logprob_below: float | None
    """The same of worse-than-average tries."""
    trajectories: int
    raw_tokens: int
    """Tokens with each trajectory alone."""
    compact_tokens: int
    """Tokens that were computed, replay aside."""
    replay_tokens: int
    """Tokens that linear attention computed a second time, to resume at chunk bounds."""
    microbatches: int
    calls: int
    """Packed linear-attention calls of one layer, over all microbatches."""
    expert_load: float | None
    """Tokens of the busiest expert over the mean, worst layer; 1 is perfect balance."""
    seconds: float
    """Wall clock of the whole step."""

    @property
    def margin(self) -> float | None:
        """How much likelier the tokens of good tries are than those of bad ones, in nats."""
        if self.logprob_above is None or self.logprob_below is None:
            return None
        return self.logprob_above - self.logprob_below

    def as_mapping(self) -> dict[str, Any]:
        """The line of metrics.jsonl; null where a value is not finite or not defined."""
        values = dataclasses.asdict(self) | {"margin": self.margin}
        return {name: _finite(value) for name, value in values.items()}

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> "StepMetrics":
        """The record of a line."""
        return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})


def measure_step(
    plan: StepPlan, targets: StepTargets, outcome: StepOutcome, **rest: Any
) -> StepMetrics:
    """Put the metrics of a step together; `rest` are the fields that the loop knows."""
    return StepMetrics(
        loss=outcome.loss,
        policy_loss=outcome.policy_loss,
        z_loss=outcome.z_loss,
        load_balancing_loss=outcome.load_balancing_loss,
        objective=outcome.metrics,
        logprob_above=_mean(outcome.logprobs, targets.mask & (targets.advantages > 0)),
        logprob_below=_mean(outcome.logprobs, targets.mask & (targets.advantages < 0)),
        raw_tokens=plan.raw_tokens,
        compact_tokens=plan.objective.total_work,
        replay_tokens=sum(m.calls.replay_tokens for m in plan.microbatches),
        microbatches=len(plan.microbatches),
        calls=sum(len(m.calls.rounds) for m in plan.microbatches),
        expert_load=_worst_load(outcome.expert_counts),
        **rest,
    )


class MetricsLog:
    """Appends steps to metrics.jsonl and TensorBoard; a resumed run first drops later steps.

    Raises:
        CheckpointError: a file cannot be written.
    """

    def __init__(self, directory: Path, steps_done: int) -> None:
        self._path = directory / FILE
        self.records = [m for m in read_metrics(directory) if m.step <= steps_done]
        write_whole(self._path, "".join(_line(m) for m in self.records))
        with writing(self._path):
            self._file = self._path.open("a")
            self._board = SummaryWriter(directory / "tensorboard", purge_step=steps_done + 1)

    def append(self, metrics: StepMetrics) -> None:
        """Write one step; it survives the end of this process."""
        self.records.append(metrics)
        with writing(self._path):
            self._file.write(_line(metrics))
            self._file.flush()
            for name, value in _scalars(metrics.as_mapping()):
                self._board.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Flush and close both files."""
        with writing(self._path):
            self._file.close()
            self._board.close()


def read_metrics(directory: Path) -> list[StepMetrics]:
    """The steps of a run; a last line that a kill cut off is left out.

    Raises:
        InputError: a line before the last is not a step of metrics.
    """
    path = directory / FILE
    lines = path.read_text().splitlines() if path.is_file() else []
    records: list[StepMetrics] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(StepMetrics.from_mapping(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise InputError(
                f"file {str(path)!r}, line {number}: expected the metrics of a step; move the file "
                "away, or start afresh with resume=never"
            ) from error
    return records


def _line(metrics: StepMetrics) -> str:
    return json.dumps(metrics.as_mapping()) + "\n"


def _scalars(values: dict[str, Any]) -> list[tuple[str, float]]:
    flat = {k: v for k, v in values.items() if k not in ("step", "objective")}
    flat |= {f"objective/{k}": v for k, v in values["objective"].items()}
    return [(name, value) for name, value in flat.items() if value is not None]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(logprobs: Tensor, where: Tensor) -> float | None:
    return float(logprobs[where].double().mean()) if bool(where.any()) else None


def _worst_load(counts: tuple[Tensor, ...]) -> float | None:
    if not counts:
        return None
    load = torch.stack(list(counts)).double()
    return float((load.amax(1) / load.mean(1)).max())
