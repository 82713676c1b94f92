"""Hand-built trees for operator tests, with the path of physical rows behind every sequence."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harts.ops.tree_index import TreeIndex

TREES: dict[str, list[tuple[int, int | None, int]]] = {
    # Each sequence: own rows, parent sequence or None, rows of the parent's path it shares.
    "nested forks": [(6, None, 0), (4, 0, 3), (3, 1, 5), (2, 1, 7), (5, 2, 8)],
    "chain of one-row branches": [(1, None, 0), (1, 0, 1), (1, 1, 2), (1, 2, 3), (3, 3, 4)],
    "forks at 0 and several roots": [(4, None, 0), (3, None, 0), (1, None, 0), (2, 1, 1)],
    "fan-out in a short trunk": [(3, None, 0), (2, 0, 3), (1, 0, 3), (1, 0, 1), (4, 0, 2)],
    "interleaved subtrees": [
        (5, None, 0),
        (4, None, 0),
        (2, 0, 4),
        (3, 1, 2),
        (2, 2, 5),
        (1, 3, 4),
    ],
}


@dataclass(frozen=True)
class SmallTree:
    index: TreeIndex
    paths: list[Tensor]
    """Physical rows from the root to the end of each sequence; its own rows come last."""

    def own(self, sequence: int) -> int:
        offsets = self.index.sequence_offsets
        return int(offsets[sequence + 1] - offsets[sequence])

    def per_trajectory(self, op: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows computed one path at a time: op maps the path's rows to one result each."""
        own = [op(path)[-self.own(i) :] for i, path in enumerate(self.paths)]
        padding = own[0].new_zeros(self.index.rows - self.index.compact_rows, *own[0].shape[1:])
        return torch.cat([*own, padding])


def small_tree(name: str, padding: int = 3) -> SmallTree:
    offsets, ancestors, paths = [0], [], []
    for length, parent, shared in TREES[name]:
        above = torch.empty(0, dtype=torch.int64) if parent is None else paths[parent][:shared]
        paths.append(torch.cat([above, torch.arange(offsets[-1], offsets[-1] + length)]))
        ancestors.append(above)
        offsets.append(offsets[-1] + length)
    rows = offsets[-1]
    multiplicity = torch.zeros(rows + padding, dtype=torch.int64)
    for path in paths:
        multiplicity[path] += 1
    none = torch.empty(0, dtype=torch.int64)
    index = TreeIndex(
        rows=rows + padding,
        compact_rows=rows,
        chunk_size=4,
        rounds=(),
        sequence_offsets=torch.tensor(offsets),
        ancestor_rows=torch.cat(ancestors),
        ancestor_offsets=torch.tensor([0, *[len(a) for a in ancestors]]).cumsum(0),
        tokens=torch.zeros(rows + padding, dtype=torch.int64),
        positions=torch.zeros(rows + padding, dtype=torch.int64),
        multiplicity=multiplicity,
        target_rows=none,
        targets=none,
        trajectory_offsets=torch.zeros(1, dtype=torch.int64),
    )
    return SmallTree(index, paths)


def with_pack_neighbours(tree: SmallTree) -> TreeIndex:
    """The mutation that takes the rows just before a sequence in the pack for its ancestors."""
    starts, ends = tree.index.ancestor_offsets[:-1], tree.index.ancestor_offsets[1:]
    wrong = [
        (torch.arange(int(b - a)) + int(own - (b - a))).clamp(min=0)
        for a, b, own in zip(starts, ends, tree.index.sequence_offsets[:-1], strict=True)
    ]
    return replace(tree.index, ancestor_rows=torch.cat(wrong))


def poisoned(rows: Tensor, compact_rows: int) -> Tensor:
    """A leaf like rows, NaN in its padding, that asks for a gradient."""
    leaf = rows.clone()
    leaf[compact_rows:] = torch.nan
    return leaf.requires_grad_()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm().clamp(min=1e-30))
