"""The planning benchmark: it catches wrong plans, its figures and verdicts are right."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harts.bench import growth
from harts.bench.measure import Result
from harts.bench.ortools_baseline import SolverLimits
from harts.bench.plan_oracle import (
    PlannedStep,
    PrefixOracle,
    check_bound,
    check_forest,
    check_planned_step,
)
from harts.bench.planning import (
    Missing,
    PlanningOptions,
    Row,
    Workload,
    balances,
    file_workloads,
    measure_plans,
    synthetic_workloads,
)
from harts.bench.planning_bounds import judge_plans
from harts.cli import main
from harts.errors import HartsError, InputError, PlanError
from harts.forest import PrefixForest
from harts.planning.schedule import Objective
from harts.planning.step import plan_step
from harts.synth import synthesize
from harts.trajectories import TrajectoryBatch, write_trajectories
from tests.planning.oracles import trie_size

OPTIONS = PlanningOptions(replicas=(2,), capacity=700, limits=(), repeats=1)


def tiny() -> TrajectoryBatch:
    return synthesize("tiny", 0)


def workload(name: str = "tiny", *, synthetic: bool = False) -> Workload:
    return Workload(name=name, synthetic=synthetic, load=tiny)


@pytest.fixture(scope="module")
def step() -> tuple[PlannedStep, PrefixOracle]:
    batch = tiny()
    return PlannedStep.of(plan_step(batch, replicas=2, capacity=700)), PrefixOracle.build(batch)


def tuples(batch: TrajectoryBatch) -> list[tuple[int, ...]]:
    spans = zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)
    return [tuple(batch.tokens[a:b].tolist()) for a, b in spans]


# The oracle


def test_the_oracle_counts_different_prefixes() -> None:
    trajectories = [(5, 6), (5, 6, 7), (6, 5), (5, 6), (5, 7, 7)]
    batch = TrajectoryBatch.from_flat(
        np.concatenate([np.array(t) for t in trajectories]),
        np.cumsum([0, *map(len, trajectories)]),
    )
    oracle = PrefixOracle.build(batch)
    assert oracle.merged_tokens == trie_size(trajectories) == 7
    assert oracle.compact_work(np.array([0, 3])) == 2
    assert oracle.compact_work(np.array([1, 2])) == 5


def test_the_oracle_agrees_with_sets_of_prefixes_on_a_synthetic_step() -> None:
    batch = tiny()
    oracle, trajectories = PrefixOracle.build(batch), tuples(batch)
    rng = np.random.default_rng(0)
    for _ in range(20):
        members = rng.choice(len(batch), 12, replace=False)
        assert oracle.compact_work(members) == trie_size([trajectories[i] for i in members])
    check_forest(PrefixForest.build(batch), oracle)


def test_the_oracle_heeds_identities() -> None:
    arrays = {"tokens": [1, 2, 1, 2], "offsets": [0, 2, 4]}
    same = TrajectoryBatch.from_flat(**arrays, identity=np.array([7, 8, 7, 8]))
    other = TrajectoryBatch.from_flat(**arrays, identity=np.array([7, 8, 7, 9]))
    assert PrefixOracle.build(same).merged_tokens == 2
    assert PrefixOracle.build(other).merged_tokens == 3


def test_a_right_plan_passes(step: tuple[PlannedStep, PrefixOracle]) -> None:
    check_planned_step("plan", *step, 2, 700)


WRONG = {
    "a trajectory twice": (lambda p: {"members": (p.members[0], *p.members[:-1])}, "each of"),
    "a microbatch too heavy": (lambda _: {}, "capacity"),
    "two microbatches in one place": (lambda p: {"slot": np.zeros_like(p.slot)}, "each slot"),
    "a work that is not so": (lambda p: {"works": p.works + 1}, "raw tokens"),
    "an objective that is not so": (
        lambda p: {"objective": p.objective._replace(slot_maxima=1)},
        "objective",
    ),
    "members exchanged": (
        lambda p: {"members": (p.members[1], p.members[0], *p.members[2:])},
        "raw tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_caught(step: tuple[PlannedStep, PrefixOracle], name: str) -> None:
    plan, oracle = step
    change, message = WRONG[name]
    capacity = int(plan.works.max()) - 1 if "heavy" in name else 700
    with pytest.raises(PlanError, match=message):
        check_planned_step("plan", replace(plan, **change(plan)), oracle, 2, capacity)


def test_unequal_shares_and_a_wrong_bound_are_caught(
    step: tuple[PlannedStep, PrefixOracle],
) -> None:
    plan, oracle = step
    with pytest.raises(PlanError, match="equal shares"):
        check_planned_step("plan", plan, oracle, len(plan.members) + 1, 700)
    check_bound("plan", plan.objective.total_work, plan)
    with pytest.raises(PlanError, match="below the bound"):
        check_bound("plan", plan.objective.total_work + 1, plan)
    with pytest.raises(PlanError, match="compact tokens"):
        check_forest(PrefixForest.build(tiny().select(np.arange(5))), oracle)


# Figures


def row(planner: str, grid: list[list[int]], **values: object) -> Row:
    works = np.array(grid)
    objective = Objective(
        int(works.sum()), int(works.max(axis=1).sum()), int(works.sum(axis=0).max())
    )
    defaults: dict[str, object] = {
        "workload": "step 1",
        "synthetic": True,
        "trajectories": 10,
        "raw_tokens": 42_329_859,
        "merged_tokens": 90,
        "lower_bound": objective.total_work,
        "replicas": works.shape[1],
        "planner": planner,
        "objective": objective,
        "slot_works": works,
        "seconds": {"forest": 0.1, "microbatches": 0.1, "calls": 0.01},
    }
    return Row(**{**defaults, **values})  # type: ignore[arg-type]


def test_imbalance_is_pooled_over_the_slots_of_all_steps() -> None:
    rows = [
        row("best", [[10, 10], [10, 30]]),
        row("best", [[15, 5]], workload="step 2"),
        row("paper", [[1, 1]]),
    ]
    best, paper = balances(rows)
    assert (best.planner, best.slots, paper.slots) == ("best", 3, 1)
    assert best.slot_p50 == pytest.approx(0.5)  # of 0, 0.5, 0.5
    assert best.slot_p95 == pytest.approx(0.5)
    assert best.total_p50 == pytest.approx((40 / 30 - 1 + 0.5) / 2)
    assert best.total_max == pytest.approx(0.5)
    assert paper.total_max == 0


def failed(results: list[Result]) -> list[str]:
    return [result.name for result in results if not result.passed]


def test_a_good_plan_passes_every_bound() -> None:
    results = judge_plans([row("best", [[10, 10, 10, 10]]), row("paper", [[11] * 4])], 65_536)
    assert failed(results) == []
    assert len(results) == 8


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"lower_bound": 39}, "gap"),
        ({"seconds": {"forest": 0.6, "calls": 0.0}}, "planning time"),
        ({"seconds": {"forest": 0.1, "calls": 0.11}}, "call planning"),
    ],
)
def test_a_missed_bound_is_named(values: dict[str, object], name: str) -> None:
    assert [
        f for f in failed(judge_plans([row("best", [[10] * 4], **values)], 65_536)) if name in f
    ]


def test_uneven_slots_miss_all_bounds_on_balance() -> None:
    assert len(failed(judge_plans([row("best", [[12, 10, 10, 10]])], 65_536))) == 4


def test_a_rival_with_smaller_j_is_named() -> None:
    rows = [row("best", [[10, 12]]), row("OR-Tools 1/10 s", [[11, 11]])]
    (lost,) = [r for r in judge_plans(rows, 65_536) if not r.passed]
    assert "OR-Tools" in lost.name
    assert lost.detail == "step 1 D=2"


def test_bounds_of_the_stated_setting_are_left_out_elsewhere() -> None:
    names = [r.name for r in judge_plans([row("best", [[10, 10]], synthetic=False)], 65_536)]
    assert names == []
    assert all("gap" not in r.name for r in judge_plans([row("best", [[12, 10]])], 1_000))


# Runs


def test_every_planner_is_planned_and_checked() -> None:
    (rows,) = measure_plans([workload()], OPTIONS, lambda _: None)
    found = {r.planner: r for r in rows if isinstance(r, Row)}
    assert {"best", "contiguous", "hierarchical"} <= found.keys()
    assert all(r.objective >= found["best"].objective for r in found.values())
    assert found["best"].to_json()["objective"] == list(found["best"].objective)
    assert found["best"].slot_works.sum() == found["best"].objective.total_work


def test_the_baseline_is_planned_and_checked() -> None:
    pytest.importorskip("ortools.sat.python.cp_model", reason="needs OR-Tools: harts[ortools]")
    limits = SolverLimits(tree_s=0.1, packing_s=0.1)
    options = replace(OPTIONS, planners=("best",), limits=(limits,))
    (rows,) = measure_plans([workload()], options, lambda _: None)
    best, baseline = rows
    assert isinstance(baseline, Row)
    assert baseline.planner == "OR-Tools 0.1/0.1 s"
    assert baseline.objective >= best.objective
    assert "proven" in baseline.note


def test_a_rival_without_a_plan_is_reported_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(batch: TrajectoryBatch, *, planner: str, **rest: int) -> object:
        if planner == "paper":
            raise PlanError("no count that 2 replicas divide")
        return plan_step(batch, planner=planner, **rest)

    monkeypatch.setattr("harts.bench.planning.plan_step", refuse)
    options = replace(OPTIONS, planners=("best", "paper"))
    (rows,) = measure_plans([workload()], options, lambda _: None)
    assert [type(r) for r in rows] == [Row, Missing]
    assert rows[1].reason == "no count that 2 replicas divide"  # type: ignore[union-attr]


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="'best'"):
        PlanningOptions(planners=("paper",))
    with pytest.raises(InputError, match="at least 1"):
        PlanningOptions(replicas=(0,))
    with pytest.raises(InputError, match="1 to 10"):
        synthetic_workloads([0, 3])
    assert [w.name for w in synthetic_workloads([2])] == ["step 2"]
    files = [Path("a/b.parquet"), Path("c.jsonl"), Path("d/b.parquet")]
    assert [w.name for w in file_workloads(files)] == ["b (1)", "c", "b (2)"]


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *map(str, arguments)])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_the_command_shows_tables_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, target = tmp_path / "rollouts.parquet", tmp_path / "figures.json"
    write_trajectories(tiny(), data)
    status = run(
        "planning", "--steps", "none", "--data", data, "--no-ortools", "--capacity", 700,
        "--replicas", "1-2", "--planners", "best,contiguous", "--repeats", 1, "--json", target,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0, out
    assert "Table 2, D=1" in out
    assert "MISSED" not in out
    figures = json.loads(target.read_text())
    assert {plan["planner"] for plan in figures["plans"]} == {"best", "contiguous"}
    assert figures["capacity"] == 700
    assert "--planners best,contiguous" in figures["command"]
    assert str(tmp_path) not in target.read_text()
    assert [r["passed"] for r in figures["results"]] == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("planning", "--tokens", 5), "No such option: --tokens"),
        (("cpu-step", "--steps", "1"), "No such option: --steps"),
        (("planning", "--steps", "one"), "1-3,7"),
        (("planning", "--steps", "none"), "nothing to plan"),
        (("planning", "--ortools-limits", "5"), "1/10,5/20"),
        (("planning", "--planners", "paper"), "'best'"),
    ],
)
def test_bad_usage_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str
) -> None:
    assert run(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


# Growth


def test_a_tiled_step_has_the_tokens_asked_for() -> None:
    one = tiny()
    wanted = one.raw_tokens * 5 // 2
    batch = growth.tiled_step(wanted, "tiny")
    assert wanted - 600 <= batch.raw_tokens <= wanted
    assert np.array_equal(batch.tokens[: one.raw_tokens], one.tokens)
    assert batch.tree_ids[len(one)].startswith("step-1/")
    less = growth.tiled_step(one.raw_tokens // 2, "tiny")
    assert less.raw_tokens <= one.raw_tokens // 2
    assert np.array_equal(less.tokens, one.tokens[: less.raw_tokens])


def test_growth_is_measured_in_a_process_of_its_own_and_plotted(tmp_path: Path) -> None:
    sizes = (40_000, 10**12)
    points = list(growth.measure_growth(40_000, lambda _: None, sizes, "tiny"))
    assert [39_000 < p.tokens <= 40_000 for p in points] == [True]
    assert min(points[0].planning_s, points[0].processor_s) > 0
    assert points[0].peak_over_tokens >= 1
    growth.plot_growth(points, tmp_path / "images" / "growth.png")
    assert (tmp_path / "images" / "growth.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(HartsError, match="free memory"):
        list(growth.measure_growth(10**12, lambda _: None, sizes[1:], "tiny"))


def test_growth_is_judged_at_the_stated_sizes() -> None:
    point = growth.GrowthPoint(
        tokens=42_000_000,
        trajectories=9,
        seconds={"forest": 0.4, "calls": 0.2},
        processor_s=0.5,
        extra_bytes=42_000_000 * 13,
    )
    large = replace(point, tokens=420_000_000)
    results = list(growth.judge_growth([point, large], (42_000_000, 0.9)))
    assert {r.name: r.passed for r in results} == {
        "planning time at 42M tokens": False,
        "planning time at 420M tokens": True,
        "peak memory of planning over token bytes": True,
        "load of the 42M-token Parquet file": True,
    }
    alone = list(growth.judge_growth([point], (42_000_000, 0.9)))
    assert not next(r for r in alone if "memory" in r.name).passed
