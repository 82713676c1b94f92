"""Verification: plans of every kind pass, and each broken invariant is named with its place."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harts.errors import PlanError
from harts.forest import PrefixForest
from harts.planning.best import Planner
from harts.planning.calls import PackedSequence, StateRef, plan_calls
from harts.planning.schedule import Objective
from harts.planning.step import Microbatch, StepPlan, plan_step
from harts.planning.verify import verify_plan
from harts.trajectories import TrajectoryBatch
from tests.forests import batch_of, random_batch

PLANNERS: list[Planner] = ["best", "paper", "contiguous", "hierarchical"]
CHUNK = 4


def rich_batch() -> TrajectoryBatch:
    """One tree with replays, handoffs and chains, and some strangers, in no order."""
    trunk = list(range(10))
    left = [*trunk, *range(20, 30)]
    return batch_of(
        [
            [*left, 60, 61, 62],
            [90, 91, 92, 93, 94],
            [*left, 70, 71],
            [*trunk, 40, 41, 42],
            [80] * 22,
            [81] * 21,
            [*trunk, 50],
            [*trunk, 50],
            [90, 91, 92],
        ]
    )


def rich_plan() -> StepPlan:
    """Two replicas and two slots; one microbatch holds the tree."""
    return plan_step(rich_batch(), replicas=2, capacity=29, chunk_size=CHUNK, planner="contiguous")


def filled_plan() -> StepPlan:
    return plan_step(rich_batch(), replicas=10, capacity=29, chunk_size=CHUNK, fillers=True)


def at(plan: StepPlan, number: int, **changes: Any) -> StepPlan:
    """The plan with one microbatch changed."""
    microbatches = list(plan.microbatches)
    microbatches[number] = dataclasses.replace(microbatches[number], **changes)
    return dataclasses.replace(plan, microbatches=tuple(microbatches))


def tree_of(plan: StepPlan) -> int:
    """The microbatch with the most sequences."""
    return max(range(len(plan.microbatches)), key=lambda k: len(sequences(plan.microbatches[k])))


def sequences(microbatch: Microbatch) -> tuple[PackedSequence, ...]:
    return microbatch.calls.sequences


def with_rounds(plan: StepPlan, change: Callable[[list[list[PackedSequence]]], None]) -> StepPlan:
    number = tree_of(plan)
    calls = plan.microbatches[number].calls
    rounds = [list(packed) for packed in calls.rounds]
    change(rounds)
    changed = dataclasses.replace(calls, rounds=tuple(tuple(packed) for packed in rounds))
    return at(plan, number, calls=changed)


def with_sequence(
    plan: StepPlan, chosen: Callable[[PackedSequence], bool], **changes: Callable[[Any], Any]
) -> StepPlan:
    """Change the first sequence that is ``chosen``; each change maps the old value."""

    def change(rounds: list[list[PackedSequence]]) -> None:
        r, q = next(
            (r, q) for r, packed in enumerate(rounds) for q, s in enumerate(packed) if chosen(s)
        )
        old = rounds[r][q]
        new = {name: value(getattr(old, name)) for name, value in changes.items()}
        rounds[r][q] = dataclasses.replace(old, **new)

    return with_rounds(plan, change)


def with_forest(plan: StepPlan, **changes: Callable[[np.ndarray], np.ndarray]) -> StepPlan:
    number = tree_of(plan)
    forest = plan.microbatches[number].forest
    new = {name: value(getattr(forest, name).copy()) for name, value in changes.items()}
    return at(plan, number, forest=dataclasses.replace(forest, **new))


def regrouped(plan: StepPlan, number: int, members: list[int]) -> StepPlan:
    """The plan with another membership of one microbatch, planned correctly."""
    forest = PrefixForest.build(rich_batch())
    place = np.argsort(forest.members)
    part = forest.subset(np.sort(place[members]))
    calls = plan_calls(part.segment_parent, part.segment_start, part.segment_end, CHUNK)
    return at(plan, number, forest=part, calls=calls)


def swapped(column: np.ndarray, i: int, j: int) -> np.ndarray:
    column[[i, j]] = column[[j, i]]
    return column


def added(column: np.ndarray, i: int, amount: int) -> np.ndarray:
    column[i] += amount
    return column


def starts_from_a_state(s: PackedSequence) -> bool:
    return s.initial_state is not None


def replays(s: PackedSequence) -> bool:
    return s.replay[1] > s.replay[0]


def is_asked(s: PackedSequence) -> bool:
    return bool(s.boundaries)


def is_chain(s: PackedSequence) -> bool:
    return len(s.chain) > 1


def members_of(plan: StepPlan, number: int) -> list[int]:
    return plan.microbatches[number].members.tolist()


def same_round(rounds: list[list[PackedSequence]]) -> None:
    """Run everything in the first call."""
    rounds[:] = [[s for packed in rounds for s in packed]]


def run_one_twice(rounds: list[list[PackedSequence]]) -> None:
    rounds[-1].append(rounds[-1][-1])


def leave_one_out(rounds: list[list[PackedSequence]]) -> None:
    rounds[-1].pop()


def with_an_odd_microbatch(plan: StepPlan) -> StepPlan:
    """One trajectory of a microbatch in a slot of its own."""
    number = next(k for k, m in enumerate(plan.microbatches) if len(m.members) > 1)
    rows = members_of(plan, number)
    alone = regrouped(plan, number, rows[:1]).microbatches[number]
    alone = dataclasses.replace(alone, slot=plan.slots, replica=0)
    rest = regrouped(plan, number, rows[1:])
    return dataclasses.replace(rest, microbatches=(*rest.microbatches, alone))


MUTATIONS: dict[str, tuple[str, Callable[[StepPlan], StepPlan]]] = {
    "no replicas": (r"settings.*replicas", lambda p: dataclasses.replace(p, replicas=0)),
    "chunk size": (r"settings.*chunk_size", lambda p: dataclasses.replace(p, chunk_size=8)),
    "a trajectory missing": (
        r"coverage: trajectory \d+: .*in none",
        lambda p: regrouped(p, tree_of(p), members_of(p, tree_of(p))[1:]),
    ),
    "a trajectory twice": (
        r"coverage: trajectory \d+: .*microbatches \[\d, \d\]",
        lambda p: regrouped(p, 0, sorted({*members_of(p, 0), members_of(p, 1)[0]})),
    ),
    "a row beyond the batch": (
        r"coverage: .*rows 0 to 8, got 9",
        lambda p: with_forest(p, members=lambda m: np.where(m == m.max(), 9, m)),
    ),
    "over capacity": (
        r"capacity: microbatch \d .*at most 20 .*got",
        lambda p: dataclasses.replace(p, capacity=20),
    ),
    "a slot twice": (r"grid: microbatch 2", lambda p: at(p, 2, slot=0)),
    "replicas exchanged": (
        r"grid: microbatch 0: .*\(0, 0\), got \(0, 1\)",
        lambda p: at(at(p, 0, replica=1), 1, replica=0),
    ),
    "an odd microbatch": (
        r"grid: the plan: .*2 replicas divide, got 5",
        with_an_odd_microbatch,
    ),
    "a wrong length": (r"members", lambda p: with_forest(p, lengths=lambda x: added(x, 0, 1))),
    "members out of order": (
        r"sorting|shared prefixes|members",
        lambda p: with_forest(p, members=lambda m: swapped(m, 0, 1)),
    ),
    "a shared prefix too long": (
        r"shared prefixes: .*trajectories \d+ and \d+",
        lambda p: with_forest(p, lcp=lambda x: added(x, 1, 1)),
    ),
    "a shared prefix too short": (
        r"shared prefixes: .*got more",
        lambda p: with_forest(p, lcp=lambda x: added(x, 1, -1)),
    ),
    "a first shared prefix": (
        r"shared prefixes: .*first 0",
        lambda p: with_forest(p, lcp=lambda x: added(x, 0, 1)),
    ),
    "another parent": (
        r"segments: .*segment \d+",
        lambda p: with_forest(p, segment_parent=lambda x: added(x, len(x) - 1, -1)),
    ),
    "a fork moved": (
        r"segments: .*segment 0",
        lambda p: with_forest(p, segment_end=lambda x: added(x, 0, -1)),
    ),
    "a segment missing": (
        r"segments: .*expected \d segments",
        lambda p: with_forest(
            p,
            **{f"segment_{n}": lambda x: x[:-1] for n in ("parent", "start", "end", "member")},
        ),
    ),
    "another trajectory for a segment": (
        r"segments: .*runs through|segments: .*reaches",
        lambda p: with_forest(p, segment_member=lambda x: added(x, len(x) - 1, -1)),
    ),
    "an empty round": (r"chains: .*round \d", lambda p: with_rounds(p, lambda r: r.append([]))),
    "an empty chain": (
        r"chains: .*sequence",
        lambda p: with_sequence(p, lambda _: True, chain=lambda _: ()),
    ),
    "a segment that does not exist": (
        r"chains: .*segments 0 to",
        lambda p: with_sequence(p, lambda _: True, chain=lambda _: (99,)),
    ),
    "a chain that jumps": (
        r"chains: .*child of segment",
        lambda p: with_sequence(p, is_chain, chain=lambda c: (*c[:-1], c[0])),
    ),
    "a chain backwards": (
        r"chains: .*child of segment",
        lambda p: with_sequence(p, is_chain, chain=lambda c: c[::-1]),
    ),
    "a segment twice": (r"once: .*2 times", lambda p: with_rounds(p, run_one_twice)),
    "a segment never": (r"once: .*0 times", lambda p: with_rounds(p, leave_one_out)),
    "no replay": (
        r"replay: .*sequence",
        lambda p: with_sequence(p, replays, replay=lambda r: (r[1], r[1])),
    ),
    "replay from a chunk earlier": (
        r"replay: .*sequence",
        lambda p: with_sequence(p, starts_from_a_state, replay=lambda r: (r[0] - CHUNK, r[1])),
    ),
    "replay one token short": (
        r"replay: .*sequence",
        lambda p: with_sequence(p, starts_from_a_state, replay=lambda r: (r[0], r[1] - 1)),
    ),
    "a zero state behind the root": (
        r"initial state: .*got None",
        lambda p: with_sequence(p, starts_from_a_state, initial_state=lambda _: None),
    ),
    "a state at a root": (
        r"initial state: .*expected \(segment, position\) None",
        lambda p: with_sequence(
            p,
            lambda s: s.initial_state is None,
            initial_state=lambda _: StateRef(segment=0, position=CHUNK),
        ),
    ),
    "a state of another path": (
        r"initial state: ",
        lambda p: with_sequence(
            p,
            starts_from_a_state,
            initial_state=lambda s: dataclasses.replace(s, segment=s.segment + 1),
        ),
    ),
    "a state a chunk earlier": (
        r"initial state: ",
        lambda p: with_sequence(
            p,
            starts_from_a_state,
            initial_state=lambda s: dataclasses.replace(s, position=s.position - CHUNK),
        ),
    ),
    "a state of the same round": (
        r"initial state: .*earlier round",
        lambda p: with_rounds(p, same_round),
    ),
    "a state that nobody asked for": (
        r"initial state: .*no request",
        lambda p: with_sequence(p, is_asked, boundaries=lambda _: ()),
    ),
    "a request off the grid": (
        r"requests: .*multiples of 4",
        lambda p: with_sequence(p, is_asked, boundaries=lambda b: (b[0] + 1, *b[1:])),
    ),
    "a request behind the end": (
        r"requests: .*multiples of 4",
        lambda p: with_sequence(p, is_asked, boundaries=lambda b: (*b, 400)),
    ),
    "a request before the chain": (
        r"requests: .*multiples of 4",
        lambda p: with_sequence(p, starts_from_a_state, boundaries=lambda b: (CHUNK, *b)),
    ),
    "requests out of order": (
        r"requests: .*ascending",
        lambda p: with_sequence(p, is_asked, boundaries=lambda b: (*b, b[0])),
    ),
    "a request for nobody": (
        r"requests: .*a later sequence",
        lambda p: with_sequence(p, is_asked, boundaries=lambda b: (CHUNK, *b)),
    ),
    "raw tokens": (r"raw tokens", lambda p: dataclasses.replace(p, raw_tokens=1)),
    "merged tokens": (r"merged tokens", lambda p: dataclasses.replace(p, merged_tokens=1)),
    "a claim that nothing is shared": (
        r"shared prefixes: .*none",
        lambda p: dataclasses.replace(p, merged_tokens=p.raw_tokens),
    ),
    "a bound above the work": (
        r"lower bound",
        lambda p: dataclasses.replace(p, lower_bound=p.objective.total_work + 1),
    ),
    "no bound": (r"lower bound", lambda p: dataclasses.replace(p, lower_bound=0)),
    **{
        f"objective: {name}": (
            r"objective: J of Eq. 4",
            lambda p, name=name: dataclasses.replace(
                p, objective=p.objective._replace(**{name: getattr(p.objective, name) - 1})
            ),
        )
        for name in Objective._fields
    },
}


def test_the_plan_that_is_mutated_has_all_that_mutations_need() -> None:
    plan = rich_plan()
    verify_plan(plan, rich_batch())
    tree = plan.microbatches[tree_of(plan)]
    assert plan.slots == 2
    assert len(tree.calls.rounds) >= 2
    assert any(is_chain(s) for s in sequences(tree))
    assert any(is_asked(s) for s in sequences(tree))
    assert any(starts_from_a_state(s) and replays(s) for s in sequences(tree))
    assert max(len(m.members) for m in plan.microbatches[1:]) > 1


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_refused_by_the_name_of_the_invariant(name: str) -> None:
    message, mutate = MUTATIONS[name]
    with pytest.raises(PlanError, match=message) as error:
        verify_plan(mutate(rich_plan()), rich_batch())
    assert "expected" in str(error.value)
    assert "got" in str(error.value)


def test_fillers_are_checked() -> None:
    plan, batch = filled_plan(), rich_batch()
    verify_plan(plan, batch)
    filler = next(k for k, m in enumerate(plan.microbatches) if m.filler)
    real = next(k for k, m in enumerate(plan.microbatches) if not m.filler)
    broken = {
        r"coverage: trajectory \d: .*in none": at(plan, real, filler=True),
        r"coverage: trajectory \d: ": at(plan, filler, filler=False),
        r"fillers: .*one row": at(
            plan, filler, forest=PrefixForest.build(batch).subset(np.array([0, 1]))
        ),
        r"fillers: .*fewer than 1 replicas": dataclasses.replace(plan, replicas=1),
    }
    for message, mutated in broken.items():
        with pytest.raises(PlanError, match=message):
            verify_plan(mutated, batch)


def test_random_plans_of_every_planner_pass() -> None:
    rng = np.random.default_rng(0)
    for i in range(160):
        batch = random_batch(rng, trajectories=int(rng.integers(1, 12)))
        plan = plan_step(
            batch,
            replicas=int(rng.integers(1, 4)),
            capacity=int(batch.lengths.max() + rng.integers(0, 60)),
            chunk_size=int(rng.choice([1, 3, 4, 64])),
            planner=PLANNERS[i % 4],
            share=i % 5 > 0,
            fillers=True,
        )
        verify_plan(plan, batch)


def test_identity_keys_count_in_order_and_sharing() -> None:
    batch = batch_of(
        [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]],
        identity=[[0, -1, 0], [0, 5, 0], [0, -1, 0], [0, 5, 9]],
    )
    plan = plan_step(batch, replicas=1, capacity=100)
    assert plan.merged_tokens == 6
    verify_plan(plan, batch)
    with pytest.raises(PlanError, match="shared prefixes"):
        verify_plan(plan, dataclasses.replace(batch, identity=None))


def test_a_changed_batch_is_refused_wherever_the_change_matters() -> None:
    plan, batch = rich_plan(), rich_batch()
    rng = np.random.default_rng(0)
    same = {batch.trajectory(i).tobytes() for i in range(len(batch))}
    assert len(same) == len(batch) - 1
    for _ in range(30):
        order = rng.permutation(len(batch))
        permuted = batch.select(order)
        if all(np.array_equal(permuted.trajectory(i), batch.trajectory(i)) for i in range(9)):
            continue
        with pytest.raises(PlanError):
            verify_plan(plan, permuted)
    shared = batch.tokens.copy()
    shared[3] = 77
    with pytest.raises(PlanError, match="shared prefixes"):
        verify_plan(plan, dataclasses.replace(batch, tokens=shared))
    with pytest.raises(PlanError, match="coverage"):
        verify_plan(plan, batch.select(np.arange(8)))
    with pytest.raises(PlanError, match="coverage"):
        verify_plan(plan, batch.select([*range(9), 0]))


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_time_is_linear_in_segments_without_recursion(shape: str) -> None:
    count = 5_000
    if shape == "chain":
        tokens = [[1] * 10 * (i + 1) + [2] for i in range(200)]
    else:
        tokens = [[1, 2, 3, i] for i in range(count)]
    batch = batch_of(tokens)
    plan = plan_step(batch, replicas=1, capacity=batch.raw_tokens, planner="contiguous")
    began = time.process_time()
    verify_plan(plan, batch)
    assert time.process_time() - began < 2
