"""The log-probs' Triton kernels in Triton's interpreter against plain PyTorch; prints errors."""

import json
from itertools import product

import torch
from torch import Tensor

from harts.ops.logprobs import tiles, triton_kernels
from harts.ops.logprobs.records import Entries, Projection, RowGradient
from tests.ops import interpreter
from tests.ops.small_trees import relative_error

ROWS, VOCABULARY, WIDTH = 37, 83, 24


def errors(biased: bool, entropy: bool) -> dict[str, float]:
    """Relative errors of every kernel on operands of float16, against float64.

    The interpreter multiplies bfloat16 by its bit patterns; the kernels take either.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    hidden = normal(ROWS, WIDTH).half()
    weight = normal(VOCABULARY, WIDTH).half()
    bias = normal(VOCABULARY).half() if biased else None
    projection = Projection(weight, bias, 0.7, first=5)
    exact = Projection(weight.double(), None if bias is None else bias.double(), 0.7, first=5)
    got = triton_kernels.row_sums(hidden, projection, entropy)
    want = tiles.row_sums(hidden.double(), exact, entropy)
    found = {
        name: relative_error(a.double(), b)
        for name, a, b in zip(want._fields, got, want, strict=True)
        if b is not None
    }
    target_rows = torch.randint(ROWS, (50,), generator=generator)
    # Tokens before and after this shard are in another one.
    targets = torch.randint(VOCABULARY + 10, (50,), generator=generator)
    found["target logits"] = relative_error(
        triton_kernels.target_logits(hidden, projection, target_rows, targets).double(),
        tiles.target_logits(hidden.double(), exact, target_rows, targets),
    )
    partition = want.maximum + want.sum_exp.log()
    gradient = RowGradient(
        partition,
        normal(ROWS).double(),
        normal(ROWS).double() if entropy else None,
        normal(ROWS).double() if entropy else None,
    )
    pair = []
    for form, operand, wide, dtype in (
        (triton_kernels, hidden, projection, torch.float32),
        (tiles, hidden.double(), exact, torch.float64),
    ):
        whole = torch.full((ROWS, VOCABULARY + 8), torch.nan, dtype=dtype)
        tile = whole[:, :VOCABULARY]
        record = RowGradient(*(None if x is None else x.to(dtype) for x in gradient))
        form.fill_gradient_tile(tile, operand, wide, record)
        # Every third entry lies outside the tile.
        entries = Entries(
            torch.arange(30) * 2, torch.arange(30) * 5 % 97 + 3, normal(30).to(dtype) * 0 + 4.5
        )
        form.overwrite_entries(tile, entries, first_row=4, first_token=8)
        assert whole[:, VOCABULARY:].isnan().all()
        pair.append(tile.double())
    found["gradient tile"] = relative_error(*pair)
    return found


if __name__ == "__main__":
    interpreter.accept_new_numpy()
    # The usual tiles are larger than this whole case.
    triton_kernels.CONFIG = triton_kernels._Config(16, 32, 16, 2, 1, 1)
    triton_kernels._DOT_DEPTH, triton_kernels._ENTRIES = 16, 8
    print(
        json.dumps(
            {
                f"bias {biased}, entropy {entropy}": errors(biased, entropy)
                for biased, entropy in product((False, True), repeat=2)
            }
        )
    )
