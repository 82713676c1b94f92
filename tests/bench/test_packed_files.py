"""Files cut to a number of compact rows."""

import numpy as np
import pytest

from harts.bench.packed_files import packed_file
from harts.errors import InputError
from harts.forest import PrefixForest
from harts.trajectories import from_lists

ROWS = '{"token_ids": [1, 2, 3, 4]}\n{"token_ids": [1, 2, 9]}\n{"token_ids": [7, 8]}\n'


@pytest.mark.parametrize("rows", range(1, 8))
def test_the_first_trajectories_with_so_many_compact_rows(tmp_path, rows):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(ROWS)
    found = packed_file(path, rows)
    forest = PrefixForest.build(from_lists(token_ids=found))
    assert int((forest.lengths - forest.lcp).sum()) == rows
    whole = [np.array(t) for t in ([1, 2, 3, 4], [1, 2, 9], [7, 8])]
    assert all((a == b[: len(a)]).all() for a, b in zip(found, whole, strict=False))
    assert [len(t) for t in found[:-1]] == [len(t) for t in whole[: len(found) - 1]]


def test_a_small_file_is_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(ROWS)
    with pytest.raises(InputError, match="has 7 compact rows; expected at least 8"):
        packed_file(path, 8)
