"""``harts fidelity``: what replay is worth, and how close compact logits are (paper, section 5.4).

Four executions of the same trajectories and weights: trajectory-wise (A, the reference);
trajectory-wise packed to another capacity (B: the same code repeats bit for bit, so other shapes
of matrix products stand for a rerun); compact with replay; and compact without, where each segment
starts from its parent's final state.

Shapes: S semantic positions · D model width · A vocabulary · k experts a token.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from harts.bench.step import TABLE_1_MODEL
from harts.checking import model_builder
from harts.errors import InputError
from harts.forest import PrefixForest
from harts.layout import CompactLayout, build_layout
from harts.models import TreePolicy, prepare
from harts.models.pinned_routing import pinned_routing, recorded_routing
from harts.ops.tree_index import TreeIndex
from harts.planning.calls import plan_without_replay
from harts.planning.step import StepPlan, plan_step
from harts.training.model import ModelConfig, Precision, build_model, load_model
from harts.trajectories import TrajectoryBatch

Progress = Callable[[str], None]
REFERENCE, RERUN, REPLAY, NO_REPLAY = "baseline A", "baseline B", "replay", "no replay"
_BLOCK_ROWS = 1_024
"""Positions whose logits are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthErrors:
    """Eq. 25 and 26 over the positions of one handoff depth, against baseline A."""

    depth: int
    positions: int
    symmetric_kl: dict[str, float]
    """Of each execution, mean over positions, in nats."""
    nll_difference: dict[str, float]
    """Mean |NLL difference| of the next token, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Everything ``harts fidelity`` measures."""

    depths: tuple[DepthErrors, ...]
    mean_cosine: dict[str, float]
    """Eq. 27 of each execution against baseline A."""


