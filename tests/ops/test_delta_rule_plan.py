"""The GPU form's plan of rows, chunks and states, the sum of value heads, and the choice of a form.

No GPU needed.
"""

import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.errors import InputError, UnsupportedError
from harts.ops.delta_rule import (
    choose_backend,
    chunk_delta_rule,
    delta_rule_backend,
    dispatch,
    tree_delta_rule,
)
from harts.ops.delta_rule.gpu.parts import sum_groups
from harts.ops.delta_rule.gpu.row_plan import RowPlan, plan_packed, plan_tree
from harts.ops.tree_index import TreeIndex
from tests.forests import lay_out, random_batch
from tests.ops.test_delta_rule import FOREST, build_tree

CPU = torch.device("cpu")


def walk_rows(plan: RowPlan) -> list[list[tuple[int, int, int]]]:
    """(buffer row, chunk number, phase) of every row of every sequence, by the pieces."""
    pieces, size = plan.states.pieces, plan.states.chunk_size
    walks = []
    for first, end in pairwise(plan.states.sequences.piece_offsets.tolist()):
        rows = []
        for piece in range(first, end):
            row, length, chunk = (
                int(x[piece]) for x in (pieces.rows, pieces.lengths, pieces.chunks)
            )
            rows += [(row + i, chunk + i // size, i % size) for i in range(length)]
        walks.append(rows)
    return walks


def listed_rows(plan: RowPlan) -> list[tuple[int, int, int]]:
    """(buffer row, chunk number, phase) of every row, by the chunk lists."""
    size, found, number = plan.states.chunk_size, [], 0
    for part, base in ((plan.in_place, 0), (plan.copied_chunks, plan.rows)):
        bounds = part.cu_seqlens.tolist()
        for segment, chunk in part.chunks.tolist():
            first = bounds[segment] + chunk * size
            last = min(first + size, bounds[segment + 1])
            found += [(base + row, number, row - first) for row in range(first, last)]
            number += 1
    assert number == plan.states.chunks
    return found


def packed_rows_of(index: TreeIndex) -> list[list[int]]:
    """Physical rows of every sequence, replay first, by the rounds."""
    return [
        packed.packed_rows[start:end].tolist()
        for packed in index.rounds
        for start, end in pairwise(packed.cu_seqlens.tolist())
    ]


def random_index(seed: int, size: int) -> TreeIndex:
    batch = random_batch(
        np.random.default_rng(seed), trajectories=12, max_length=40, chunk_size=size
    )
    return TreeIndex.from_layout(lay_out(batch, chunk_size=size, row_multiple=8)[2])


@pytest.mark.parametrize("seed", range(12))
def test_pieces_and_chunk_lists_hold_every_packed_row_once_and_agree(seed: int) -> None:
    index = random_index(seed, (2, 4, 8)[seed % 3])
    plan = plan_tree(index)
    walks = walk_rows(plan)
    assert sorted(row for walk in walks for row in walk) == sorted(listed_rows(plan))
    physical = [*range(plan.rows), *plan.copied.rows.tolist()]
    assert [[physical[row] for row, _, _ in walk] for walk in walks] == packed_rows_of(index)
    # State passes choose the part by a piece's first row.
    assert plan.states.copied_from == plan.rows
    for first, length in zip(plan.states.pieces.rows, plan.states.pieces.lengths, strict=True):
        assert first >= plan.rows or first + length <= plan.rows
    # Phase and chunk follow the sequence, not the piece.
    for walk in walks:
        assert [phase for _, _, phase in walk] == [i % index.chunk_size for i in range(len(walk))]


@pytest.mark.parametrize("seed", range(12))
def test_only_chunks_with_replay_are_copied(seed: int) -> None:
    index = random_index(seed, 4)
    plan = plan_tree(index)
    replay = [
        rows
        for rows, own in zip(
            packed_rows_of(index), (index.sequence_offsets.diff()).tolist(), strict=True
        )
        if len(rows) > own
    ]
    assert plan.copied_rows == sum(min(len(rows), 4) for rows in replay)
    own = plan.copied.rows[plan.copied.own]
    assert torch.equal(own, plan.copied.own_targets)
    assert own.unique().numel() == own.numel()


@pytest.mark.parametrize("seed", range(8))
def test_folding_by_the_plan_adds_every_copy_to_its_row(seed: int) -> None:
    plan = plan_tree(random_index(seed, 4))
    copied = plan.copied
    values = torch.arange(1.0, plan.copied_rows + 1)
    expected = torch.zeros(plan.rows).index_add(0, copied.rows, values)
    got = torch.zeros(plan.rows)
    spans = list(pairwise(copied.offsets.tolist()))
    for target, (first, end) in zip(copied.targets.tolist(), spans, strict=True):
        order = copied.copies[first:end].tolist()
        assert order == sorted(order)
        got[target] = sum(values[copy] for copy in order)
    assert torch.equal(got, expected)
    touched = {row for row, _, _ in listed_rows(plan) if row < plan.rows}
    fresh = {t for t, f in zip(copied.targets.tolist(), copied.fresh.tolist(), strict=True) if f}
    assert fresh == set(range(plan.used_rows)) - touched


@pytest.mark.parametrize("seed", range(8))
def test_states_start_where_they_were_handed_out(seed: int) -> None:
    index = random_index(seed, 4)
    plan = plan_tree(index)
    pieces, slots = plan.states.pieces, plan.states.pieces.slots.tolist()
    handed = [slot for slot in slots if slot >= 0]
    assert sorted(handed) == list(range(plan.states.slots))
    initial = plan.states.sequences.initial_slots.tolist()
    for piece, slot in enumerate(slots):
        first, end = pieces.consumer_offsets[piece : piece + 2].tolist()
        expected = [i for i, source in enumerate(initial) if source == slot and slot >= 0]
        assert pieces.consumers[first:end].tolist() == expected
    # In the second pass every walk starts at a state of the bank and ends at the next one.
    walks = pairwise(plan.states.segments.piece_offsets.tolist())
    for first, end in walks:
        assert all(slot < 0 for slot in slots[first : end - 1])
    assert plan.states.segments.piece_offsets[-1] == len(slots)


def test_a_packed_call_hands_out_each_state_once() -> None:
    packed = plan_packed(
        (0, 9, 13), ((0, 2), (0, 0), (1, 1), (0, 2)), rows=15, chunk_size=4, device=CPU
    )
    states = packed.plan.states
    assert packed.boundary_slots.tolist() == [2, 3, 4, 2]
    # A whole number of chunks: the final state of sequence 1 is its boundary state.
    assert packed.final_slots.tolist() == [5, 4]
    assert states.pieces.lengths.tolist() == [0, 8, 1, 4]
    assert states.pieces.slots.tolist() == [3, 2, 5, 4]
    assert states.segments.initial_slots.tolist() == [0, 3, 2, 1]


def test_replay_of_a_whole_chunk_is_refused() -> None:
    tree = build_tree(FOREST, size=4)
    with pytest.raises(InputError, match="fewer than the chunk size 2"):
        plan_tree(replace(tree.index, chunk_size=2))


# --- the choice --------------------------------------------------------------------------------


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def rows_like_a_gpu(dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> tuple[Tensor, ...]:
    query = torch.zeros(3, 2, dim, dtype=dtype).as_subclass(OnGpu)
    return query, query, torch.zeros(3, 2, dim)


@pytest.fixture
def _fla_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_fla_version", lambda: dispatch.FLA_VERSION)
    monkeypatch.setattr(dispatch, "find_spec", lambda _: object())


@pytest.mark.usefixtures("_fla_and_triton")
def test_a_gpu_with_fla_gets_the_split_form() -> None:
    rows = rows_like_a_gpu()
    assert choose_backend(*rows, chunk_size=64) == "split"
    assert choose_backend(*rows, chunk_size=64, backend="reference") == "reference"
    with delta_rule_backend("rounds"):
        assert choose_backend(*rows, chunk_size=64) == "rounds"
        assert choose_backend(*rows, chunk_size=64, backend="split") == "split"
    assert choose_backend(*rows, chunk_size=64) == "split"


@pytest.mark.usefixtures("_fla_and_triton")
def test_gated_deltanet_is_chosen_as_kda_is() -> None:
    query, value, _ = rows_like_a_gpu()
    assert choose_backend(query, value, torch.zeros(3, 2), chunk_size=64) == "split"


@pytest.mark.usefixtures("_fla_and_triton")
@pytest.mark.parametrize(
    ("rows", "chunk_size", "message"),
    [
        (rows_like_a_gpu(torch.float32), 64, "bfloat16 or float16"),
        (rows_like_a_gpu(dim=96), 64, "K is 96"),
        (rows_like_a_gpu(), 16, "chunk size of KDA is 16"),
    ],
)
def test_what_the_gpu_form_does_not_take_goes_to_the_reference_or_is_refused(
    rows: tuple[Tensor, ...], chunk_size: int, message: str
) -> None:
    assert choose_backend(*rows, chunk_size=chunk_size) == "reference"
    with pytest.raises(UnsupportedError, match=message):
        choose_backend(*rows, chunk_size=chunk_size, backend="split")


@pytest.mark.usefixtures("_fla_and_triton")
def test_another_version_of_fla_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_fla_version", lambda: "0.7.1")
    with pytest.raises(UnsupportedError, match=r"0\.6\.0 and found 0\.7\.1"):
        choose_backend(*rows_like_a_gpu(), chunk_size=64)
    assert choose_backend(*rows_like_a_gpu(), chunk_size=64, backend="reference") == "reference"


def test_without_a_gpu_the_reference_runs_and_a_gpu_form_is_refused() -> None:
    rows = torch.zeros(3, 2, 64), torch.zeros(3, 2, 64), torch.zeros(3, 2, 64)
    assert choose_backend(*rows, chunk_size=64) == "reference"
    with pytest.raises(UnsupportedError, match="not on a GPU"):
        choose_backend(*rows, chunk_size=64, backend="split")
    with pytest.raises(UnsupportedError, match="one of"):
        choose_backend(*rows, chunk_size=64, backend="fast")
    columns = (*rows, rows[2], torch.zeros(3, 2))
    with pytest.raises(UnsupportedError, match="backend 'split'"):
        chunk_delta_rule(*columns, cu_seqlens=torch.tensor([0, 3]), backend="split")
    assert choose_backend(*rows, chunk_size=64, backend="rounds") == "rounds"
    tree = build_tree(FOREST)
    rows = [torch.zeros(tree.index.rows, 2, 4)] * 4
    with delta_rule_backend("split"), pytest.raises(UnsupportedError, match="backend 'split'"):
        tree_delta_rule(*rows, torch.zeros(tree.index.rows, 2), index=tree.index)


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._log_once.cache_clear()
    rows = torch.zeros(3, 2, 64), torch.zeros(3, 2, 64), torch.zeros(3, 2, 64)
    with caplog.at_level(logging.INFO, logger="harts.ops.delta_rule"):
        for _ in range(2):
            choose_backend(*rows, chunk_size=64)
    assert [record.message for record in caplog.records] == [
        "delta rule backend: reference (the tensors are on cpu, not on a GPU)"
    ]


@pytest.mark.parametrize(("tensors", "groups"), [(1, 2), (1, 6), (2, 2), (2, 6)])
def test_gradients_and_value_heads_are_added_in_float32_and_rounded_once(
    tensors: int, groups: int
) -> None:
    x = torch.randn(tensors, 50, groups, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.float().view(tensors, 50, 2, groups // 2, 16).sum((0, 3)).bfloat16()
    assert torch.equal(sum_groups(x, 2), expected)
