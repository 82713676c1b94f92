"""Minimum-call planning: Appendix A, brute force, and a simulation of the packed-call interface."""

import gc
import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest

from harts.errors import PlanError
from harts.planning.calls import CallPlan, plan_calls

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def tree(text: str) -> tuple[dict[str, int], Arrays]:
    """Parse lines "parent -> child:end child:end ..."; children keep their order, depth first."""
    children: dict[str, list[str]] = {}
    end: dict[str, int] = {}
    for line in text.strip().splitlines():
        parent, _, listed = line.partition("->")
        for item in listed.split():
            name, _, position = item.partition(":")
            children.setdefault(parent.strip(), []).append(name)
            end[name] = int(position)
    names: list[str] = []
    parents: list[int] = []
    stack = [(name, -1) for name in reversed(children[""])]
    while stack:
        name, parent = stack.pop()
        names.append(name)
        parents.append(parent)
        stack += [(c, len(names) - 1) for c in reversed(children.get(name, []))]
    starts = [0 if p < 0 else end[names[p]] for p in parents]
    arrays = (np.array(parents), np.array(starts), np.array([end[n] for n in names]))
    return {n: i for i, n in enumerate(names)}, arrays


def described(plan: CallPlan, number: dict[str, int]) -> list[dict[str, int]]:
    """Each round as {"A1>A2": replay}, the way the captions list members."""
    name = {i: n for n, i in number.items()}
    return [
        {">".join(name[v] for v in s.chain): s.replay[1] - s.replay[0] for s in packed}
        for packed in plan.rounds
    ]


CASE_I = """
-> R1:3
R1 -> A1:5 B1:123 C1:66
A1 -> A2:40 A3:15
A3 -> A4:88 A5:30
A4 -> A6:100 A7:90
A7 -> A8:91 A9:120
A8 -> A10:140 A11:110
B1 -> B2:124 B3:150
B2 -> B4:134 B5:160
B4 -> B6:150 B7:140
B7 -> B8:170 B9:150
C1 -> C2:67 C3:90
C2 -> C4:77 C5:94
C4 -> C6:187 C7:83
C5 -> C14:120 C15:100
C6 -> C8:190 C9:200
C7 -> C10:135 C11:90
C10 -> C12:150 C13:140
"""

CASE_II = """
-> R2:3
R2 -> D1:5 E1:124 F1:67
D1 -> D2:30 D3:121
D3 -> D4:140 D5:163
D5 -> D6:170 D7:254
D7 -> D8:270 D9:280
E1 -> E2:125 E3:125 E4:140 E5:150
E2 -> E6:127 E7:150
E6 -> E8:140 E9:150
E3 -> E10:140 E11:141 E12:142 E13:143 E14:144 E15:145
F1 -> F2:69 F3:68 F4:90 F5:128
F2 -> F6:70
F6 -> F7:90 F8:91
F3 -> F9:100 F10:101 F11:102 F12:103 F13:104 F14:105 F15:106
F5 -> F16:150 F17:151
"""

# Side leaves G5, G7, ... G35 hang at the ends of G3, G4, G6, ... G32.
CASE_III_REPLAYS = [14, 23, 55, 59, 34, 38, 29, 17, 24, 53, 36, 42, 55, 54, 32, 13]


def case_iii() -> str:
    inner = ["G3", *(f"G{i}" for i in range(4, 33, 2))]
    ends = []
    for replay in CASE_III_REPLAYS:
        after = ends[-1] if ends else 63
        ends.append(after + 1 + (replay - after - 1) % 64)
    lines = ["-> R3:3", "R3 -> G1:5 H1:124 I1:67", f"G1 -> G2:30 G3:{ends[0]}"]
    for i, name in enumerate(inner):
        direct, side = f"G{4 + 2 * i}", f"G{5 + 2 * i}"
        following = ends[i + 1] if i + 1 < len(ends) else ends[i] + 20
        lines.append(f"{name} -> {direct}:{following} {side}:{ends[i] + 9}")
    lines += ["H1 -> H2:125 H3:130 H4:131", "H2 -> H5:140 H6:141"]
    lines += ["I1 -> I2:68 I3:80 I4:81", "I2 -> I5:90 I6:91"]
    return "\n".join(lines)


