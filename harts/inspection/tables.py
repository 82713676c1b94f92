"""Tables about the trees, the plan and its calls: plain text cells, shown by rich or as HTML."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harts.forest import Int, PrefixForest
from harts.inspection.facts import (
    NO_CALL,
    CallFacts,
    ForestFacts,
    call_facts,
    counted_work,
    imbalance,
    step_call_facts,
    works,
)
from harts.planning.step import StepPlan
from harts.trajectories import TrajectoryBatch

MOST_ROWS = 16
MOST_REPLICAS = 6
NAME_WIDTH = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Finished cells. The first column is a name, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    """Empty for a list of names and values."""
    rows: Sequence[tuple[str, ...]]
    totals: Sequence[tuple[str, ...]]
    """Rows set apart at the end."""
    note: str = ""


def all_tables(
    batch: TrajectoryBatch, forest: PrefixForest, plan: StepPlan, microbatch: int
) -> list[TextTable]:
    """Every table, in reading order; ``forest`` is that of the whole batch."""
    return [
        summary_table(forest, plan),
        trees_table(batch, forest, plan.chunk_size),
        load_table(plan),
        step_calls_table(plan),
        microbatch_calls_table(plan, microbatch),
    ]


def summary_table(forest: PrefixForest, plan: StepPlan) -> TextTable:
    """The whole input and J of Eq. 4 in words."""
    facts = ForestFacts.of(forest, plan.chunk_size)
    _, slot_maxima, heaviest = plan.objective
    work, fillers = counted_work(plan), len(plan.microbatches) - len(plan.counted)
    replay = sum(m.calls.replay_tokens for m in plan.microbatches)
    calls = [len(m.calls.rounds) for m in plan.microbatches]
    repeated = work - plan.merged_tokens
    gap = work / plan.lower_bound - 1
    grid = f"{plan.slots} x {plan.replicas} = {len(plan.microbatches)}"
    rows = [
        ("trajectories", f"{facts.trajectories:,}"),
        ("tokens, each trajectory alone", f"{plan.raw_tokens:,}"),
        ("tokens, all prefixes shared in one trie", f"{plan.merged_tokens:,}"),
        ("tokens of the plan, shared within microbatches", f"{work:,}"),
        ("  of them repeated by the cuts", f"{repeated:,} ({repeated / plan.merged_tokens:.2%})"),
        ("compression by the plan", f"{plan.raw_tokens / work:.3f} x"),
        ("lower bound on tokens of any plan (gap)", f"{plan.lower_bound:,} ({gap:.2%})"),
        ("slots x replicas = microbatches", grid),
        ("capacity of a microbatch", f"{plan.capacity:,}"),
        ("sum of slot maxima", f"{slot_maxima:,}"),
        ("heaviest replica", f"{heaviest:,}"),
        ("calls a layer: most in a microbatch, in all", f"{max(calls)}, {sum(calls)}"),
        (f"replayed tokens, chunks of {plan.chunk_size}", f"{replay:,} ({replay / work:.2%})"),
    ]
    if fillers:
        repeating = plan.objective.total_work - work
        rows.append(("filler microbatches of weight zero", f"{fillers:,} ({repeating:,} tokens)"))
    return TextTable(title="Summary of the step", columns=(), rows=rows, totals=[])


_TREE_COLUMNS = (
    "tree",
    "trajec-\ntories",
    "raw\ntokens",
    "compact\ntokens",
    "ratio",
    "forks\non/off",
    "deep-\nest",
    "fan-\nout",
    "equal/\nprefix",
)


def trees_table(batch: TrajectoryBatch, forest: PrefixForest, chunk_size: int) -> TextTable:
    """Rollout trees, largest first, each by itself; then all together, as prefixes cross trees."""
    where: dict[str, list[int]] = {}
    for position, row in enumerate(forest.members.tolist()):
        where.setdefault(batch.tree_ids[row], []).append(position)
    facts = {
        name: ForestFacts.of(forest.subset(np.array(at)), chunk_size) for name, at in where.items()
    }
    largest = sorted(facts, key=lambda name: (-facts[name].raw_tokens, name))
    shown = largest if len(largest) <= MOST_ROWS else largest[: MOST_ROWS - 1]
    rows = [_tree_row(_short(name), facts[name]) for name in shown]
    if rest := [facts[name] for name in largest[len(shown) :]]:
        rows.append(_tree_row(f"{len(rest):,} smaller ones", _together(rest)))
    whole = ForestFacts.of(forest, chunk_size)
    return TextTable(
        title=f"Rollout trees ({len(facts):,})",
        columns=_TREE_COLUMNS,
        rows=rows,
        totals=[_tree_row("together", whole)],
        note=(
            f"Ratio: raw over compact. Forks on the chunk grid of {chunk_size} tokens, and off it. "
            "Deepest: most forks on one path. Equal: copies of an earlier trajectory; prefix: ends "
            f"where another goes on. Shared across, prefixes form {whole.roots:,} "
            f"{'tree' if whole.roots == 1 else 'trees'}."
        ),
    )


def _together(facts: list[ForestFacts]) -> ForestFacts:
    """Trees that share nothing with each other, as one."""
    total: Counter[str] = Counter()
    for f in facts:
        total.update({name: getattr(f, name) for name in ForestFacts.__dataclass_fields__})
    total["deepest_forks"] = max(f.deepest_forks for f in facts)
    total["fan_out"] = max(f.fan_out for f in facts)
    return ForestFacts(**total)


def _tree_row(name: str, facts: ForestFacts) -> tuple[str, ...]:
    return (
        name,
        f"{facts.trajectories:,}",
        f"{facts.raw_tokens:,}",
        f"{facts.compact_tokens:,}",
        f"{facts.compression:.2f}",
        f"{facts.forks_on_grid:,}/{facts.forks_off_grid:,}",
        f"{facts.deepest_forks:,}",
        f"{facts.fan_out:,}",
        f"{facts.duplicates:,}/{facts.strict_prefixes:,}",
    )


def load_table(plan: StepPlan) -> TextTable:
    """Slots by replicas: compact work of each microbatch, and the imbalance of Eq. 23."""
    work = works(plan)
    uneven = imbalance(work)
    totals = work.sum(axis=0)
    flat = ["*" if m.filler else "" for m in plan.microbatches]
    marks = [flat[j * plan.replicas : (j + 1) * plan.replicas] for j in range(plan.slots)]
    star = " * A filler: repeats a trajectory with weight zero." if any(flat) else ""
    shown, title = np.arange(plan.slots), "Load"
    if plan.slots > MOST_ROWS:
        # Equal imbalances keep slot order.
        shown = np.sort(np.argsort(-uneven, kind="stable")[:MOST_ROWS])
        title = f"Load: the {MOST_ROWS} least balanced of {plan.slots:,} slots"
    if plan.replicas <= MOST_REPLICAS:
        columns = tuple(f"replica\n{d}" for d in range(plan.replicas))
    else:
        columns = ("lightest", "mean", "heaviest")
    p50, p95 = np.quantile(uneven, [0.5, 0.95])
    return TextTable(
        title=f"{title} (compact tokens)",
        columns=("slot", *columns, "imbalance"),
        rows=[(f"{j}", *_loads(work[j], marks[j]), f"{uneven[j]:.3%}") for j in shown.tolist()],
        totals=[("total", *_loads(totals), f"{float(imbalance(totals)):.3%}")],
        note=(
            "Imbalance: heaviest replica over the mean, less one (Eq. 23). Within a slot, over all "
            f"slots: P50 {p50:.3%}, P95 {p95:.3%}, largest {uneven.max():.3%}. Microbatch number = "
            f"slot * {plan.replicas} + replica.{star}"
        ),
    )


def _loads(work: Int, marks: Sequence[str] | None = None) -> tuple[str, ...]:
    if len(work) <= MOST_REPLICAS:
        marks = marks or [""] * len(work)
        return tuple(f"{mark}{w:,}" for mark, w in zip(marks, work.tolist(), strict=True))
    return f"{work.min():,}", f"{work.mean():,.0f}", f"{work.max():,}"


_CALL_COLUMNS = ("sequences", "own rows", "replay", "states\nhanded out")


def step_calls_table(plan: StepPlan) -> TextTable:
    """The calls of one linear-attention layer over all microbatches of the step."""
    calls = step_call_facts(plan.microbatches)
    return TextTable(
        title="Linear-attention calls of a layer, all microbatches",
        columns=("call", "micro-\nbatches", *_CALL_COLUMNS),
        rows=[(f"{r}", f"{c.microbatches:,}", *_call_row(c)) for r, c in enumerate(calls, 1)],
        totals=[("total", "", *_call_row(sum(calls, start=NO_CALL)))],
    )


def microbatch_calls_table(plan: StepPlan, number: int) -> TextTable:
    """The calls of one microbatch."""
    microbatch = plan.microbatches[number]
    calls = call_facts(microbatch.calls, microbatch.forest.segment_lengths)
    place = f"slot {microbatch.slot}, replica {microbatch.replica}"
    return TextTable(
        title=f"Calls of microbatch {number} ({place}; {len(microbatch.members):,} trajectories)",
        columns=("call", *_CALL_COLUMNS),
        rows=[(f"{r}", *_call_row(c)) for r, c in enumerate(calls, 1)],
        totals=[("total", *_call_row(sum(calls, start=NO_CALL)))],
        note="Choose another with --microbatch; this one is in the pictures.",
    )


def _call_row(call: CallFacts) -> tuple[str, ...]:
    counts = (call.sequences, call.own_rows, call.replay_rows, call.states)
    return tuple(f"{n:,}" for n in counts)


def _short(name: str) -> str:
    """A name cut in its middle: ids differ at either end."""
    if len(name) <= NAME_WIDTH:
        return name
    tail = (NAME_WIDTH - 1) // 2
    return f"{name[: NAME_WIDTH - 1 - tail]}…{name[-tail:]}"


def for_terminal(text: TextTable) -> Group:
    """The table as rich prints it, between its title and its note; fits 80 columns."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_header=bool(text.columns)
    )
    for number, column in enumerate(text.columns or ("", "")):
        # Where it is narrow, names are folded; numbers stay whole.
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(column, justify=justify, no_wrap=number > 0, vertical="bottom")
    # Ids come from files; square brackets in them are no markup.
    for row in text.rows:
        table.add_row(*map(Text, row))
    table.add_section()
    for row in text.totals:
        table.add_row(*(Text(cell, style="bold") for cell in row))
    note = [Text(f"{text.note}\n", style="dim")] if text.note else []
    return Group(Text(text.title, style="bold"), table, *note)