def load_policy(model: str, vocabulary: int, dtype: Precision, device: str) -> TreePolicy:
    """A prepared model: ``table-1``, a directory, or the small one of a model type.

    Raises:
        InputError: a directory that holds no whole model, or another device than cpu and cuda.
        UnsupportedError: no adapter for the model.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("no GPU was found; run on one, or give --device cpu")
    if model == "table-1":
        config = ModelConfig(model_type="bailing_hybrid", config=TABLE_1_MODEL, dtype=dtype)
        with torch.device(device):
            return prepare(build_model(config))
    if Path(model).is_dir():
        return prepare(load_model(Path(model), dtype).to(device))
    built = model_builder(model, 0)(vocabulary)
    return prepare(cast(PreTrainedModel, built.to(device, getattr(torch, dtype))))


def measure_replay(
    policy: TreePolicy,
    batch: TrajectoryBatch,
    *,
    capacity: int,
    experts: Sequence[Tensor] | None = None,
    progress: Progress,
) -> ReplayReport:
    """Run the four executions and compare every position's distribution.

    Args:
        policy: the prepared model, on any device.
        batch: the trajectories.
        capacity: T of baseline A and of the compact executions.
        experts: of `reference_experts`, so that tokens that change their experts under rounding do
            not drown the rest; where None, each execution chooses its own.
        progress: told what runs.
    """
    _check_predictions(batch)
    plans = plans_of(batch, capacity)
    hidden = {}
    with pinned_to(policy, batch, experts) as use:
        for name, plan in plans.items():
            progress(name)
            hidden[name], _ = _execute(policy, batch, plan, use)
    progress("comparing logits")
    depths = handoff_depths(batch, plans[REPLAY])
    return _compare(policy, batch, hidden.pop(REFERENCE), hidden, depths)


def plans_of(batch: TrajectoryBatch, capacity: int) -> dict[str, StepPlan]:
    """The four executions.

    Baseline B has half the capacity, so that its matrix products have other shapes; where a
    trajectory needs more, twice the capacity.
    """
    half = capacity // 2
    other = half if int(batch.lengths.max()) <= half else 2 * capacity
    shared = plan_step(batch, replicas=1, capacity=capacity)
    return {
        REFERENCE: plan_step(batch, replicas=1, capacity=capacity, share=False),
        RERUN: plan_step(batch, replicas=1, capacity=other, share=False),
        REPLAY: shared,
        NO_REPLAY: _without_replay(shared),
    }


def handoff_depths(batch: TrajectoryBatch, plan: StepPlan) -> Tensor:
    """[S] depth of each position's segment in its microbatch's tree; 0 in a root."""
    depths = np.zeros(batch.raw_tokens, np.int64)
    for microbatch in plan.microbatches:
        forest = microbatch.forest
        of_segment: list[int] = []
        for above in forest.segment_parent.tolist():
            of_segment.append(of_segment[above] + 1 if above >= 0 else 0)
        of_token = np.repeat(of_segment, forest.segment_lengths)
        for member, tokens in zip(forest.members.tolist(), forest.compact_map(), strict=True):
            depths[batch.offsets[member] : batch.offsets[member + 1]] = of_token[tokens]
    return torch.from_numpy(depths)


def _without_replay(plan: StepPlan) -> StepPlan:
    def calls(forest: PrefixForest) -> Any:
        segments = (forest.segment_parent, forest.segment_start, forest.segment_end)
        return plan_without_replay(*segments, plan.chunk_size)

    return dataclasses.replace(
        plan,
        microbatches=tuple(
            dataclasses.replace(m, calls=calls(m.forest)) for m in plan.microbatches
        ),
    )


@torch.no_grad()
def reference_experts(
    policy: TreePolicy, batch: TrajectoryBatch, *, capacity: int, progress: Progress
) -> list[Tensor]:
    """Experts [S, k], one a MoE layer, that baseline A gives to the first copy of each prefix.

    All copies of a prefix get the same ones, which no execution does by itself: copies in
    microbatches of other sizes differ by rounding, and a near tie then goes to other experts.
    """
    _check_predictions(batch)
    progress(f"routing of {REFERENCE}")
    plan = plans_of(batch, capacity)[REFERENCE]
    with pinned_to(policy, batch, None) as use:
        _, chosen = _execute(policy, batch, plan, use)
    first = first_copies(batch)
    return [experts[first.to(experts.device)] for experts in chosen]


def first_copies(batch: TrajectoryBatch) -> Tensor:
    """[S] the first position, in some fixed order, that shares each position's whole prefix."""
    forest = PrefixForest.build(batch)
    copies = np.concatenate(forest.compact_map())
    positions = _positions(batch, forest.members)
    _, first = np.unique(copies, return_index=True)
    found = np.empty(batch.raw_tokens, np.int64)
    found[positions] = positions[first[copies]]
    return torch.from_numpy(found)


@contextmanager
def pinned_to(
    policy: TreePolicy, batch: TrajectoryBatch, experts: Sequence[Tensor] | None
) -> Iterator[Callable[[CompactLayout], None]]:
    """`pinned_routing` to experts [S, k] of the positions of ``batch``; nothing where none."""
    if not experts:
        yield lambda _: None
        return

    def choose(layout: CompactLayout) -> list[Tensor]:
        at = torch.from_numpy(_positions(batch, layout.members)).to(experts[0].device)
        rows = torch.from_numpy(layout.member_rows).to(experts[0].device)
        return [_to_rows(e, at, rows, layout.rows) for e in experts]

    with pinned_routing(policy, choose) as use:
        yield use


