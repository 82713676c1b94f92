"""Trajectories from files and memory: read as written, and what is wrong is told in a sentence."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from harts.errors import InputError
from harts.trajectories import (
    TrajectoryBatch,
    concatenate,
    from_lists,
    from_padded,
    read_trajectories,
    write_trajectories,
)

ARRAYS = ("tokens", "offsets", "loss_mask", "rewards")
OPTIONAL = ("logprobs", "ref_logprobs", "advantages", "identity")


def assert_equal(first, second, extra=True):
    for name in ARRAYS + OPTIONAL:
        one, other = getattr(first, name), getattr(second, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            np.testing.assert_array_equal(one, other, err_msg=name)
    assert first.tree_ids == second.tree_ids
    assert first.trajectory_ids == second.trajectory_ids
    if extra:
        assert (first.extra is None) == (second.extra is None)
        if first.extra is not None:
            assert first.extra.to_pydict() == second.extra.to_pydict()


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = sum(lengths)
    optional = {}
    for name in ("logprobs", "ref_logprobs", "advantages"):
        if draw(st.booleans()):
            optional[name] = rng.normal(size=size).astype(np.float32)
    if draw(st.booleans()):
        optional["identity"] = rng.integers(-(2**63), 2**63 - 1, size)
    if draw(st.booleans()):
        notes = st.lists(st.text(max_size=4) | st.just("2024-01-01"), min_size=1, max_size=1)
        optional["extra"] = pa.table(
            {"note": [draw(notes)[0] for _ in lengths], "turns": rng.integers(0, 9, len(lengths))}
        )
    rewards = rng.normal(size=len(lengths))
    rewards[rng.random(len(lengths)) < 0.3] = np.nan
    return TrajectoryBatch.from_flat(
        rng.integers(0, 2**31, size),
        np.cumsum([0, *lengths]),
        loss_mask=rng.random(size) < 0.5,
        rewards=rewards,
        tree_ids=[f"tree {rng.integers(3)}" for _ in lengths],
        trajectory_ids=[str(row * 7) for row in range(len(lengths))],
        **optional,
    )


def padded(batch, side):
    shape = (len(batch), int(batch.lengths.max()) + 2)
    columns = np.arange(shape[1])[None]
    lengths = batch.lengths[:, None]
    kept = columns < lengths if side == "right" else columns >= shape[1] - lengths
    data = {"attention_mask": kept.astype(np.int64), "rewards": batch.rewards}
    for name, attribute in {"input_ids": "tokens", "loss_mask": "loss_mask"}.items():
        data[name] = np.zeros(shape, getattr(batch, attribute).dtype)
        data[name][kept] = getattr(batch, attribute)
    for name in OPTIONAL:
        if getattr(batch, name) is not None:
            data[name] = np.full(shape, 99, getattr(batch, name).dtype)
            data[name][kept] = getattr(batch, name)
    data["tree_ids"] = np.array(batch.tree_ids)
    data["trajectory_ids"] = np.array(batch.trajectory_ids)
    return data


# Round trips


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([".parquet", ".jsonl"]), st.sampled_from(["left", "right"]))
def test_a_batch_survives_files_and_padding(batch, extension, side):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rollouts{extension}"
        write_trajectories(batch, path)
        assert os.listdir(folder) == [path.name]
        assert_equal(read_trajectories(path), batch)
    assert_equal(from_padded(padded(batch, side)), batch, extra=False)


@settings(max_examples=20, deadline=None)
@given(st.lists(batches(), min_size=2, max_size=3))
def test_several_files_are_one_batch_in_order(parts):
    shared = {name for name in OPTIONAL if all(getattr(p, name) is not None for p in parts)}
    parts = [
        dataclasses.replace(p, **{n: None for n in OPTIONAL if n not in shared}) for p in parts
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.{'parquet' if i % 2 else 'jsonl'}" for i in range(len(parts))]
        for part, path in zip(parts, paths, strict=True):
            write_trajectories(part, path)
        read = read_trajectories(paths)
    assert_equal(read, concatenate(parts))
    assert len(read) == sum(map(len, parts))
    assert read.provenance.describe(len(parts[0])) == f"file {str(paths[1])!r}, row 0"


def test_real_files_keep_their_rows_and_unknown_columns(shared_data):
    batch = read_trajectories(shared_data / "tot_game24.parquet")
    table = pq.read_table(shared_data / "tot_game24.parquet")
    assert (len(batch), batch.raw_tokens) == (6_898, 770_635)
    assert batch.extra.column_names == ["source"]
    for row in (0, 3_456, 6_897):
        assert batch.trajectory(row).tolist() == table["token_ids"][row].as_py()
        assert batch.tree_ids[row] == table["tree_id"][row].as_py()


@pytest.mark.parametrize(
    "list_type",
    [
        pa.list_(pa.int8()),
        pa.list_(pa.int16()),
        pa.list_(pa.int64()),
        pa.list_(pa.uint8()),
        pa.list_(pa.uint32()),
        pa.list_(pa.uint64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.int32(), 2),
    ],
    ids=str,
)
def test_every_integer_list_type_is_read(tmp_path, list_type):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"token_ids": pa.array([[1, 2], [3, 4]], list_type)}), path)
    batch = read_trajectories(path)
    assert batch.tokens.tolist() == [1, 2, 3, 4]
    assert batch.tokens.dtype == np.int32
    assert batch.offsets.tolist() == [0, 2, 4]


def test_a_file_of_many_row_groups_is_read_in_order(tmp_path):
    rows = [[row] * (row % 3 + 1) for row in range(50)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"token_ids": rows}), path, row_group_size=7)
    assert read_trajectories(path).tokens.tolist() == [t for row in rows for t in row]


def test_defaults_of_the_file_format(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"token_ids": [5, 6, 7]}\n\n{"token_ids": [8]}\n')
    batch = read_trajectories(str(path))
    assert batch.loss_mask.tolist() == [False, True, True, False]
    assert np.isnan(batch.rewards).all()
    assert batch.tree_ids == ("0", "0")
    assert batch.trajectory_ids == ("0", "1")
    assert all(getattr(batch, name) is None for name in (*OPTIONAL, "extra"))


def test_a_json_line_longer_than_a_block_of_the_reader(tmp_path):
    path = tmp_path / "a.jsonl"
    long = list(range(100_000, 1_100_000))
    path.write_text("".join(json.dumps({"token_ids": t}) + "\n" for t in ([1], long, [2])))
    assert path.stat().st_size > 1 << 22
    batch = read_trajectories(path)
    assert batch.lengths.tolist() == [1, 1_000_000, 1]
    assert batch.trajectory(1)[-1] == 1_099_999


@pytest.mark.parametrize("mask", ["[1, 0]", "[true, false]", "[1.0, 0.0]"])
def test_json_masks_may_be_integers_booleans_or_floats(tmp_path, mask):
    path = tmp_path / "a.jsonl"
    row = f'{{"token_ids": [1, 2], "loss_mask": {mask}, "reward": NaN, "tree_id": 4}}\n'
    path.write_text(row * 2)
    batch = read_trajectories(path)
    assert batch.loss_mask.tolist() == [True, False] * 2
    assert batch.tree_ids == ("4", "4")
    assert np.isnan(batch.rewards).all()


def test_json_text_that_looks_like_a_date_stays_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"token_ids": [1], "tree_id": "2024-01-01", "day": "2024-01-01"}\n')
    batch = read_trajectories(path)
    assert batch.tree_ids == ("2024-01-01",)
    assert batch.extra["day"].to_pylist() == ["2024-01-01"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ([True, False, None], [1, 0, np.nan]),
        ([None, True, False], [np.nan, 1, 0]),
        ([True, 0.5, None], [1, 0.5, np.nan]),
        ([1, 0.5, True], [1, 0.5, 1]),
    ],
)
def test_json_rewards_may_be_booleans(tmp_path, written, read):
    path = tmp_path / "a.jsonl"
    write_raw(path, {"token_ids": [[1], [2, 3], [4]], "reward": written, "tree_id": [1, 1, 2]})
    batch = read_trajectories(path)
    np.testing.assert_array_equal(batch.rewards, read)
    assert batch.tree_ids == ("1", "1", "2")
    assert batch.tokens.tolist() == [1, 2, 3, 4]
    assert batch.extra is None


def test_an_unknown_json_column_of_mixed_types_is_carried_as_json_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"token_ids": [1], "meta": 1, "turns": 3}\n'
        '{"token_ids": [2, 3], "meta": "x"}\n'
        '{"token_ids": [4], "meta": {"a": [true]}, "day": "2024-01-01"}\n'
        '{"token_ids": [5], "meta": null, "turns": 4, "reward": 1}\n'
    )
    batch = read_trajectories(path)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.extra.to_pydict() == {
        "meta": ["1", '"x"', '{"a": [true]}', None],
        "turns": [3, None, None, 4],
        "day": [None, None, "2024-01-01", None],
    }
    assert batch.rewards[3] == 1
    write_trajectories(batch, tmp_path / "b.jsonl")
    assert_equal(read_trajectories(tmp_path / "b.jsonl"), batch)


def test_token_columns_beside_a_mixed_column_may_start_late(tmp_path):
    path = tmp_path / "a.jsonl"
    row = '{"token_ids": [1, 2], "logprobs": %s, "meta": %s}\n'
    path.write_text(row % ("[0, -1]", "1") + row % ("[0.5, -2]", '"x"'))
    assert read_trajectories(path).logprobs.tolist() == [0, -1, 0.5, -2]


MIXED_ROWS = {
    "reward": ('"reward": 1', '"reward": "good"', 'expected a number, got "good". Store rewards'),
    "tree_id": ('"tree_id": "a"', '"tree_id": 2', "text, as in the rows before, got 2. Store"),
    "trajectory_id": (
        '"trajectory_id": 7',
        '"trajectory_id": "b"',
        'an integer, as in the rows before, got "b". Store the column as strings',
    ),
    "loss_mask": (
        '"loss_mask": [true]',
        '"loss_mask": [1]',
        "true or false, as before, got 1. Write the whole column",
    ),
}


@pytest.mark.parametrize("column", MIXED_ROWS)
def test_mixed_types_of_a_known_column_are_told_with_the_remedy(tmp_path, column):
    first, second, part = MIXED_ROWS[column]
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"token_ids": [1], {first}}}\n{{"token_ids": [1], {second}}}\n')
    message = message_of(read_trajectories, path)
    assert f"file {str(path)!r}, row 1 (line 2), column {column!r}" in message
    assert part in message
    assert "one JSON object a line" not in message


def test_errors_read_well(tmp_path):
    """Values as the file has them, one full stop, and tokens before what only names a row."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"token_ids": [1, 2], "loss_mask": [0, 2]}\n')
    assert "got 2. " in message_of(read_trajectories, path)
    path.write_text('{"token_ids": [1], "reward": 1, "reward": 2}\n')
    assert "key 'reward' comes twice" in message_of(read_trajectories, path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing of the kind PAR1")
    assert ".." not in message_of(read_trajectories, tmp_path / "a.parquet")
    for name in ("b.jsonl", "b.parquet"):
        write_raw(tmp_path / name, {"token_ids": [[1], []], "tree_id": ["a", None]})
        assert "an empty trajectory" in message_of(read_trajectories, tmp_path / name)


@pytest.mark.parametrize("extension", [".parquet", ".jsonl"])
def test_an_optional_column_that_is_null_everywhere_is_absent(tmp_path, extension):
    path = tmp_path / f"a{extension}"
    write_raw(path, {"token_ids": [[1], [2]], "logprobs": [None, None], "reward": [None, 0.5]})
    batch = read_trajectories(path)
    assert batch.logprobs is None
    assert batch.rewards[1] == 0.5


# Errors: one sentence each, that says where, what was expected, what came and what to change

GOOD = {"token_ids": [[1, 2, 3], [4, 5]]}
ROW_ERRORS = {
    "null token list": ({"token_ids": [[1], None]}, "row 1", "token_ids", "got null"),
    "null token": ({"token_ids": [[1], [2, None]]}, "row 1", "token_ids", "position 1"),
    "empty trajectory": ({"token_ids": [[1], []]}, "row 1", "token_ids", "an empty trajectory"),
    "negative token": ({"token_ids": [[1], [2, -3]]}, "row 1", "token_ids", "got -3"),
    "token beyond int32": ({"token_ids": [[1, 2**31]]}, "row 0", "token_ids", "got 2147483648"),
    "short mask": ({**GOOD, "loss_mask": [[0, 1, 1], [1]]}, "row 1", "loss_mask", "expected 2"),
    "mask of 2": ({**GOOD, "loss_mask": [[0, 1, 1], [0, 2]]}, "row 1", "loss_mask", "position 1"),
    "half mask": ({**GOOD, "loss_mask": [[0, 0.5, 1], [0, 1]]}, "row 0", "loss_mask", "got 0.5"),
    "missing log-probs": ({**GOOD, "logprobs": [None, [0.0, 0.0]]}, "row 0", "logprobs", "null"),
    "long log-probs": ({**GOOD, "logprobs": [[0.0] * 3, [0.0] * 3]}, "row 1", "logprobs", "got 3"),
    "NaN log-prob": (
        {**GOOD, "logprobs": [[0.0, np.nan, 0.0], [0.0, 0.0]]},
        "row 0",
        "logprobs",
        "position 1",
    ),
    "NaN advantage": (
        {**GOOD, "advantages": [[0.0] * 3, [np.nan, 0.0]]},
        "row 1",
        "advantages",
        "got nan",
    ),
    "infinite advantage": (
        {**GOOD, "advantages": [[0.0] * 3, [0.0, 1e300]]},
        "row 1",
        "advantages",
        "got inf",
    ),
    "infinite reward": ({**GOOD, "reward": [1.0, np.inf]}, "row 1", "reward", "got inf"),
    "null tree": ({**GOOD, "tree_id": ["a", None]}, "row 1", "tree_id", "got null"),
    "text tokens": ({"token_ids": [["a"], ["b"]]}, "row", "token_ids", "integers from 0"),
    "float tokens": ({"token_ids": [[1.5], [2.5]]}, "row", "token_ids", "integers from 0"),
    "scalar tokens": ({"token_ids": [1, 2]}, "row", "token_ids", "list of integers"),
    "text reward": ({**GOOD, "reward": ["good", "bad"]}, "row", "reward", "a number"),
    "list tree": ({**GOOD, "tree_id": [[1], [2]]}, "row", "tree_id", "text or an integer"),
    "missing column": ({"tokens": [[1], [2]]}, "file", "token_ids", "'tokens'"),
}


def write_raw(path, columns):
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def message_of(call, *args):
    with pytest.raises(InputError) as caught:
        call(*args)
    message = str(caught.value)
    assert "expected" in message
    assert "got" in message
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("extension", [".parquet", ".jsonl"])
@pytest.mark.parametrize("case", ROW_ERRORS)
def test_bad_rows_are_told_by_file_row_and_column(tmp_path, case, extension):
    columns, row, column, got = ROW_ERRORS[case]
    path = tmp_path / f"bad{extension}"
    write_raw(path, columns)
    message = message_of(read_trajectories, path)
    assert f"file {str(path)!r}" in message
    assert row in message
    assert f"column {column!r}" in message
    assert got in message


FILE_ERRORS = {
    "empty.parquet": (b"", "a readable Parquet file"),
    "garbage.parquet": (b"PAR1 nothing of the kind PAR1", "a readable Parquet file"),
    "empty.jsonl": (b"", "at least one row"),
    "blank.jsonl": (b"\n\n", "at least one row"),
    "broken.jsonl": (b'{"token_ids": [1]}\n{"token_ids": [2\n', "row 1 (line 2)"),
    "array.json": (b'[{"token_ids": [1]}]\n', "expected a JSON object, got list"),
    "number.jsonl": (b'{"token_ids": [1]}\n\n7\n', "row 1 (line 3)"),
    "pretty.json": (b'{\n  "token_ids": [1]\n}\n', "row 0 (line 1)"),
    "late_text.jsonl": (b'{"token_ids": [1]}\n{"token_ids": [1, "x"]}\n', "row 1 (line 2)"),
    "ids.jsonl": (b'{"token_ids": [1], "tree_id": "a"}\n{"token_ids": [1], "tree_id": 2}\n', "row"),
    "rows.csv": (b"token_ids\n", "ends in .parquet, .jsonl, .json"),
    "noextension": (b"", "no extension"),
}


@pytest.mark.parametrize("name", FILE_ERRORS)
def test_unreadable_files_are_told(tmp_path, name):
    content, part = FILE_ERRORS[name]
    path = tmp_path / name
    path.write_bytes(content)
    message = message_of(read_trajectories, path)
    assert f"file {str(path)!r}" in message
    assert part in message


def test_missing_files_directories_and_no_files_are_told(tmp_path):
    assert "no such file" in message_of(read_trajectories, tmp_path / "none.parquet")
    (tmp_path / "folder.parquet").mkdir()
    assert "a directory" in message_of(read_trajectories, tmp_path / "folder.parquet")
    assert "at least one file" in message_of(read_trajectories, [])


def test_a_parquet_file_without_rows_is_told(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"token_ids": pa.array([], pa.list_(pa.int32()))}), path)
    assert "no rows" in message_of(read_trajectories, path)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_parquet_files_are_told(tmp_path, damage):
    path = tmp_path / "a.parquet"
    rows = np.random.default_rng(0).integers(0, 2**31, (64, 512))
    write_trajectories(from_lists(list(rows)), path)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[100:5_000] = bytes(4_900)
    path.write_bytes(content)
    assert f"file {str(path)!r}" in message_of(read_trajectories, path)


