"""Plans on disk: what was saved loads, and everything else is refused by name."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.errors import InputError, PlanError
from harts.layout import build_layout
from harts.planning.best import Planner
from harts.planning.step import StepPlan, plan_step
from harts.planning.stored import batch_digest, load_plan, save_plan
from harts.trajectories import TrajectoryBatch, read_trajectories
from tests.forests import batch_of, random_batch

PLANNERS: list[Planner] = ["best", "paper", "contiguous", "hierarchical"]
TRUNK = list(range(10))


def small_batch() -> TrajectoryBatch:
    return batch_of(
        [[*TRUNK, 50, 51], [90] * 6, [*TRUNK, 60, 61, 62], [*TRUNK, 60, 61, 63], [91] * 5, [8, 9]]
    )


def small_plan() -> StepPlan:
    return plan_step(small_batch(), replicas=2, capacity=24, chunk_size=4)


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """The JSON of a plan without a digest."""
    small_plan().save(tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert max(len(m["calls"]["rounds"]) for m in found["microbatches"]) == 2
    return found


def load(folder: Path, content: object, batch: TrajectoryBatch | None = None) -> StepPlan:
    path = folder / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_plan(path, batch or small_batch())


def test_random_plans_survive_the_way_to_disk_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "plan.json"
    for i in range(120):
        batch = random_batch(rng, trajectories=int(rng.integers(1, 12)))
        plan = plan_step(
            batch,
            replicas=int(rng.integers(1, 5)),
            capacity=int(batch.lengths.max() + rng.integers(0, 60)),
            chunk_size=4,
            planner=PLANNERS[i % 4],
            share=i % 5 > 0,
            fillers=True,
        )
        save_plan(plan, path, batch)
        loaded = load_plan(path, batch)
        assert loaded.batch_digest == batch_digest(batch)
        assert loaded.to_json() == {**plan.to_json(), "batch_digest": batch_digest(batch)}
        for a, b in zip(plan.microbatches, loaded.microbatches, strict=True):
            assert a.calls == b.calls
            for name in ("members", "lengths", "lcp", "segment_end", "segment_member"):
                assert np.array_equal(getattr(a.forest, name), getattr(b.forest, name))


def test_a_loaded_plan_lays_out_as_the_one_that_was_saved(tmp_path: Path) -> None:
    batch, plan = small_batch(), small_plan()
    save_plan(plan, tmp_path / "plan.json", batch)
    loaded = load_plan(tmp_path / "plan.json", batch)
    for a, b in zip(plan.microbatches, loaded.microbatches, strict=True):
        x, y = (build_layout(batch, m.forest, m.calls) for m in (a, b))
        assert np.array_equal(x.tokens, y.tokens)
        assert np.array_equal(x.target_rows, y.target_rows)


def test_plans_of_real_files_load(shared_data: Path, tmp_path: Path) -> None:
    batch = read_trajectories([shared_data / "tot_game24.parquet"])
    plan = plan_step(batch, replicas=4, capacity=8192, planner="contiguous")
    save_plan(plan, tmp_path / "plan.json", batch)
    assert load_plan(tmp_path / "plan.json", batch).objective == plan.objective


def test_a_plan_without_a_digest_loads_by_verification_alone(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    loaded = load(tmp_path, document)
    assert loaded.batch_digest is None
    assert loaded.to_json() == document


def test_unknown_keys_are_left_alone(tmp_path: Path, document: dict[str, Any]) -> None:
    document["note"] = document["microbatches"][0]["colour"] = "red"
    assert load(tmp_path, document).objective == small_plan().objective


# Other trajectories


def changed_token(batch: TrajectoryBatch, index: int) -> TrajectoryBatch:
    tokens = batch.tokens.copy()
    tokens[index] = 1000
    return dataclasses.replace(batch, tokens=tokens)


def test_the_digest_sees_every_change_that_planning_sees() -> None:
    batch = small_batch()
    identity = np.zeros(batch.raw_tokens, np.int64)
    others = [
        batch,
        changed_token(batch, batch.raw_tokens - 1),
        batch.select([1, 0, 2, 3, 4, 5]),
        batch.select([0, 1, 2, 3, 4]),
        batch_of([batch.tokens.tolist()]),
        dataclasses.replace(batch, identity=identity),
        dataclasses.replace(batch, identity=identity + 1),
    ]
    assert len({batch_digest(b) for b in others}) == len(others)
    assert batch_digest(batch) == batch_digest(small_batch())
    rewarded = dataclasses.replace(batch, rewards=np.ones(len(batch)))
    assert batch_digest(rewarded) == batch_digest(batch)


@pytest.mark.parametrize("digest", [True, False])
def test_a_permuted_or_changed_batch_is_refused(tmp_path: Path, digest: bool) -> None:
    batch, plan, path = small_batch(), small_plan(), tmp_path / "plan.json"
    if digest:
        save_plan(plan, path, batch)
    else:
        plan.save(path)
    others = [
        batch.select([1, 0, 2, 3, 4, 5]),
        batch.select([0, 1, 2, 3, 4]),
        batch.select([0, 1, 2, 3, 4, 5, 5]),
        changed_token(batch, 3),
        changed_token(batch, int(batch.offsets[2]) + 11),
    ]
    for other in others:
        with pytest.raises(PlanError, match="other trajectories" if digest else "not valid"):
            load_plan(path, other)


def test_only_the_digest_tells_batches_of_one_structure_apart(tmp_path: Path) -> None:
    """Without one, a plan that is valid for another batch is a plan of it."""
    batch, plan, path = small_batch(), small_plan(), tmp_path / "plan.json"
    other = changed_token(batch, batch.raw_tokens - 1)
    plan.save(path)
    assert load_plan(path, other).objective == plan.objective
    save_plan(plan, path, batch)
    with pytest.raises(PlanError, match="digest"):
        load_plan(path, other)


# Files that are no plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no plan"),
        ('{"version": 1', "is no plan"),
        ("[" * 100_000, "is no plan"),
        ("\ud800", "is no plan"),
        ("[]", "as a whole: expected an object"),
        ("null", "as a whole: expected an object"),
        ("{}", "key version: expected this key"),
        ('{"version": 2}', "key version: expected 1, got 2"),
        ('{"version": "1"}', "key version: expected a whole number, got '1'"),
        ('{"version": true}', "key version: expected a whole number"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=words) as error:
        load_plan(path, small_batch())
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(InputError, match=r"cannot read the plan .*: "):
            load_plan(path, small_batch())


Step = str | int


def places(value: object, at: tuple[Step, ...] = ()) -> list[tuple[Step, ...]]:
    """The path of every key of every object inside a JSON value."""
    if isinstance(value, dict):
        inner = [p for key, v in value.items() for p in places(v, (*at, key))]
        return [(*at, key) for key in value] + inner
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in places(v, (*at, i))]
    return []


def written(path: tuple[Step, ...]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def test_each_missing_or_mistyped_key_is_named(tmp_path: Path, document: dict[str, Any]) -> None:
    optional = {("timings_s", key) for key in document["timings_s"]}
    checked = 0
    for path in places(document):
        kept = copy.deepcopy(document)
        parent: Any = kept
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = {"unexpected": []}
        with pytest.raises(InputError) as error:
            load(tmp_path, kept)
        assert f"key {written(path)}" in str(error.value)
        if path not in optional:
            del parent[path[-1]]
            with pytest.raises(InputError) as error:
                load(tmp_path, kept)
            assert f"key {written(path)}: expected this key, got none" in str(error.value)
            checked += 1
    assert checked > 70


Edit = Callable[[dict[str, Any]], None]


def tree(document: dict[str, Any]) -> dict[str, Any]:
    """The microbatch of two rounds."""
    return max(document["microbatches"], key=lambda m: len(m["calls"]["rounds"]))


def handed_over(document: dict[str, Any]) -> dict[str, Any]:
    return tree(document)["calls"]["rounds"][1][0]


EDITS: dict[str, tuple[str, Edit]] = {
    "D": ("grid|replicas", lambda d: d.update(D=3)),
    "T": ("capacity", lambda d: d.update(T=5)),
    "chunk size": ("replay|initial state|requests", lambda d: d.update(chunk_size=8)),
    "chunk size 0": ("settings", lambda d: d.update(chunk_size=0)),
    "objective": ("objective", lambda d: d["objective"].reverse()),
    "bound": ("lower bound", lambda d: d.update(lower_bound=10**6)),
    "raw tokens": ("raw tokens", lambda d: d.update(raw_tokens=1)),
    "merged tokens": ("merged tokens", lambda d: d.update(merged_tokens=1)),
    "slot": ("grid", lambda d: d["microbatches"][0].update(slot=7)),
    "a member twice": ("coverage", lambda d: tree(d)["members"].append(tree(d)["members"][0])),
    "no member": ("coverage", lambda d: tree(d).update(members=[])),
    "a member below 0": ("coverage", lambda d: tree(d)["members"].append(-1)),
    "a member beyond": ("coverage", lambda d: tree(d)["members"].append(10**18)),
    "filler": ("coverage", lambda d: tree(d).update(filler=True)),
    "compact tokens": ("compact tokens", lambda d: tree(d).update(compact_tokens=3)),
    "replay tokens": ("replay tokens", lambda d: tree(d).update(replay_tokens=3)),
    "segment id": ("segments", lambda d: tree(d)["tree"]["segments"][1].update(id=5)),
    "a later parent": ("segments", lambda d: tree(d)["tree"]["segments"][1].update(parent=1)),
    "a parent below 0": ("segments", lambda d: tree(d)["tree"]["segments"][1].update(parent=-1)),
    "segment length": ("segments", lambda d: tree(d)["tree"]["segments"][0].update(len=9)),
    "a huge length": ("segments", lambda d: tree(d)["tree"]["segments"][0].update(len=2**62)),
    "a segment more": (
        "segments",
        lambda d: tree(d)["tree"]["segments"].append({"id": 5, "parent": None, "len": 1}),
    ),
    "no round": ("once", lambda d: tree(d)["calls"].update(rounds=[])),
    "rounds exchanged": ("initial state", lambda d: tree(d)["calls"]["rounds"].reverse()),
    "chain": ("chains", lambda d: handed_over(d).update(chain=[99])),
    "init": ("initial state", lambda d: handed_over(d).update(init=None)),
    "init position": ("initial state", lambda d: handed_over(d)["init"].update(pos=4)),
    "replay": (r"replay: .*\[a\(p\), p\)", lambda d: handed_over(d).update(replay=[0, 10])),
    "request": (
        "no request",
        lambda d: [s.update(request=[]) for s in tree(d)["calls"]["rounds"][0]],
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_is_refused_by_the_invariant(
    tmp_path: Path, document: dict[str, Any], name: str
) -> None:
    invariant, edit = EDITS[name]
    edit(document)
    with pytest.raises(PlanError, match=invariant):
        load(tmp_path, document)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(objective=[1, 2]), "key objective: expected 3 whole numbers"),
        (lambda d: d.update(D=2**70), "key D: expected a whole number"),
        (lambda d: d["timings_s"].update(load=float("nan")), "timings_s.load: expected a number"),
        (lambda d: d["timings_s"].update(load=10**400), "timings_s.load: expected a number"),
        (lambda d: d["microbatches"][0].update(filler=1), "filler: expected true or false"),
        (lambda d: d.update(batch_digest=5), "batch_digest: expected text"),
    ],
)
def test_values_out_of_range_are_named(
    tmp_path: Path, document: dict[str, Any], edit: Edit, words: str
) -> None:
    edit(document)
    with pytest.raises(InputError, match=words):
        load(tmp_path, document)
