"""Hugging Face weights on any layout of ranks: which part of which tensor lies where.

A parameter of Megatron's may hold parts of several Hugging Face tensors, and a rank holds a part
of the parameter. Each `Piece` names one such part by two views, so that one table serves loading,
saving and the comparison of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harts.errors import InputError

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A part of one Hugging Face tensor and the same part of one tensor of this rank."""

    name: str
    """Of the Hugging Face tensor."""
    whole: View
    """The part as a view of the whole Hugging Face tensor."""
    local: View
    """The part as a view of a tensor that is shaped as ``tensor``."""
    tensor: Tensor
    """Parameter or buffer of this rank."""
    buffer: bool = False


@torch.no_grad()
def load_pieces(pieces: Iterable[Piece], weights: Mapping[str, Tensor]) -> None:
    """Copy this rank's parts out of Hugging Face weights.

    Raises:
        InputError: a tensor is missing or has another shape.
    """
    for piece in pieces:
        if piece.name not in weights:
            raise InputError(
                f"the weights have no tensor {piece.name!r}; expected a checkpoint of the model "
                "type that the Megatron model was built for"
            )
        target, source = piece.local(piece.tensor), _part(piece, weights[piece.name])
        if source.shape != target.shape:
            raise InputError(
                f"this rank's part of {piece.name!r} has shape {tuple(source.shape)}, expected "
                f"{tuple(target.shape)}; the checkpoint belongs to another configuration"
            )
        target.copy_(source)


def _part(piece: Piece, whole: Tensor) -> Tensor:
    try:
        return piece.whole(whole)
    except (RuntimeError, IndexError) as error:
        raise InputError(
            f"{piece.name!r} has shape {tuple(whole.shape)}, from which this rank's part cannot "
            f"be cut: {error}"
        ) from error


def linear(name: str, tensor: Tensor, *, dim: int, rank: int, size: int) -> Iterator[Piece]:
    """A matrix that is cut along ``dim`` over ``size`` ranks."""

    def whole(x: Tensor) -> Tensor:
        part = x.shape[dim] // size
        return x.narrow(dim, rank * part, part)

    yield Piece(name=name, whole=whole, local=_same, tensor=tensor)


def replicated(name: str, tensor: Tensor, *, buffer: bool = False) -> Iterator[Piece]:
    """A tensor that every rank holds whole."""
    yield Piece(name=name, whole=_same, local=_same, tensor=tensor, buffer=buffer)


def gated(gate: str, up: str, tensor: Tensor, *, rank: int, size: int) -> Iterator[Piece]:
    """The first matrix of a gated MLP: each rank's part of the gate, then of the up projection."""
    for half, name in enumerate((gate, up)):
        yield Piece(
            name=name,
            whole=lambda x: x.chunk(size)[rank],
            local=lambda x, half=half: x.chunk(2)[half],  # type: ignore[misc]
            tensor=tensor,
        )


def vocabulary_rows(name: str, tensor: Tensor, *, rank: int, vocabulary: int) -> Iterator[Piece]:
    """Rows of a matrix over the vocabulary; rows past it only pad."""
    first = rank * tensor.shape[0]
    held = min(max(vocabulary - first, 0), tensor.shape[0])
    yield Piece(
        name=name,
        whole=lambda x: x[first : first + held],
        local=lambda x: x[:held],
        tensor=tensor,
    )


def head_columns(
    parts: Mapping[str, int], tensor: Tensor, *, heads: int, rank: int, size: int
) -> Iterator[Piece]:
    """A fused projection [heads * sum of parts, D], head after head, parts in order within each.

    Args:
        parts: numbers a head of each Hugging Face matrix [heads * numbers, D].
        tensor: this rank's heads.
        heads: over all ranks.
        rank: tensor-parallel rank.
        size: tensor-parallel size.
    """
    own = heads // size
    total, start = sum(parts.values()), 0
    for name, numbers in parts.items():
        columns = slice(start, start + numbers)
        yield Piece(
            name=name,
            whole=lambda x: x.view(heads, -1, x.shape[-1])[rank * own : (rank + 1) * own],
            local=lambda x, c=columns: x.view(own, total, -1)[:, c],  # type: ignore[misc]
            tensor=tensor,
        )
        start += numbers


def _same(x: Tensor) -> Tensor:
    return x
