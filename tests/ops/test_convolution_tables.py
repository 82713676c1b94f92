"""Index tables of the compiled tree convolution, on the CPU."""

from dataclasses import replace

import pytest
import torch

from harts.ops.convolution.fused import why_not_fused
from harts.ops.convolution.tables import convolution_tables
from harts.ops.index_cache import derived

from .small_trees import TREES, small_tree


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("name", TREES)
def test_sources_are_the_true_ancestors(name, width):
    tree = small_tree(name)
    tables = convolution_tables(tree.index, width)
    for i, path in enumerate(tree.paths):
        own = tree.own(i)
        for t in range(len(path) - own, len(path)):
            row = path[t]
            above = [int(path[t - d]) if d <= t else -1 for d in range(1, width)]
            assert tables.sources[:, row].tolist() == above
            depth = t - (len(path) - own)
            assert tables.depth[row] == min(depth, width - 1)
            assert (tables.head[row] >= 0) == (depth < width - 1)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("name", TREES)
def test_readers_are_every_read_across_sequences(name, width):
    tree = small_tree(name)
    tables = convolution_tables(tree.index, width)
    want = sorted(
        (int(tables.sources[tap - 1, row]), tap, int(tables.head[row]))
        for row in range(tree.index.compact_rows)
        for tap in range(1, width)
        if tap > tables.depth[row] and tables.sources[tap - 1, row] >= 0
    )
    counts = tables.reader_offsets.diff()
    rows = torch.repeat_interleave(tables.shared_rows, counts)
    got = torch.stack([rows, tables.reader_taps, tables.reader_heads], 1).tolist()
    assert [tuple(r) for r in got] == want
    assert tables.shared[tables.shared_rows].tolist() == list(range(len(tables.shared_rows)))
    assert (tables.shared >= 0).sum() == len(tables.shared_rows)


def test_tables_are_built_once_for_an_index():
    tree = small_tree("nested forks")
    built = []

    def build(index):
        built.append(index)
        return object()

    first = derived(tree.index, "x", build)
    assert derived(tree.index, "x", build) is first
    assert derived(tree.index, "y", build) is not first
    assert derived(small_tree("nested forks").index, "x", build) is not first
    assert len(built) == 3


@pytest.mark.parametrize("field", ["ancestor_rows", "ancestor_offsets"])
def test_an_index_with_other_ancestors_has_other_tables(field):
    index = small_tree("nested forks").index
    first = derived(index, "x", lambda _: object())
    other = replace(index, **{field: getattr(index, field).clone()})
    assert derived(other, "x", lambda _: object()) is not first


def test_the_cpu_runs_the_plain_form():
    assert "not on a GPU" in why_not_fused(torch.zeros(2, 3), torch.zeros(3, 4))
