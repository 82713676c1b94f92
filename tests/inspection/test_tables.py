"""Tables: the right numbers in the right cells, whole at 80 columns."""

import io

import numpy as np
import pytest
from rich.console import Console

from harts.forest import PrefixForest
from harts.inspection.tables import (
    MOST_REPLICAS,
    MOST_ROWS,
    TextTable,
    all_tables,
    for_terminal,
    load_table,
    microbatch_calls_table,
    step_calls_table,
    summary_table,
    trees_table,
)
from harts.planning.step import StepPlan, plan_step
from harts.trajectories import TrajectoryBatch, from_lists


def printed(table: TextTable, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(for_terminal(table))
    return stream.getvalue()


def test_summary_of_a_batch_made_by_hand(batch: TrajectoryBatch, plan: StepPlan) -> None:
    values = dict(summary_table(PrefixForest.build(batch), plan).rows)
    assert values["trajectories"] == "10"
    assert values["tokens, each trajectory alone"] == "89"
    assert values["tokens, all prefixes shared in one trie"] == "31"
    assert values["  of them repeated by the cuts"] == "0 (0.00%)"
    assert values["slots x replicas = microbatches"] == "1 x 2 = 2"
    assert values["sum of slot maxima"] == values["heaviest replica"] == "19"
    assert values["calls a layer: most in a microbatch, in all"] == "2, 4"
    assert values["replayed tokens, chunks of 4"] == "5 (16.13%)"


def test_each_tree_by_itself_then_all_together(batch: TrajectoryBatch) -> None:
    table = trees_table(batch, PrefixForest.build(batch), 4)
    # Name, trajectories, raw, compact, ratio, forks on/off, deepest, fan-out, equal/prefix.
    assert table.rows == [
        ("a", "6", "68", "19", "3.58", "1/1", "2", "3", "1/1"),
        ("b", "3", "20", "11", "1.82", "0/1", "1", "2", "0/1"),
        ("c", "1", "1", "1", "1.00", "0/0", "0", "0", "0/0"),
    ]
    assert table.totals == [("together", "10", "89", "31", "2.87", "1/2", "2", "3", "1/2")]
    assert "form 3 trees" in table.note


def test_many_trees_are_summed_up() -> None:
    names = [f"tree-{i}" for i in range(MOST_ROWS + 5)]
    tokens = [[i, *range(20 - i % 3)] for i in range(len(names))]
    batch = from_lists(token_ids=tokens, tree_ids=names)
    table = trees_table(batch, PrefixForest.build(batch), 4)
    assert len(table.rows) == MOST_ROWS
    name, trajectories, raw, compact, *_ = table.rows[-1]
    assert (name, trajectories) == ("6 smaller ones", "6")
    shown = sum(int(row[2]) for row in table.rows[:-1])
    assert shown + int(raw) == batch.raw_tokens
    assert raw == compact


def test_loads_and_their_imbalance(plan: StepPlan) -> None:
    table = load_table(plan)
    assert table.rows == [("0", "19", "12", "22.581%")]  # 19 / 15.5 - 1
    assert table.totals == [("total", "19", "12", "22.581%")]


def chain_plan(trajectories: int, replicas: int, capacity: int) -> StepPlan:
    rng = np.random.default_rng(0)
    tokens = [[i, *rng.integers(0, 9, int(rng.integers(3, 9)))] for i in range(trajectories)]
    return plan_step(from_lists(token_ids=tokens), replicas=replicas, capacity=capacity)


def test_of_many_slots_the_least_balanced_are_listed() -> None:
    plan = chain_plan(120, 2, 10)
    assert plan.slots > MOST_ROWS
    table = load_table(plan)
    shown = [float(row[-1].rstrip("%")) for row in table.rows]
    work = np.array([m.compact_tokens for m in plan.microbatches]).reshape(-1, 2)
    uneven = np.sort(work.max(axis=1) / work.mean(axis=1) - 1)[::-1]
    assert sorted(shown, reverse=True) == [float(f"{u:.3%}"[:-1]) for u in uneven[:MOST_ROWS]]
    assert f"largest {uneven[0]:.3%}" in table.note


def test_of_many_replicas_the_extremes_are_listed() -> None:
    plan = chain_plan(30, MOST_REPLICAS + 1, 40)
    loads = [m.compact_tokens for m in plan.microbatches if m.slot == 0]
    slot, lightest, _, heaviest, _ = load_table(plan).rows[0]
    assert (slot, lightest, heaviest) == ("0", f"{min(loads)}", f"{max(loads)}")


def test_fillers_are_starred() -> None:
    batch = from_lists(token_ids=[[1, 2], [3]])
    plan = plan_step(batch, replicas=3, capacity=9, fillers=True)
    table = load_table(plan)
    assert sum(cell.startswith("*") for cell in table.rows[0]) == 1
    assert "weight zero" in table.note
    values = dict(summary_table(PrefixForest.build(batch), plan).rows)
    assert values["filler microbatches of weight zero"] == "1 (2 tokens)"
    assert values["tokens of the plan, shared within microbatches"] == "3"


def test_calls_of_a_microbatch_and_of_the_step(plan: StepPlan) -> None:
    number = next(i for i, m in enumerate(plan.microbatches) if m.compact_tokens == 19)
    # Prompt and first branch to its leaf; then the others from the state at 8, one with replay.
    table = microbatch_calls_table(plan, number)
    assert table.rows == [("1", "1", "13", "0", "1"), ("2", "3", "6", "3", "0")]
    assert table.totals == [("total", "4", "19", "3", "1")]
    whole = step_calls_table(plan)
    assert whole.rows == [("1", "2", "3", "24", "0", "2"), ("2", "2", "4", "7", "5", "0")]
    assert whole.totals == [("total", "", "7", "31", "5", "2")]


@pytest.mark.parametrize("width", [80, 100])
def test_every_cell_is_printed_whole(batch: TrajectoryBatch, plan: StepPlan, width: int) -> None:
    for table in all_tables(batch, PrefixForest.build(batch), plan, 0):
        text = printed(table, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        for row in [*table.rows, *table.totals]:
            assert all(cell in text for cell in row)


def test_wide_numbers_and_long_names_fit_80_columns() -> None:
    numbers = ["12,345", "420,000,000", "75,000,000", "12.34", "10/1,234", "123", "37", "7/99"]
    row = ("x" * 18, *numbers)
    text = printed(TextTable(title="t", columns=("tree", *"abcdefgh"), rows=[row], totals=[row]))
    assert all(text.count(cell) == 2 for cell in row[1:])
    assert max(map(len, text.splitlines())) <= 80


def test_brackets_in_names_are_no_markup() -> None:
    assert "[bold]x[/]" in printed(
        TextTable(title="[t]", columns=("a", "b"), rows=[("[bold]x[/]", "1")], totals=[])
    )