@torch.no_grad()
def _execute(
    policy: TreePolicy,
    batch: TrajectoryBatch,
    plan: StepPlan,
    use: Callable[[CompactLayout], None],
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [S, D] after the final norm, in the order of the batch, and experts [S, k]."""
    device = policy.model.get_output_embeddings().weight.device
    hidden: Tensor | None = None
    chosen: list[Tensor] = []
    for microbatch in plan.microbatches:
        layout = build_layout(batch, microbatch.forest, microbatch.calls)
        use(layout)
        at = torch.from_numpy(_positions(batch, layout.members)).to(device)
        rows = torch.from_numpy(layout.member_rows).to(device)
        with recorded_routing(policy) as found:
            states = policy.hidden_states(TreeIndex.from_layout(layout, device))
        if hidden is None:
            hidden = states.new_empty((batch.raw_tokens, states.shape[1]))
            chosen = [e.new_empty((batch.raw_tokens, e.shape[1])) for e in found]
        hidden[at] = states[rows]
        for whole, part in zip(chosen, found, strict=True):
            whole[at] = part[rows]
    assert hidden is not None
    return hidden, chosen


def _check_predictions(batch: TrajectoryBatch) -> None:
    if batch.raw_tokens == len(batch):
        raise InputError("no trajectory has a second token: there is nothing that is predicted")


def _positions(batch: TrajectoryBatch, members: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places in the batch of all tokens of its trajectories ``members``, one after the other."""
    spans = [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in members.tolist()]
    return np.concatenate(spans)


def _to_rows(experts: Tensor, at: Tensor, rows: Tensor, count: int) -> Tensor:
    """Experts [S, k] of positions as experts of compact rows; copies of a row have the same."""
    of_rows = experts.new_zeros((count, experts.shape[1]))
    of_rows[:] = torch.arange(experts.shape[1], device=experts.device)
    of_rows[rows] = experts[at]
    return of_rows


@torch.no_grad()
def _compare(
    policy: TreePolicy,
    batch: TrajectoryBatch,
    reference: Tensor,
    others: dict[str, Tensor],
    depths: Tensor,
) -> ReplayReport:
    head = policy.model.get_output_embeddings()
    has_next = np.ones(batch.raw_tokens, np.bool_)
    has_next[batch.offsets[1:] - 1] = False
    at = torch.from_numpy(np.flatnonzero(has_next))
    following = torch.from_numpy(batch.tokens.astype(np.int64))[at + 1]
    sums = {name: torch.zeros(3, int(depths.max()) + 1, dtype=torch.float64) for name in others}
    for start in range(0, len(at), _BLOCK_ROWS):
        block = at[start : start + _BLOCK_ROWS]
        targets = following[start : start + _BLOCK_ROWS].to(reference.device)
        logits = head(reference[block]).double()
        for name, hidden in others.items():
            errors = _position_errors(logits, head(hidden[block]).double(), targets)
            sums[name].index_add_(1, depths[block], errors.cpu())
    counts = torch.bincount(depths[at], minlength=int(depths.max()) + 1)
    means = {name: s / counts.clamp(min=1) for name, s in sums.items()}
    return ReplayReport(
        depths=tuple(
            DepthErrors(
                depth=depth,
                positions=count,
                symmetric_kl={name: float(m[0, depth]) for name, m in means.items()},
                nll_difference={name: float(m[1, depth]) for name, m in means.items()},
            )
            for depth, count in enumerate(counts.tolist())
            if count
        ),
        mean_cosine={name: float(s[2].sum() / len(at)) for name, s in sums.items()},
    )


def _position_errors(reference: Tensor, other: Tensor, targets: Tensor) -> Tensor:
    """[3, n] symmetric KL, |NLL difference| and cosine of logits [n, A]."""
    a, x = reference.log_softmax(-1), other.log_softmax(-1)
    kl = 0.5 * ((a.exp() - x.exp()) * (a - x)).sum(-1)
    nll = (a - x).gather(1, targets[:, None]).squeeze(1).abs()
    cosine = torch.nn.functional.cosine_similarity(reference, other, dim=-1)
    return torch.stack([kl, nll, cosine])


def save_plot(report: ReplayReport, path: Path) -> None:
    """Write the paper's Figure 4 of a report as PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    depths = [row.depth for row in report.depths]
    labels = [f"{row.depth}\n{row.positions:,}" for row in report.depths]
    for axes, title, of in (
        (panels[0], "symmetric KL", [row.symmetric_kl for row in report.depths]),
        (panels[1], "|NLL difference|", [row.nll_difference for row in report.depths]),
    ):
        for name, style in ((RERUN, "o-"), (REPLAY, "s-"), (NO_REPLAY, "^-")):
            axes.plot(depths, [errors[name] for errors in of], style, label=name)
        axes.set(title=title, xlabel="handoff depth, with positions", ylabel="mean error, nats")
        axes.set_xticks(depths, labels, fontsize=8)
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=120)