def test_appendix_case_one_three_calls_replay_373() -> None:
    number, arrays = tree(CASE_I)
    assert len(number) == 36
    plan = plan_calls(*arrays, 64)
    assert described(plan, number) == [
        {"R1>A1>A2": 0, "A3>A4>A6": 5, "A5": 15, "B1>B2>B4>B6": 3, "C1>C2>C4>C6>C8": 3},
        {
            **{"A7>A8>A10": 24, "A11": 27, "A9": 26, "B7>B8": 6, "B9": 12, "B5": 60, "B3": 59},
            **{"C9": 59, "C7>C10>C12": 13, "C11": 19, "C5>C14": 3, "C15": 30, "C3": 2},
        },
        {"C13": 7},
    ]
    assert plan.replay_tokens == 373


def test_appendix_case_two_two_calls_replay_813() -> None:
    number, arrays = tree(CASE_II)
    assert len(number) == 42
    plan = plan_calls(*arrays, 64)
    first, second = described(plan, number)
    assert first == {"R2>D1>D2": 0, "D3>D5>D7>D8": 5, "E1>E2>E6>E8": 3, "F1>F5>F16": 3}
    assert second == {
        **{"D4": 57, "D6": 35, "D9": 62, "E9": 63, "E7": 61, "E3>E10": 60, "E4": 60, "E5": 60},
        **{f"E{i}": 61 for i in range(11, 16)},
        **{"F2>F6>F7": 3, "F8": 6, "F3>F9": 3, "F4": 3, "F17": 0},
        **{f"F{i}": 4 for i in range(10, 16)},
    }
    assert plan.replay_tokens == 813


def test_appendix_case_three_two_calls_replay_780() -> None:
    number, arrays = tree(case_iii())
    assert len(number) == 48
    plan = plan_calls(*arrays, 64)
    first, second = described(plan, number)
    chain = ">".join(["G3", *(f"G{i}" for i in range(4, 35, 2))])
    assert first == {"R3>G1>G2": 0, chain: 5, "H1>H2>H5": 3, "I1>I2>I5": 3}
    sides = {f"G{5 + 2 * i}": r for i, r in enumerate(CASE_III_REPLAYS)}
    assert second == {
        **sides,
        **{"H6": 61, "H3": 60, "H4": 60, "I6": 4, "I3": 3, "I4": 3},
    }
    assert plan.replay_tokens == 780


def test_figure_2_forks_at_b_minus_1_and_b_plus_1_need_two_calls() -> None:
    number, arrays = tree("-> v0:63\nv0 -> v1:65 v2:80\nv1 -> v3:90 v4:91")
    plan = plan_calls(*arrays, 64)
    assert described(plan, number) == [{"v0>v1>v3": 0, "v2": 63}, {"v4": 1}]
    assert plan.rounds[1][0].initial_state is not None
    assert plan.rounds[1][0].initial_state.position == 64
    assert plan.rounds[0][0].boundaries == (64,)


@pytest.mark.parametrize(("fork", "calls", "replay"), [(63, 1, 63), (64, 2, 0), (65, 2, 1)])
def test_state_readiness_at_the_three_boundary_cases(fork: int, calls: int, replay: int) -> None:
    _, arrays = tree(f"-> a:{fork}\na -> b:200 c:201")
    plan = plan_calls(*arrays, 64)
    assert (len(plan.rounds), plan.replay_tokens) == (calls, replay)


def random_tree(rng: np.random.Generator, segments: int, chunk_size: int) -> Arrays:
    """A random segment forest, children contiguous in depth-first numbering."""
    parent = [-1]
    for i in range(1, segments):
        parent.append(int(rng.integers(-1, i)) if rng.random() < 0.9 else i - 1)
    children: dict[int, list[int]] = {}
    for i, p in enumerate(parent):
        children.setdefault(p, []).append(i)
    order: list[tuple[int, int]] = []
    stack = [(r, -1) for r in reversed(children[-1])]
    while stack:
        old, above = stack.pop()
        order.append((old, above))
        stack += [(c, len(order) - 1) for c in reversed(children.get(old, []))]
    start: list[int] = []
    end: list[int] = []
    for _, above in order:
        start.append(0 if above < 0 else end[above])
        end.append(start[-1] + int(rng.integers(1, 2 * chunk_size + 2)))
    return np.array([p for _, p in order]), np.array(start), np.array(end)


