"""The numbers that `harts inspect` shows, against sets of prefixes and the paper's formulas."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from harts.errors import InputError
from harts.forest import PrefixForest
from harts.inspection.facts import (
    CallFacts,
    ForestFacts,
    call_facts,
    choose_microbatch,
    counted_work,
    imbalance,
    microbatch_of_rows,
    step_call_facts,
    works,
)
from harts.inspection.tree_rows import TreeRows, early_ends
from harts.planning.step import StepPlan, plan_step
from harts.trajectories import TrajectoryBatch
from tests.forests import batch_of, random_batch

CHUNK = 4


def lists(batch: TrajectoryBatch) -> list[tuple[int, ...]]:
    bounds = batch.offsets.tolist()
    return [tuple(batch.tokens[a:b].tolist()) for a, b in pairwise(bounds)]


def next_tokens(trajectories: list[tuple[int, ...]]) -> dict[tuple[int, ...], set[int]]:
    """Which tokens follow each prefix, the empty one included."""
    following: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for t in trajectories:
        for i in range(len(t)):
            following[t[:i]].add(t[i])
    return following


def facts_by_prefixes(trajectories: list[tuple[int, ...]], chunk: int) -> ForestFacts:
    """Slow and plain: a trie as a set of prefixes."""
    following = next_tokens(trajectories)
    forks = {p for p, tokens in following.items() if p and len(tokens) > 1}
    prefixes = {t[: i + 1] for t in trajectories for i in range(len(t))}
    on_grid = sum(len(p) % chunk == 0 for p in forks)
    return ForestFacts(
        trajectories=len(trajectories),
        raw_tokens=sum(map(len, trajectories)),
        compact_tokens=len(prefixes),
        roots=len(following[()]),
        segments=len(following[()]) + sum(len(following[p]) for p in forks),
        deepest_forks=max(sum(t[:i] in forks for i in range(len(t))) for t in trajectories),
        fan_out=max((len(following[p]) for p in forks), default=0),
        forks_on_grid=on_grid,
        forks_off_grid=len(forks) - on_grid,
        duplicates=len(trajectories) - len(set(trajectories)),
        strict_prefixes=sum(
            any(t == u[: len(t)] and len(t) < len(u) for u in trajectories) for t in trajectories
        ),
    )


def small_plans() -> list[tuple[TrajectoryBatch, StepPlan]]:
    rng = np.random.default_rng(5)
    batches = [random_batch(rng, trajectories=int(rng.integers(2, 14))) for _ in range(40)]
    return [(b, plan_step(b, replicas=2, capacity=200, chunk_size=CHUNK)) for b in batches]


PLANS = small_plans()


def test_facts_of_a_batch_made_by_hand(batch: TrajectoryBatch) -> None:
    facts = ForestFacts.of(PrefixForest.build(batch), CHUNK)
    assert facts == ForestFacts(
        trajectories=10,
        raw_tokens=13 + 14 + 14 + 8 + 9 + 10 + 10 + 7 + 3 + 1,
        compact_tokens=(8 + 3 + 2 + 3 + 1 + 2) + (6 + 4 + 1) + 1,
        roots=3,
        segments=6 + 3 + 1,
        deepest_forks=2,
        fan_out=3,
        forks_on_grid=1,
        forks_off_grid=2,
        duplicates=1,
        strict_prefixes=2,
    )


def test_facts_agree_with_sets_of_prefixes() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        batch = random_batch(rng, trajectories=int(rng.integers(1, 16)), max_length=14)
        facts = ForestFacts.of(PrefixForest.build(batch), CHUNK)
        assert facts == facts_by_prefixes(lists(batch), CHUNK)


def test_a_copy_of_a_strict_prefix_is_both() -> None:
    facts = ForestFacts.of(PrefixForest.build(batch_of([[1, 2, 3], [1, 2], [1, 2], [1, 2]])), CHUNK)
    assert (facts.duplicates, facts.strict_prefixes) == (2, 3)


def test_facts_of_calls_hold_every_token_once_and_the_replay_of_eq_15() -> None:
    for _, plan in PLANS:
        for m in plan.microbatches:
            calls = call_facts(m.calls, m.forest.segment_lengths)
            assert sum(c.own_rows for c in calls) == m.compact_tokens
            ends, parents = m.forest.segment_end, m.forest.segment_parent
            sides = [(parents == v).sum() - 1 for v in range(len(ends)) if v in parents]
            forks = [int(ends[v]) % CHUNK for v in range(len(ends)) if v in parents]
            assert sum(c.replay_rows for c in calls) == np.dot(sides, forks)
            used = {s.initial_state for s in m.calls.sequences if s.initial_state}
            assert sum(c.states for c in calls) == len(used)


def test_calls_of_a_step_are_summed_by_their_number(plan: StepPlan) -> None:
    # Call 1 runs each tree to its first leaf (13, 10 and 1 rows). Call 2 runs the branches of a at
    # 8 from the state there, that at 11 from the same with [8, 11) replayed, and that of b at 6
    # from the state at 4 with [4, 6) replayed.
    first, second = step_call_facts(plan.microbatches)
    assert first == CallFacts(microbatches=2, sequences=3, own_rows=24, replay_rows=0, states=2)
    assert second == CallFacts(microbatches=2, sequences=4, own_rows=7, replay_rows=5, states=0)


def test_adding_facts_of_calls_adds_every_field() -> None:
    one = CallFacts(microbatches=1, sequences=2, own_rows=3, replay_rows=4, states=5)
    two = CallFacts(microbatches=2, sequences=4, own_rows=6, replay_rows=8, states=10)
    assert one + one == two


def test_imbalance_is_eq_23() -> None:
    work = np.array([[4, 4], [3, 1], [5, 0]])
    assert imbalance(work).tolist() == [0.0, 0.5, 1.0]
    assert float(imbalance(work.sum(axis=0))) == 12 / 8.5 - 1


def test_works_are_slots_by_replicas_and_rows_know_their_microbatch() -> None:
    for batch, plan in PLANS:
        work = works(plan)
        assert work.sum() == plan.objective.total_work == counted_work(plan)
        assert work.max(axis=1).sum() == plan.objective.slot_maxima
        assert work.sum(axis=0).max() == plan.objective.replica_maximum
        holder = microbatch_of_rows(plan, len(batch))
        for row, number in enumerate(holder.tolist()):
            assert row in plan.microbatches[number].members


def test_fillers_hold_no_row_and_no_counted_work() -> None:
    batch = batch_of([[1, 2, 3], [1, 2, 4, 4]])
    plan = plan_step(batch, replicas=3, capacity=10, fillers=True)
    assert len(plan.microbatches) == 3
    holder = microbatch_of_rows(plan, 2)
    assert not any(plan.microbatches[k].filler for k in holder)
    assert counted_work(plan) == 7
    assert works(plan).sum() == 10


def test_the_default_microbatch_has_most_calls(plan: StepPlan) -> None:
    chosen = plan.microbatches[choose_microbatch(plan, None)]
    assert len(chosen.calls.rounds) == max(len(m.calls.rounds) for m in plan.microbatches)
    assert choose_microbatch(plan, 1) == 1
    for wrong in (-1, 2):
        with pytest.raises(InputError, match=f"microbatch {wrong} does not exist.* 0 to 1"):
            choose_microbatch(plan, wrong)


def test_tree_rows_are_the_packed_sequences_and_upright_lines_cross_no_bar() -> None:
    for _, plan in PLANS:
        for m in plan.microbatches:
            rows, forest = TreeRows.of(m), m.forest
            assert len(rows) == len(m.calls.sequences)
            for sequence in m.calls.sequences:
                (row,) = {int(rows.segment_row[v]) for v in sequence.chain}
                assert rows.row_leaf[row] == sequence.chain[-1]
                lo, hi = sequence.replay
                assert rows.row_start[row] - rows.row_replay[row] == hi - lo
            for v, end in enumerate(forest.segment_end.tolist()):
                children = np.flatnonzero(forest.segment_parent == v)
                own, last = int(rows.segment_row[v]), int(rows.last_child_row[v])
                assert last == max([own, *rows.segment_row[children]])
                assert all(rows.row_start[own + 1 : last + 1] >= end)


def test_early_ends_are_the_trajectories_that_another_continues() -> None:
    rng = np.random.default_rng(8)
    for _ in range(100):
        batch = random_batch(rng, trajectories=8, max_length=10)
        forest, trajectories = PrefixForest.build(batch), lists(batch)
        segments, ends = early_ends(forest)
        expected = sorted(
            len(t)
            for t in trajectories
            if any(t == u[: len(t)] and len(t) < len(u) for u in trajectories)
        )
        assert sorted(ends.tolist()) == expected
        assert all(forest.segment_start[segments] < ends)
        assert all(ends <= forest.segment_end[segments])
