"""Plans of an index on a device are made from its twin in host memory.

The meta device stands for a GPU: its tensors hold no values, and whoever reads one back fails.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.layout import CompactLayout
from harts.ops.attention import dispatch, tree_attention
from harts.ops.attention.mask import estimate_mask, tree_mask
from harts.ops.attention.packed import TORCH
from harts.ops.attention.pieces import longest_path, plan_attention
from harts.ops.attention.varlen import estimate_varlen
from harts.ops.convolution.tables import convolution_tables
from harts.ops.delta_rule.gpu.row_plan import plan_tree
from harts.ops.delta_rule.grid import tree_grid
from harts.ops.device_copy import on_device, read_back
from harts.ops.index_cache import on_host
from harts.ops.router import TrajectoryRows
from harts.ops.tree_index import TreeIndex
from tests.forests import lay_out, random_batch

PLANS: dict[str, Callable[[TreeIndex], Any]] = {
    "attention": lambda index: plan_attention(index, 4, 2, 500, 500, TORCH.speeds),
    "convolution": partial(convolution_tables, width=4),
    "GPU delta rule": plan_tree,
    "delta rule": tree_grid,
}
ESTIMATES: dict[str, Callable[[TreeIndex], Any]] = {
    "longest path": longest_path,
    "mask": partial(estimate_mask, heads=4),
    "packed calls": partial(estimate_varlen, heads=4, kv_heads=2, kernel=TORCH),
    "blocks of the mask": lambda index: tree_mask(index).met,
}


def random_layout(seed: int) -> CompactLayout:
    batch = random_batch(
        np.random.default_rng(seed), trajectories=20, max_length=300, chunk_size=16
    )
    return lay_out(batch, chunk_size=16, row_multiple=16)[2]


def leaves(value: Any) -> list[Any]:
    """Tensors, numbers and slices in a record, in order."""
    if isinstance(value, tuple | list):
        return [leaf for v in value for leaf in leaves(v)]
    if is_dataclass(value):
        return [
            leaf
            for f in fields(value)
            if f.name != "host"
            for leaf in leaves(getattr(value, f.name))
        ]
    return [value]


def assert_like(got: Any, want: Any, device: str) -> None:
    """Equal but for the values of tensors, which are on the device."""
    for mine, other in zip(leaves(got), leaves(want), strict=True):
        if isinstance(other, Tensor):
            assert mine.device.type == device
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        else:
            assert mine == other


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_reads_no_tensor_back_and_has_its_own_on_the_device(name: str, seed: int) -> None:
    layout = random_layout(seed)
    plan = PLANS[name](TreeIndex.from_layout(layout, "meta"))
    assert_like(plan, PLANS[name](TreeIndex.from_layout(layout)), "meta")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_reads_no_tensor_back(name: str, seed: int) -> None:
    layout = random_layout(seed)
    found = ESTIMATES[name](TreeIndex.from_layout(layout, "meta"))
    assert found == ESTIMATES[name](TreeIndex.from_layout(layout))


def test_attention_runs_to_its_end_without_reading_the_index_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_why_not_flash", lambda *_: None)
    monkeypatch.setattr(dispatch, "_why_not_flash4", lambda *_: "it is not installed")
    index = TreeIndex.from_layout(random_layout(0), "meta")
    rows = torch.empty(index.rows, 2, 16, device="meta", dtype=torch.bfloat16)
    chosen = dispatch.choose_backend(rows, rows, rows, index=index)
    assert chosen in ("varlen", "mask")
    rows = torch.empty(index.rows, 2, 16, device="meta")
    out = tree_attention(rows, rows, rows, index=index, backend="reference")
    assert out.shape == rows.shape


@pytest.mark.parametrize("name", [*PLANS, *ESTIMATES])
def test_an_index_without_its_twin_is_read_back(name: str) -> None:
    index = on_device(TreeIndex.from_layout(random_layout(0)), "meta")
    assert index.host is None
    with pytest.raises(NotImplementedError, match="meta"):
        (PLANS | ESTIMATES)[name](index)


def test_changed_tensors_take_no_stale_twin_along() -> None:
    index = TreeIndex.from_layout(random_layout(0), "meta")
    assert index.host is not None
    assert on_host(index) is index.host
    assert replace(index, ancestor_rows=index.ancestor_rows.clone()).host is None
    with pytest.raises(ValueError, match="host"):
        replace(index, host=index.host)


def test_an_index_on_the_host_is_its_own_twin() -> None:
    index = TreeIndex.from_layout(random_layout(0), "cpu")
    assert index.host is None
    assert on_host(index) is index


def test_rows_of_trajectories_go_to_the_device_at_once() -> None:
    layout = random_layout(0)
    rows = TrajectoryRows.from_layout(layout, "meta")
    assert_like(rows, TrajectoryRows.from_layout(layout), "meta")


def test_copies_hold_the_same_values_at_aligned_places(monkeypatch: pytest.MonkeyPatch) -> None:
    index = TreeIndex.from_layout(random_layout(1))
    record = (index, torch.tensor(3.5, dtype=torch.float64), torch.zeros(0, 2), torch.ones(3) > 0)
    kept: list[Tensor] = []
    to = Tensor.to

    def there(buffer: Tensor, device: torch.device, **options: Any) -> Tensor:
        assert device.type == "meta"
        kept.append(to(buffer, "cpu", **options).clone())
        return kept[-1]

    monkeypatch.setattr(Tensor, "to", there)
    copied = on_device(record, "meta")
    assert len(kept) == 1
    for mine, other in zip(leaves(copied), leaves(record), strict=True):
        if isinstance(other, Tensor):
            assert torch.equal(mine, other)
            assert mine.dtype == other.dtype
            assert (mine.data_ptr() - kept[0].data_ptr()) % 16 == 0
            assert mine.is_contiguous()
    assert torch.equal(read_back(copied)[0].tokens, index.tokens)
