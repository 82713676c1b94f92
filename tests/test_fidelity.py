"""The whole model on hard trees: exact against each trajectory alone, and every mutation caught.

The tree has forks at B-1, B and B+1, nested forks inside one chunk, branches shorter than the
convolution, more than four rounds and more than six handoffs on a path; half of the heads decay by
under 1% a token, so that a wrong state reaches every later token.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch

import harts.training.step as step_module
from harts.fidelity import (
    Comparison,
    compare_gradients,
    compare_outcomes,
    float64_everywhere,
    gradients,
    run_alone,
)
from harts.forest import PrefixForest
from harts.layout import CompactLayout, RoundLayout, build_layout
from harts.models import Recomputation, TreePolicy, prepare
from harts.models.bailing_hybrid import FAMILY, small_model
from harts.objectives import GRPO, PPO, PolicyObjective, StepTargets, prepare_step
from harts.planning.calls import plan_calls
from harts.planning.step import StepPlan, plan_step
from harts.training.step import RouterLosses, StepOutcome, run_step
from harts.trajectories import TrajectoryBatch
from tests.forests import hard_tree

CHUNK = 64
VOCABULARY = 50
BOUND = 1e-9
ROUTER = RouterLosses(z_coefficient=1e-2, load_balancing_coefficient=1e-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step whose truth is known."""

    batch: TrajectoryBatch
    plan: StepPlan
    objective: PolicyObjective
    targets: StepTargets
    policy: TreePolicy
    truth: StepOutcome
    true_gradients: dict[str, torch.Tensor]

    def compact(self, *, recompute: Recomputation = "none") -> list[Comparison]:
        self.policy.zero_grad()
        self.policy.set_recomputation(recompute, scope=float64_everywhere)
        with float64_everywhere():
            outcome = run_step(
                self.policy, self.batch, self.plan, self.targets, self.objective, ROUTER
            )
        rows = compare_outcomes(outcome, self.truth, label="compact", bound=BOUND)
        found = gradients(self.policy.model)
        return [
            *rows,
            compare_gradients(found, self.true_gradients, label="compact", bound=BOUND),
        ]


def make_case(objective: PolicyObjective, capacity: int) -> Case:
    torch.manual_seed(0)
    batch = hard_tree(VOCABULARY)
    plan = plan_step(batch, replicas=1, capacity=capacity)
    targets = prepare_step(batch, objective)
    with float64_everywhere():
        model = small_model(VOCABULARY).double().train()
        policy = prepare(copy.deepcopy(model))
        truth = run_alone(model, FAMILY, batch, plan, targets, objective, ROUTER)
    return Case(
        batch=batch,
        plan=plan,
        objective=objective,
        targets=targets,
        policy=policy,
        truth=truth,
        true_gradients=gradients(model),
    )


@pytest.fixture(scope="module")
def one_microbatch() -> Case:
    return make_case(GRPO(), 1 << 20)


@pytest.fixture(scope="module")
def several_microbatches() -> Case:
    return make_case(PPO(reduction="sequence-mean"), 900)


def failures(rows: list[Comparison]) -> list[str]:
    return [f"{row.name}: {row.error:.2e}" for row in rows if not row.passed]


def test_the_hard_tree_is_as_hard_as_it_says() -> None:
    forest = PrefixForest.build(hard_tree(VOCABULARY))
    calls = plan_calls(forest.segment_parent, forest.segment_start, forest.segment_end, CHUNK)
    depth: list[int] = []
    for parent in forest.segment_parent.tolist():
        depth.append(0 if parent < 0 else depth[parent] + 1)
    inner = np.unique(forest.segment_parent[forest.segment_parent >= 0])
    forks = set(forest.segment_end[inner].tolist())
    assert len(calls.rounds) >= 4
    assert max(depth) >= 6
    assert {CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1} <= forks
    assert (forest.segment_lengths < 3).sum() >= 4


@pytest.mark.parametrize("recompute", get_args(Recomputation))
def test_one_microbatch_equals_each_trajectory_alone(
    one_microbatch: Case, recompute: Recomputation
) -> None:
    assert failures(one_microbatch.compact(recompute=recompute)) == []


@pytest.mark.parametrize("recompute", get_args(Recomputation))
def test_several_microbatches_equal_each_trajectory_alone(
    several_microbatches: Case, recompute: Recomputation
) -> None:
    assert len(several_microbatches.plan.microbatches) > 1
    assert failures(several_microbatches.compact(recompute=recompute)) == []


def test_gates_of_the_checked_model_are_slow() -> None:
    model = small_model(VOCABULARY)
    slowest: list[float] = []
    for module in model.modules():
        if type(module).__name__ == "BailingHybridForgetGate":
            module.register_forward_hook(
                lambda _m, _i, out: slowest.append(float(out[..., 0, :].min()))
            )
    with torch.no_grad():
        model(input_ids=torch.randint(0, VOCABULARY, (1, 80)))
    assert len(slowest) == 3
    assert min(slowest) >= -0.01


Mutation = Callable[[CompactLayout], CompactLayout]


def in_rounds(change: Callable[[RoundLayout], RoundLayout]) -> Mutation:
    return lambda layout: dataclasses.replace(layout, rounds=tuple(map(change, layout.rounds)))


