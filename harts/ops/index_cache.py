"""What operators derive from a `TreeIndex` once, kept as long as the index lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from harts.ops.device_copy import read_back
from harts.ops.tree_index import TreeIndex

Derived = TypeVar("Derived")

_entries: Any = WeakIdKeyDictionary()
"""`sequence_offsets` of an index -> the ancestors it went with, and what was derived."""


def derived(index: TreeIndex, name: str, build: Callable[[TreeIndex], Derived]) -> Derived:
    """``build(index)``, or what an earlier call with this index and this name built.

    A `TreeIndex` is frozen, and its tensors are taken never to change. Layers and recomputation
    share one index, so that building happens once a microbatch.
    """
    kept: tuple[Tensor, Tensor, int, dict[str, Any]] | None = _entries.get(index.sequence_offsets)
    if (
        kept is None
        or kept[0] is not index.ancestor_rows
        or kept[1] is not index.ancestor_offsets
        or kept[2] != index.rows
    ):
        kept = (index.ancestor_rows, index.ancestor_offsets, index.rows, {})
        _entries[index.sequence_offsets] = kept
    if name not in kept[3]:
        kept[3][name] = build(index)
    found: Derived = kept[3][name]
    return found


def on_host(index: TreeIndex) -> TreeIndex:
    """The index in host memory, where plans read it.

    That of a layout is there already. Tensors of any other are read back, which waits for all
    kernels queued before.
    """
    if index.host is not None:
        return index.host
    return index if index.sequence_offsets.is_cpu else read_back(index)
