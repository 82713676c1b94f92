"""Parts of tensors as boxes: the boxes are the part, and all parts together the tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "megatron.core", reason="needs megatron-core, which pip install 'harts[megatron]' brings"
)

from harts.megatron.boxes import boxes_of, outermost_first
from harts.megatron.holdings import Region

Cut = Callable[[Tensor], Tensor]


def rows_of_heads(x: Tensor, heads: int, columns: slice) -> Tensor:
    return x.view(heads, -1, x.shape[-1])[:, columns]


# name: shape of the whole, its parts, and how many boxes each has.
CASES: dict[str, tuple[tuple[int, ...], list[Cut], int]] = {
    "whole": ((6, 4), [lambda x: x], 1),
    "a number": ((), [lambda x: x], 1),
    "rows": ((6, 4), [lambda x, i=i: x[3 * i : 3 * i + 3] for i in range(2)], 1),
    "columns": ((6, 4), [lambda x, i=i: x[:, 2 * i : 2 * i + 2] for i in range(2)], 1),
    "transposed": ((6, 4), [lambda x, i=i: x.T[2 * i : 2 * i + 2] for i in range(2)], 1),
    "flat": ((6, 4), [lambda x: x.flatten()], 1),
    "experts": (
        (4, 6, 2),
        [lambda x, e=e, i=i: x[e : e + 2, i : i + 3] for e in (0, 2) for i in (0, 3)],
        1,
    ),
    "contiguous heads": ((12, 5), [lambda x, i=i: x.view(6, 2, 5)[3 * i :][:3] for i in (0, 1)], 1),
    "parts of each head": (
        (12, 5),
        [lambda x, c=c: rows_of_heads(x, 3, c) for c in (slice(0, 1), slice(1, 4))],
        3,
    ),
    "a convolution": ((14, 1, 4), [lambda x: x[:8].view(2, 4, 4), lambda x: x[8:, 0]], 1),
    "a convolution, heads in the middle": (
        (12, 1, 4),
        [lambda x, i=i: x[:8].view(4, 2, 4)[2 * i :][:2] for i in (0, 1)] + [lambda x: x[8:]],
        1,
    ),
    "nested heads": (
        (2 * 3 * 4, 5),
        [lambda x, i=i: x.view(2, 3, 4, 5)[:, :, i : i + 2] for i in (0, 2)],
        6,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_boxes_are_the_part_and_parts_the_whole(name: str) -> None:
    shape, parts, count = CASES[name]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros_like(whole)
    for cut in parts:
        view = cut(whole)
        region = Region(
            offset=int(view.storage_offset()), shape=tuple(view.shape), strides=view.stride()
        )
        found = boxes_of(region, shape)
        assert len(found.boxes) == count
        folded = outermost_first(view, region).reshape(found.folded)
        for box in found.boxes:
            ranges = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            assert torch.equal(whole[ranges], folded[box.place].reshape(box.shape))
            seen[ranges] += 1
        assert sum(torch.Size(box.shape).numel() for box in found.boxes) == view.numel()
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (3,), (3,)), (0, (6,), (4,)), (22, (4,), (1,)), (0, (9,), (2,))],
)
def test_a_part_that_follows_no_dims_is_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="a tensor of shape"):
        boxes_of(Region(offset=offset, shape=shape, strides=strides), (5, 4))