def replay_lengths(packed: RoundLayout) -> np.ndarray:
    own = np.zeros(len(packed.packed_rows), dtype=np.int64)
    own[packed.own_positions] = 1
    return np.add.reduceat(1 - own, packed.cu_seqlens[:-1])


def anchor_one_chunk_off(packed: RoundLayout) -> RoundLayout:
    boundaries = packed.boundaries.copy()
    boundaries[:, 1] = np.maximum(boundaries[:, 1] - 1, 0)
    return dataclasses.replace(packed, boundaries=boundaries)


def no_replay(packed: RoundLayout) -> RoundLayout:
    lengths = np.diff(packed.cu_seqlens) - replay_lengths(packed)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    limit = (lengths // CHUNK)[packed.boundaries[:, 0]]
    boundaries = np.minimum(packed.boundaries, np.stack([packed.boundaries[:, 0], limit], 1))
    return dataclasses.replace(
        packed,
        packed_rows=packed.packed_rows[packed.own_positions],
        cu_seqlens=bounds,
        boundaries=boundaries,
        own_positions=np.arange(len(packed.own_positions)),
    )


def replay_rows_written_to_output(packed: RoundLayout) -> RoundLayout:
    replay = replay_lengths(packed)
    own = np.diff(packed.cu_seqlens) - replay
    return dataclasses.replace(packed, own_positions=packed.own_positions - np.repeat(replay, own))


def state_leaks_from_the_sequence_before(packed: RoundLayout) -> RoundLayout:
    return dataclasses.replace(packed, initial_state=np.roll(packed.initial_state, 1))


def ancestors_from_the_neighbour_in_the_pack(layout: CompactLayout) -> CompactLayout:
    rows = layout.ancestor_rows.copy()
    for i, start in enumerate(layout.sequence_offsets[:-1].tolist()):
        a, b = layout.ancestor_offsets[i : i + 2].tolist()
        width = min(3, b - a, start)
        rows[b - width : b] = np.arange(start - width, start)
    return dataclasses.replace(layout, ancestor_rows=rows)


def multiplicity_ignored(layout: CompactLayout) -> CompactLayout:
    return dataclasses.replace(layout, multiplicity=np.minimum(layout.multiplicity, 1))


def positions_of_the_packed_row(layout: CompactLayout) -> CompactLayout:
    return dataclasses.replace(layout, positions=np.arange(layout.rows))


MUTATIONS: dict[str, Mutation] = {
    "anchor one chunk off": in_rounds(anchor_one_chunk_off),
    "no replay": in_rounds(no_replay),
    "replay rows written to output": in_rounds(replay_rows_written_to_output),
    "state of another sequence": in_rounds(state_leaks_from_the_sequence_before),
    "convolution context from the neighbour": ancestors_from_the_neighbour_in_the_pack,
    "q ignored": multiplicity_ignored,
    "position of the packed row": positions_of_the_packed_row,
}


@pytest.fixture
def mutated(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mutation], None]:
    def apply(mutation: Mutation) -> None:
        monkeypatch.setattr(
            step_module, "build_layout", lambda *args, **kw: mutation(build_layout(*args, **kw))
        )

    return apply


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(
    one_microbatch: Case, mutated: Callable[[Mutation], None], name: str
) -> None:
    mutated(MUTATIONS[name])
    rows = one_microbatch.compact()
    assert not rows[-1].passed
    assert rows[-1].error > 1e-5, "far beyond rounding"


def test_mutation_loss_denominator_per_microbatch_is_caught(
    several_microbatches: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = StepTargets.select

    def renormalised(targets: StepTargets, members: np.ndarray) -> StepTargets:
        part = select(targets, members)
        return dataclasses.replace(part, weights=part.weights / part.weights.sum())

    monkeypatch.setattr(StepTargets, "select", renormalised)
    assert any("policy loss" in f for f in failures(several_microbatches.compact()))


def test_mutation_an_extra_logprob_for_the_last_node_is_refused(
    one_microbatch: Case, mutated: Callable[[Mutation], None]
) -> None:
    def with_last_node(layout: CompactLayout) -> CompactLayout:
        return dataclasses.replace(
            layout,
            target_rows=np.append(layout.target_rows, 0),
            targets=np.append(layout.targets, layout.tokens[0]),
        )

    mutated(with_last_node)
    with pytest.raises(Exception, match="expected log-probs of shape"):
        one_microbatch.compact()


def test_equal_at_step_one_but_apart_later_would_show() -> None:
    """Peers' fault 9: several optimiser steps, not one."""
    torch.manual_seed(0)
    batch = hard_tree(VOCABULARY).select(np.arange(5))
    plan, targets = plan_step(batch, replicas=1, capacity=700), prepare_step(batch, GRPO())
    model = small_model(VOCABULARY).double().train()
    policy = prepare(copy.deepcopy(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, policy.model)]
    losses = []
    with float64_everywhere():
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            truth = run_alone(model, FAMILY, batch, plan, targets, GRPO(), ROUTER)
            found = run_step(policy, batch, plan, targets, GRPO(), ROUTER)
            assert found.loss == pytest.approx(truth.loss, rel=1e-8)
            losses.append(found.loss)
            for optimizer in optimizers:
                optimizer.step()
    assert losses[2] != pytest.approx(losses[0], rel=1e-4), "the steps moved the weights"
