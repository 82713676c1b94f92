"""The attention's Triton kernels in Triton's interpreter against plain PyTorch; prints errors."""

import json

import torch
from torch import Tensor

from harts.ops.attention import packed, triton_kernels
from harts.ops.attention.pieces import Fold, RowSum
from tests.ops import interpreter
from tests.ops.small_trees import relative_error

ROWS, HEADS, WIDTH, ENTRIES = 11, 3, 6, 20


def a_row_sum(generator: torch.Generator) -> RowSum:
    """Entries of every second row: none, one or several, in an order of their own."""
    counts = torch.tensor([3, 1, 0, 5, 2])
    return RowSum(
        rows=torch.arange(len(counts)) * 2,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        entries=torch.randperm(ENTRIES, generator=generator)[: int(counts.sum())],
    )


def errors(width: int) -> dict[str, float]:
    """Relative errors in float32; packed rows are `width` wide, the rows themselves WIDTH."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows, at = normal(ROWS, HEADS, WIDTH), torch.randint(ROWS, (ENTRIES,), generator=generator)
    sums, entries = a_row_sum(generator), normal(ENTRIES, HEADS, width)
    found = {
        "gather": relative_error(
            triton_kernels.gather_rows(rows, at, width), packed.gather_rows(rows, at, width)
        )
    }
    totals = [rows.clone(), rows.clone()]
    triton_kernels.add_rows(totals[0], entries, sums)
    packed.add_rows(totals[1], entries, sums)
    found["add"] = relative_error(*totals)
    # Carried from an earlier call and on to a later one, in all four ways.
    fold = Fold(
        slots=torch.tensor([0, 1, 2, 3, 4]),
        first=torch.tensor([True, False, True, False, False]),
        last=torch.tensor([False, True, True, False, True]),
    )
    start = (normal(ROWS, HEADS, WIDTH), normal(5, HEADS, WIDTH))
    pairs = [[x.clone() for x in start] for _ in range(2)]
    triton_kernels.fold_rows(*pairs[0], entries, sums, fold)
    packed.fold_rows(*pairs[1], entries, sums, fold)
    found |= {
        name: relative_error(a, b) for name, a, b in zip(("fold", "carried"), *pairs, strict=True)
    }
    wide = (rows, normal(HEADS, ROWS), normal(ENTRIES, HEADS, WIDTH), normal(HEADS, ENTRIES))
    merged = [[x.clone() for x in wide] for _ in range(2)]
    triton_kernels.merge_rows(*merged[0], sums)
    packed.merge_rows(*merged[1], sums)
    found |= {
        name: relative_error(a, b)
        for name, a, b in zip(("merge", "log-sum-exp"), merged[0][:2], merged[1][:2], strict=True)
    }
    return found


if __name__ == "__main__":
    interpreter.accept_new_numpy()
    # Rows in several blocks, the last not full.
    triton_kernels._BLOCK, triton_kernels._GATHERED, triton_kernels._BLOCK_HEADS = 8, 16, 2
    print(json.dumps({f"width {width}": errors(width) for width in (WIDTH, WIDTH + 3)}))