def test_the_second_file_is_named_when_it_is_the_bad_one(tmp_path):
    write_raw(tmp_path / "a.parquet", GOOD)
    write_raw(tmp_path / "b.jsonl", {"token_ids": [[1], []]})
    message = message_of(read_trajectories, [tmp_path / "a.parquet", tmp_path / "b.jsonl"])
    assert "b.jsonl" in message
    assert "row 1" in message


def test_files_that_differ_in_optional_columns_are_told(tmp_path):
    write_raw(tmp_path / "a.parquet", {**GOOD, "logprobs": [[0.0] * 3, [0.0] * 2]})
    write_raw(tmp_path / "b.parquet", GOOD)
    message = message_of(read_trajectories, [tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert "'logprobs'" in message
    assert "b.parquet" in message


def test_a_bad_value_is_placed_right_behind_row_groups_and_batches(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [[1] * 3 for _ in range(40)]
    rows[33] = [1, 1, 2**40]
    pq.write_table(pa.table({"token_ids": rows}), path, row_group_size=8)
    assert "row 33, column 'token_ids', position 2" in message_of(read_trajectories, path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    batch = from_lists([[1], [2]], extra=pa.table({"blob": [b"x", b"y"]}))
    assert "Write Parquet" in message_of(write_trajectories, batch, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.jsonl"]
    assert "a place" in message_of(write_trajectories, batch, tmp_path / "none" / "a.parquet")
    assert "ends in" in message_of(write_trajectories, batch, tmp_path / "a.csv")


# The record


def test_alignment_drops_the_first_token_of_each_trajectory():
    """Peers' fault 7: one log-prob fewer than tokens, and none for what nothing predicts."""
    batch = from_lists([[1, 2, 3], [4], [5, 6]])
    assert batch.at_positions(batch.tokens).tolist() == [2, 3, 6]
    assert batch.position_offsets.tolist() == [0, 2, 2, 3]
    assert batch.at_positions(np.ones((6, 2))).shape == (3, 2)
    assert "6 entries" in message_of(batch.at_positions, np.ones(5))


def test_arrays_are_read_only_and_the_callers_stay_writable():
    mine = np.array([1, 2, 3], np.int32)
    batch = TrajectoryBatch.from_flat(mine, [0, 1, 3])
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(batch, name)[0] = 0
    assert mine.flags.writeable
    assert np.shares_memory(batch.tokens, mine)


def test_select_takes_rows_with_all_that_belongs_to_them(tmp_path):
    write_raw(
        tmp_path / "a.parquet",
        {
            "token_ids": [[1, 2], [3], [4, 5, 6]],
            "advantages": [[0.1, 0.2], [0.3], [0.4, 0.5, 0.6]],
            "reward": [1.0, 2.0, 3.0],
            "tree_id": ["a", "b", "c"],
            "note": ["x", "y", "z"],
        },
    )
    part = read_trajectories(tmp_path / "a.parquet").select([2, 0, 2])
    assert part.tokens.tolist() == [4, 5, 6, 1, 2, 4, 5, 6]
    assert part.lengths.tolist() == [3, 2, 3]
    assert part.advantages[3] == np.float32(0.1)
    assert part.rewards.tolist() == [3.0, 1.0, 3.0]
    assert part.tree_ids == ("c", "a", "c")
    assert part.extra["note"].to_pylist() == ["z", "x", "z"]
    assert "row 2" in part.describe_row(0)
    assert "0 to 2" in message_of(part.select, [3])
    assert "at least one trajectory" in message_of(part.select, [])


def test_a_token_beyond_the_vocabulary_is_told(tmp_path):
    write_raw(tmp_path / "a.parquet", {"token_ids": [[1, 2], [3, 512]]})
    batch = read_trajectories(tmp_path / "a.parquet")
    batch.check_vocabulary(513)
    message = message_of(batch.check_vocabulary, 512)
    assert "a.parquet', row 1, column 'token_ids', position 1" in message
    assert "got 512" in message


def test_log_probs_need_to_be_finite_only_where_they_are_used():
    """0 x NaN must not reach a loss, so what is not used is stored as 0."""
    batch = from_lists(
        [[1, 2, 3], [4, 5]],
        loss_mask=[[1, 0, 1], [0, 1]],
        logprobs=[[np.nan, -np.inf, -1.0], [np.nan, -2.0]],
    )
    assert batch.logprobs.tolist() == [0, 0, -1, 0, -2]


@pytest.mark.parametrize(
    ("offsets", "part"),
    [
        ([0, 2], "0 to 3 tokens"),
        ([1, 3], "0 to 3 tokens"),
        ([0], "at least one trajectory"),
        ([0, 2, 1, 3], "offsets that fall"),
        ([0, 2, 2, 3], "trajectory 1, column 'token_ids'"),
        ([0.0, 3.0], "integer offsets"),
    ],
)
def test_wrong_offsets_are_told(offsets, part):
    assert part in message_of(TrajectoryBatch.from_flat, [1, 2, 3], offsets)


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"rewards": [1.0]}, "'rewards'"),
        ({"tree_ids": ["a"]}, "'tree_ids'"),
        ({"extra": pa.table({"x": [1]})}, "'extra'"),
        ({"loss_mask": [[1, 1, 1], [1]]}, "trajectory 1, column 'loss_mask'"),
        ({"loss_mask": [[1, 1, 1]]}, "2 lists"),
        ({"identity": [[0, 0, 0], [0, 0.5]]}, "trajectory 1, column 'identity'"),
        ({"identity": [np.array([0, 0, 2**63], np.uint64), [0, 0]]}, "position 2"),
        ({"advantages": [[[1], [1], [1]], [1, 1]]}, "trajectory 0, column 'advantages'"),
    ],
)
def test_lists_that_do_not_fit_are_told(columns, part):
    with pytest.raises(InputError) as caught:
        from_lists(GOOD["token_ids"], **columns)
    assert part in str(caught.value)


def test_concatenation_fills_extra_columns_with_nulls():
    one = from_lists([[1]], extra=pa.table({"a": [1]}))
    other = from_lists([[2]], extra=pa.table({"b": ["x"]}))
    bare = from_lists([[3]])
    joined = concatenate([one, other, bare])
    assert joined.extra.to_pydict() == {"a": [1, None, None], "b": [None, "x", None]}
    clash = from_lists([[1]], extra=pa.table({"a": [[1]]}))
    assert "one type" in message_of(concatenate, [one, clash])


# Padded dictionaries


def test_padded_names_and_unknown_columns_are_understood():
    batch = from_padded(
        {
            "input_ids": np.array([[1, 2, 0], [3, 4, 5]]),
            "attention_mask": np.array([[1, 1, 0], [1, 1, 1]]),
            "ref_logp": np.array([[0, -1, 9], [0, -2, -3]]),
            "reward": np.array([[1.0], [0.0]]),
            "versions": np.array([[7, 7, -1], [8, 8, 9]]),
            "turns": np.array([3, 4]),
        }
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.ref_logprobs.tolist() == [0, -1, 0, -2, -3]
    assert batch.rewards.tolist() == [1, 0]
    assert batch.extra.to_pydict() == {"versions": [[7, 7], [8, 8, 9]], "turns": [3, 4]}


def test_position_aligned_columns_are_shifted_to_their_tokens():
    rolled = np.array([[-2.0, -3.0, -9.0], [-5.0, -9.0, 0.0]])
    data = {
        "input_ids": np.array([[1, 2, 3], [4, 5, 0]]),
        "attention_mask": np.array([[1, 1, 1], [1, 1, 0]]),
        "logprobs": rolled,
    }
    batch = from_padded(data, position_aligned=["logprobs"])
    assert batch.at_positions(batch.logprobs).tolist() == [-2, -3, -5]


def test_tensors_are_read_through_their_own_conversion():
    torch = pytest.importorskip("torch")
    batch = from_padded(
        {
            "input_ids": torch.tensor([[1, 2], [3, 4]]),
            "logprobs": torch.tensor([[0.0, -0.5], [0.0, -1.0]], requires_grad=True),
            "advantages": torch.ones(2, 2, dtype=torch.bfloat16),
        }
    )
    assert batch.logprobs.tolist() == [0, -0.5, 0, -1]
    assert batch.advantages.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"attention_mask": np.array([[1, 0, 1], [1, 1, 1]])}, "row 0, column 'attention_mask'"),
        ({"attention_mask": np.array([[1, 1, 0], [0, 0, 0]])}, "trajectory 1"),
        ({"attention_mask": np.array([[1, 1, 2], [1, 1, 1]])}, "0 or 1"),
        ({"attention_mask": np.array([1, 1])}, "0 or 1 in shape"),
        ({"logprobs": np.zeros((2, 2))}, "column 'logprobs'"),
        ({"rewards": np.zeros(3)}, "column 'rewards'"),
        ({"input_ids": np.zeros(3, int)}, "shape [N, T]"),
        ({"input_ids": np.full((2, 3), -1)}, "trajectory 0, column 'token_ids', position 0"),
    ],
)
def test_wrong_padded_dictionaries_are_told(change, part):
    data = {"input_ids": np.arange(6).reshape(2, 3), **change}
    assert part in message_of(from_padded, data)


def test_a_padded_dictionary_without_tokens_is_told():
    assert "'token_ids'" in message_of(from_padded, {"tokens": np.zeros((1, 1), int)})


def test_reading_needs_no_torch():
    program = "import sys, harts.trajectories; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
