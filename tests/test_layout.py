"""The compact layout against a token-by-token simulation of what every operator would read."""

import dataclasses

import numpy as np
import pytest

from harts.errors import PlanError
from harts.forest import PrefixForest
from harts.layout import CompactLayout, build_layout
from harts.planning.calls import CallPlan, PackedSequence
from harts.trajectories import TrajectoryBatch
from tests.forests import batch_of, lay_out, random_batch

Prefix = tuple[int, ...]


def true_prefixes(batch: TrajectoryBatch, layout: CompactLayout) -> dict[int, Prefix]:
    """The token prefix that each row stands for, by the map m alone."""
    prefix: dict[int, Prefix] = {}
    for i, row in enumerate(layout.members.tolist()):
        tokens = tuple(batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].tolist())
        rows = layout.member_rows[layout.member_offsets[i] : layout.member_offsets[i + 1]]
        for n, r in enumerate(rows.tolist()):
            assert prefix.setdefault(r, tokens[: n + 1]) == tokens[: n + 1]
    assert sorted(prefix) == list(range(layout.compact_rows))
    return prefix


def assert_rounds_simulate(layout: CompactLayout, prefix: dict[int, Prefix]) -> None:
    """Run every packed call with "the tokens so far" as the recurrent state."""
    bank: list[Prefix] = []
    written: list[int] = []
    for packed in layout.rounds:
        made: list[Prefix] = []
        wanted = packed.boundaries.tolist()
        own = set(packed.own_positions.tolist())
        for i in range(len(packed.cu_seqlens) - 1):
            number = int(packed.initial_state[i])
            state: Prefix = () if number < 0 else bank[number]
            assert len(state) % layout.chunk_size == 0
            lo, hi = packed.cu_seqlens[i : i + 2].tolist()
            assert hi > lo
            replayed = [j for j in range(lo, hi) if j not in own]
            assert replayed == list(range(lo, lo + len(replayed)))
            assert len(replayed) < layout.chunk_size
            for j in range(lo, hi):
                if (i, (j - lo) // layout.chunk_size) in map(tuple, wanted) and (
                    (j - lo) % layout.chunk_size == 0
                ):
                    made.append(state)
                row = int(packed.packed_rows[j])
                state = (*state, int(layout.tokens[row]))
                assert state == prefix[row]
                if j in own:
                    written.append(row)
            if [i, (hi - lo) / layout.chunk_size] in wanted:
                made.append(state)
        assert len(made) == len(wanted)
        bank += made
    assert written == list(range(layout.compact_rows))


def assert_layout_is_right(batch: TrajectoryBatch, layout: CompactLayout) -> None:
    prefix = true_prefixes(batch, layout)
    for row, tokens in prefix.items():
        assert layout.tokens[row] == tokens[-1]
        assert layout.positions[row] == len(tokens) - 1
    occurrences = np.bincount(layout.member_rows, minlength=layout.rows)
    assert layout.multiplicity.tolist() == occurrences.tolist()
    assert layout.multiplicity.sum() == batch.lengths[layout.members].sum()
    for i in range(len(layout.sequence_offsets) - 1):
        a, b = layout.ancestor_offsets[i : i + 2]
        before = layout.ancestor_rows[a:b].tolist()
        for row in range(*layout.sequence_offsets[i : i + 2].tolist()):
            assert tuple(layout.tokens[[*before, row]].tolist()) == prefix[row]
            before.append(row)
    assert_rounds_simulate(layout, prefix)


@pytest.mark.parametrize("block", range(20))
def test_layout_equals_simulation_on_ten_thousand_random_forests(block: int) -> None:
    rng = np.random.default_rng(1000 + block)
    for _ in range(500):
        batch = random_batch(rng, trajectories=int(rng.integers(1, 7)), max_length=14)
        _, _, layout = lay_out(batch, row_multiple=int(rng.integers(1, 5)))
        assert_layout_is_right(batch, layout)


def test_permuting_the_input_keeps_rows_and_permutes_outputs() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        batch = random_batch(rng)
        order = rng.permutation(len(batch))
        _, _, plain = lay_out(batch)
        _, _, permuted = lay_out(batch.select(order))
        assert np.array_equal(plain.tokens, permuted.tokens)
        assert np.array_equal(plain.multiplicity, permuted.multiplicity)
        for new, old in enumerate(order.tolist()):
            a = plain.member_rows[plain.member_offsets[old] : plain.member_offsets[old + 1]]
            b = permuted.member_rows[
                permuted.member_offsets[new] : permuted.member_offsets[new + 1]
            ]
            assert np.array_equal(a, b)


def test_an_extra_logprob_for_the_last_node_is_never_made() -> None:
    """Peers' fault 7: the last node has no next token; one-token trajectories have no log-prob."""
    batch = batch_of([[5, 6, 7], [5], [5, 6]])
    _, _, layout = lay_out(batch)
    assert layout.targets.tolist() == [6, 7, 6]
    assert layout.target_rows.tolist() == [0, 1, 0]
    assert layout.position_offsets.tolist() == [0, 2, 2, 3]


def test_a_fork_row_has_every_label_of_its_branches() -> None:
    """Peers' fault 8: one row, several targets, none lost and none doubled (P -> {A, B} -> R)."""
    batch = batch_of([[1, 2, 9], [1, 3, 9]])
    _, _, layout = lay_out(batch)
    assert layout.targets.tolist() == [2, 9, 3, 9]
    rows = layout.target_rows.tolist()
    assert rows[0] == rows[2]
    assert rows[1] != rows[3]


def test_padding_rows_belong_to_nothing() -> None:
    _, _, layout = lay_out(batch_of([[4, 4, 4]]), row_multiple=8)
    assert (layout.compact_rows, layout.rows) == (3, 8)
    assert layout.multiplicity.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert layout.tokens[3:].tolist() == [0] * 5


def test_a_state_that_no_earlier_round_made_is_refused() -> None:
    batch = batch_of([[1] * 5 + [2], [1] * 5 + [3]])
    forest, calls, _ = lay_out(batch)
    first, second = calls.rounds
    asks_nothing = dataclasses.replace(first[0], boundaries=())
    with pytest.raises(PlanError, match="no round before"):
        build_layout(batch, forest, CallPlan(chunk_size=4, rounds=((asks_nothing,), second)))


def test_an_anchor_one_chunk_off_is_refused() -> None:
    batch = batch_of([[1] * 9 + [2], [1] * 9 + [3]])
    forest, calls, _ = lay_out(batch)
    first, (side,) = calls.rounds
    early = dataclasses.replace(side, replay=(4, 9))
    with pytest.raises(PlanError, match="starts at position 4"):
        build_layout(batch, forest, CallPlan(chunk_size=4, rounds=(first, (early,))))


def test_a_plan_that_misses_a_segment_is_refused() -> None:
    batch = batch_of([[1, 2], [1, 3]])
    forest, _, _ = lay_out(batch)
    only = PackedSequence(chain=(0,), initial_state=None, replay=(0, 0), boundaries=())
    with pytest.raises(PlanError, match="each of 3 exactly once"):
        build_layout(batch, forest, CallPlan(chunk_size=4, rounds=((only,),)))


def test_subset_layout_numbers_members_by_input_row() -> None:
    batch = batch_of([[3], [1, 2], [1, 4], [2]])
    forest = PrefixForest.build(batch).subset(np.array([0, 1, 3]))
    assert forest.members.tolist() == [1, 2, 0]
