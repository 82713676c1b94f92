"""A strided part of a tensor as boxes of that tensor.

Checkpoints that any layout can read store boxes of whole tensors: ranges along their own dims.
What a rank holds need not be one. The queries of some heads, where a head's query, key and value
follow one another, are one range of rows a head.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from torch import Tensor

from harts.megatron.holdings import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Ranges along all dims of the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]
    """Where its numbers lie in the folded part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """A part, and the boxes that it consists of."""

    folded: tuple[int, ...]
    """Shape of the part `outermost_first`, each dim within one of the whole's."""
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Steps:
    """``count`` places of the part along ``dim`` of the whole, ``step`` apart."""

    dim: int
    step: int
    count: int


def boxes_of(region: Region, whole: tuple[int, ...]) -> Boxes:
    """Cut a region of a contiguous tensor of shape ``whole`` into as few boxes as there are.

    Raises:
        ValueError: the region does not follow the dims of the whole.
    """
    sizes = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    dims = sorted(zip(region.strides, region.shape, strict=True), reverse=True)
    steps = [s for stride, count in dims for s in _along_dims(stride, count, whole, sizes)]
    start = [region.offset // size % length for size, length in zip(sizes, whole, strict=True)]
    shape, far = [1] * len(whole), [1 + at for at in start]
    looped = []
    for place in reversed(range(len(steps))):
        dim, step, count = steps[place].dim, steps[place].step, steps[place].count
        far[dim] += step * (count - 1)
        if step == shape[dim]:
            shape[dim] *= count
        else:
            looped.append(place)
    if any(end > length for end, length in zip(far, whole, strict=True)):
        raise ValueError(f"{region} leaves a tensor of shape {tuple(whole)}")
    found = []
    for numbers in itertools.product(*(range(steps[place].count) for place in looped)):
        offset = list(start)
        where: list[int | slice] = [slice(None)] * len(steps)
        for place, number in zip(looped, numbers, strict=True):
            offset[steps[place].dim] += steps[place].step * number
            where[place] = number
        found.append(Box(offset=tuple(offset), shape=tuple(shape), place=tuple(where)))
    return Boxes(folded=tuple(s.count for s in steps), boxes=tuple(found))


def outermost_first(part: Tensor, region: Region) -> Tensor:
    """A part with the dims of its region from the outermost of the whole to the innermost."""
    return part.permute(sorted(range(len(region.shape)), key=lambda dim: -region.strides[dim]))


def _along_dims(stride: int, count: int, whole: tuple[int, ...], sizes: list[int]) -> list[_Steps]:
    """One dim of a region, split where it runs over the end of a dim of the whole."""
    found: list[_Steps] = []
    while count > 1:
        fits = (
            d
            for d, size in enumerate(sizes)
            if size <= stride < size * whole[d] and not stride % size
        )
        dim = next(fits, None)
        if dim is None:
            raise ValueError(f"a stride of {stride} follows no dim of a tensor of shape {whole}")
        room = sizes[dim] * whole[dim] // stride
        taken = min(count, room)
        if count % taken or (taken < count and sizes[dim] * whole[dim] % stride):
            raise ValueError(f"{count} steps of {stride} break off in a tensor of shape {whole}")
        found.append(_Steps(dim, stride // sizes[dim], taken))
        stride, count = stride * taken, count // taken
    return found[::-1]