def fewest_calls(arrays: Arrays, chunk_size: int) -> int:
    """Exhaust the choices of direct children; every side branch starts as early as it may."""
    parent, start, end = (a.tolist() for a in arrays)
    children = [[u for u, p in enumerate(parent) if p == v] for v in range(len(parent))]
    forks = [v for v in range(len(parent)) if children[v]]
    best = len(parent) + 1
    for choice in itertools.product(*(children[v] for v in forks)):
        direct = dict(zip(forks, choice, strict=True))
        # Round of each segment, and the first round in which the state at its anchor is usable.
        when: dict[int, int] = {}
        usable: dict[int, int] = {}
        for v in range(len(parent)):
            p = parent[v]
            if p < 0:
                when[v], available = 1, 1
            else:
                available = usable[p]
                when[v] = when[p] if direct[p] == v else available
            crosses = end[v] // chunk_size > start[v] // chunk_size
            usable[v] = when[v] + 1 if crosses else available
        best = min(best, max(when.values()))
    return best


@pytest.mark.parametrize("block", range(10))
def test_call_count_is_the_minimum_over_all_choices_on_ten_thousand_forests(block: int) -> None:
    rng = np.random.default_rng(100 + block)
    for _ in range(1000):
        arrays = random_tree(rng, int(rng.integers(1, 9)), 4)
        assert len(plan_calls(*arrays, 4).rounds) == fewest_calls(arrays, 4)


def test_replay_is_equation_15_whatever_the_choice() -> None:
    rng = np.random.default_rng(7)
    for _ in range(200):
        parent, start, end = random_tree(rng, 12, 4)
        fan_out = np.bincount(parent[parent >= 0], minlength=len(parent))
        expected = int(((np.maximum(fan_out, 1) - 1) * (end % 4)).sum())
        assert plan_calls(parent, start, end, 4).replay_tokens == expected


def deep_tree(forks: int) -> Arrays:
    """A chain of forks, each with a leaf beside it."""
    parent = np.empty(2 * forks + 1, dtype=np.int64)
    parent[0] = -1
    parent[1::2] = parent[2::2] = np.arange(0, 2 * forks, 2)
    depth = np.concatenate([[1], np.repeat(np.arange(2, forks + 2), 2)])
    return parent, depth - 1, depth


def star(leaves: int) -> Arrays:
    return (
        np.append(-1, np.zeros(leaves, dtype=np.int64)),
        np.append(0, np.full(leaves, 70)),
        np.append(70, np.full(leaves, 71)),
    )


@pytest.mark.parametrize(("grow", "per_size"), [(deep_tree, 1), (star, 0)])
def test_chain_and_star_of_a_hundred_thousand_segments_need_no_recursion(
    grow: Callable[[int], Arrays], per_size: int
) -> None:
    """Linear time: four times the segments take about four times as long, not sixteen."""

    def least_time(size: int) -> float:
        arrays, times = grow(size), []
        gc.collect()
        gc.disable()  # a collection takes time with all that other tests hold, not with the size
        try:
            for _ in range(3):  # what other programs add is never negative
                began = time.process_time()
                plan = plan_calls(*arrays, 64)
                times.append(time.process_time() - began)
        finally:
            gc.enable()
        assert len(plan.sequences) == size + per_size
        return min(times)

    size = 100_000 if grow is star else 50_000
    assert least_time(size) < 10 * least_time(size // 4)


def test_a_child_that_does_not_start_where_its_parent_ends_is_refused() -> None:
    with pytest.raises(PlanError, match=r"segment 1 spans \[5, 9\).*starts at 4"):
        plan_calls(np.array([-1, 0]), np.array([0, 5]), np.array([4, 9]), 4)
