"""The replay ablation: its four executions are what they say, in float64 and in bfloat16."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from harts.bench.replay import (
    NO_REPLAY,
    REPLAY,
    RERUN,
    ReplayReport,
    first_copies,
    handoff_depths,
    measure_replay,
    reference_experts,
)
from harts.fidelity import float64_everywhere
from harts.forest import PrefixForest
from harts.models import prepare
from harts.models.families import MODEL_TYPES, family_named
from harts.models.pinned_routing import pinned_routing, recorded_routing, router_weights
from harts.ops.tree_index import TreeIndex
from harts.planning.calls import plan_calls, plan_without_replay
from harts.planning.step import plan_step
from tests.forests import batch_of, hard_tree, lay_out

VOCABULARY = 50
MOE = [t for t in MODEL_TYPES if family_named(t).router_class is not None]


def measured(dtype: torch.dtype, *, pinned: bool = False) -> ReplayReport:
    torch.manual_seed(0)
    policy = prepare(family_named("bailing_hybrid").small_model(VOCABULARY).to(dtype))
    settings: Any = {"capacity": 700, "progress": lambda _: None}
    experts = reference_experts(policy, hard_tree(VOCABULARY), **settings) if pinned else None
    return measure_replay(policy, hard_tree(VOCABULARY), experts=experts, **settings)


def test_in_float64_all_executions_agree_so_each_computes_the_model() -> None:
    with float64_everywhere():
        report = measured(torch.float64)
    for row in report.depths:
        for name in (RERUN, REPLAY, NO_REPLAY):
            assert abs(row.symmetric_kl[name]) < 1e-20
            assert row.nll_difference[name] < 1e-10
    assert all(abs(1 - c) < 1e-12 for c in report.mean_cosine.values())


def test_in_bfloat16_replay_is_nearer_than_no_replay() -> None:
    report = measured(torch.bfloat16, pinned=True)
    deep = [row for row in report.depths if row.depth]
    assert report.depths[0].depth == 0
    assert len(deep) >= 5

    def mean(name: str) -> float:
        positions = sum(row.positions for row in deep)
        return sum(row.nll_difference[name] * row.positions for row in deep) / positions

    assert mean(NO_REPLAY) > 2 * mean(REPLAY)
    assert mean(NO_REPLAY) > 2 * mean(RERUN)


def test_handoff_depth_is_the_depth_of_the_segment() -> None:
    batch = batch_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [7]])
    plan = plan_step(batch, replicas=1, capacity=100)
    assert handoff_depths(batch, plan).tolist() == [0, 0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 0]


def test_the_first_copy_of_a_prefix_stands_for_all() -> None:
    batch = batch_of([[1, 2, 3, 4], [1, 2, 9], [7], [1, 2, 3, 4]])
    first = first_copies(batch).tolist()
    assert first == [0, 1, 2, 3, 0, 1, 6, 7, 0, 1, 2, 3]


def test_a_plan_without_replay_has_one_call_a_depth_and_replays_nothing() -> None:
    forest = PrefixForest.build(hard_tree(VOCABULARY))
    segments = (forest.segment_parent, forest.segment_start, forest.segment_end)
    calls = plan_without_replay(*segments, 64)
    depth: list[int] = []
    for above in forest.segment_parent.tolist():
        depth.append(depth[above] + 1 if above >= 0 else 0)
    assert calls.replay_tokens == 0
    assert plan_calls(*segments, 64).replay_tokens > 0
    assert [len(r) for r in calls.rounds] == np.bincount(depth).tolist()


@pytest.mark.parametrize("model_type", MOE)
def test_pinning_the_experts_that_were_chosen_changes_nothing(model_type: str) -> None:
    torch.manual_seed(0)
    policy = prepare(family_named(model_type).small_model(VOCABULARY))
    _, _, layout = lay_out(batch_of([[1, 2, 3, 4, 5], [1, 2, 3, 9]]), chunk_size=64)
    index = TreeIndex.from_layout(layout)
    with recorded_routing(policy) as chosen:
        free = policy.hidden_states(index)
    with torch.no_grad(), pinned_routing(policy, lambda _: chosen) as use:
        use(layout)
        torch.testing.assert_close(policy.hidden_states(index), free)
    others = [(c + 1) % 8 for c in chosen]
    with torch.no_grad(), pinned_routing(policy, lambda _: others):
        counts = [statistics.counts for statistics in policy(layout).router]
        assert not torch.allclose(policy.hidden_states(index), free, atol=1e-3)
    weight = torch.from_numpy(layout.multiplicity).double()
    for found, pinned in zip(counts, others, strict=True):
        expected = torch.zeros(8, dtype=torch.float64)
        expected.index_add_(0, pinned.flatten(), weight.repeat_interleave(pinned.shape[1]))
        torch.testing.assert_close(found.double(), expected)


@pytest.mark.parametrize("model_type", MOE)
def test_router_weights_are_the_library_s(model_type: str) -> None:
    family = family_named(model_type)
    router = copy.deepcopy(family.routers(family.small_model(VOCABULARY))[0])
    logits, weights, selected = router(torch.randn(1, 20, router.weight.shape[1]))
    torch.testing.assert_close(
        router_weights(router, logits, selected, family.router_score), weights
    )
