"""Which rank holds which part of the model, worked out from the table of pieces.

A part is a region of a whole Hugging Face tensor, so it means the same on every layout of ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harts.errors import InputError
from harts.megatron.build import weight_pieces
from harts.megatron.weights import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a whole tensor as a view of it: where it starts, and how it strides."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, piece: Piece, whole: torch.Size) -> Region:
        """The region that a piece cuts from a tensor of shape ``whole``."""
        part = piece.whole(torch.empty(whole, device="meta"))
        return cls(
            offset=int(part.storage_offset()), shape=tuple(part.shape), strides=part.stride()
        )

    def view(self, whole: Tensor) -> Tensor:
        """The region of a contiguous tensor."""
        return whole.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnPart:
    """A part of this rank that holds at least one number."""

    piece: Piece
    region: Region

    @property
    def tensor(self) -> Tensor:
        """The part, as a view of this rank's parameter or buffer."""
        return self.piece.local(self.piece.tensor.detach())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holdings:
    """All parts of a model over all ranks."""

    shapes: dict[str, torch.Size]
    """Of every tensor of the library's model, in its order."""
    dtypes: dict[str, torch.dtype]
    holders: dict[str, dict[Region, int]]
    """By name: the first rank that holds a region. Replicas hold it too."""
    own: tuple[OwnPart, ...]

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], source: Any, group: Any = None) -> Holdings:
        """Ask every rank of ``group``, all by default; they call this alike.

        Raises:
            InputError: the ranks together do not hold the whole model.
        """
        shapes = {name: t.shape for name, t in skeleton(source).state_dict().items()}
        own = tuple(
            OwnPart(piece=piece, region=region)
            for piece in weight_pieces(chunks, source)
            if math.prod((region := Region.of(piece, shapes[piece.name])).shape)
        )
        everyone: list[Any] = [None] * dist.get_world_size(group)
        held = [(part.piece.name, part.region, part.piece.tensor.dtype) for part in own]
        dist.all_gather_object(everyone, held, group=group)
        holders: dict[str, dict[Region, int]] = {name: {} for name in shapes}
        dtypes = {}
        for rank, of_rank in enumerate(everyone):
            for name, region, dtype in of_rank:
                holders[name].setdefault(region, rank)
                dtypes[name] = dtype
        for name, shape in shapes.items():
            known = sum(math.prod(region.shape) for region in holders[name])
            if known != shape.numel():
                raise InputError(
                    f"the ranks hold {known} of {shape.numel()} numbers of {name!r}; give the "
                    "chunks of build_model for this configuration, on every rank"
                )
        return cls(shapes=shapes, dtypes=dtypes, holders=holders, own=own)


def skeleton(source: Any) -> PreTrainedModel:
    """The library's model of a configuration, without numbers."""
    make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(copy.deepcopy(source))
