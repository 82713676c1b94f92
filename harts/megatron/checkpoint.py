"""Megatron's distributed checkpoints of weights and optimiser, which any layout of ranks can read.

Tensors are stored under their Hugging Face names and in their whole shapes: the same table of
pieces that loads weights tells each rank which regions are its own, whatever the parallel sizes,
virtual stages, or fusion of projections were when they were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor, nn

from harts.errors import InputError
from harts.megatron.boxes import Boxes, boxes_of, outermost_first
from harts.megatron.holdings import Holdings, OwnPart

_METADATA = {
    # The one form that can be read back under other tensor- and pipeline-parallel sizes.
    "distrib_optim_sharding_type": "fully_reshardable",
    # Replicas' shares are joined on the host of the first of them, not on every GPU.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def save_distributed(
    directory: Path, chunks: Sequence[nn.Module], optimizer: Any, source: Any, *, step: int
) -> None:
    """Write weights and optimiser state; every rank calls this alike and writes its own part.

    Args:
        directory: exists on every rank's file system, and is empty.
        chunks: of ``build_model``, wrapped.
        optimizer: Megatron's distributed optimiser of the chunks.
        source: the Hugging Face configuration.
        step: optimiser steps done.
    """
    model = _sharded_model(Holdings.of(chunks, source))
    state = {"step": step, "model": model, "optimizer": _sharded_moments(optimizer, model, False)}
    dist_checkpointing.save(state, str(directory))


def load_distributed(
    directory: Path, chunks: Sequence[nn.Module], optimizer: Any, source: Any
) -> int:
    """Restore weights and optimiser state, written on any layout; every rank calls this alike.

    Returns:
        Optimiser steps done when the checkpoint was written.

    Raises:
        InputError: not such a checkpoint, or one of another model.
    """
    try:
        step = int(dist_checkpointing.load_common_state_dict(str(directory))["step"])
        model = _sharded_model(Holdings.of(chunks, source))
        parameters = {key: factory.data for key, factory in model.items()}
        _set_steps(optimizer, step)
        wanted = {"model": model, "optimizer": _sharded_moments(optimizer, model, True)}
        state = dist_checkpointing.load(wanted, str(directory))
    except (CheckpointingException, OSError, KeyError, RuntimeError) as error:
        raise InputError(
            f"cannot read a distributed checkpoint of this model from {directory}: {error}"
        ) from error
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(state["model"][key])
    _drop_steps(optimizer)
    for number, part in enumerate(_parts(optimizer)):
        part.load_parameter_state_from_fully_reshardable(state["optimizer"][number])
    _set_steps(optimizer, step)
    return step


def _sharded_moments(optimizer: Any, model: dict[str, ShardedTensorFactory], loading: bool) -> Any:
    """Master weights and moments of each part; hyperparameters are the run's that goes on."""
    states = (
        part.sharded_state_dict(model, loading, metadata=_METADATA)["param_state"]
        for part in _parts(optimizer)
    )
    return {number: state for number, state in enumerate(states) if state is not None}


def _set_steps(optimizer: Any, step: int) -> None:
    """Give every parameter of torch's Adam a step count of its own, and its moments a place.

    Megatron asks for the count before there is any, and sets one tensor for all parameters, which
    each of them would then count up.
    """
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if not isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                group["step"] = step
                continue
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                for moment in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(moment, torch.zeros_like(parameter))
                state["step"] = torch.tensor(float(step))


def _drop_steps(optimizer: Any) -> None:
    """Megatron would look for the counts among the tensors that were loaded."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            state.pop("step", None)


def _parts(optimizer: Any) -> list[Any]:
    """One for the experts and one for all else, as far as this pipeline stage has such."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer and part.buffers]


def _sharded_model(holdings: Holdings) -> dict[str, ShardedTensorFactory]:
    """By number, in order of the pieces: one factory a parameter or buffer of this rank."""
    parts: dict[int, list[OwnPart]] = {}
    for part in holdings.own:
        parts.setdefault(id(part.piece.tensor), []).append(part)
    return {str(number): _factory(of_one, holdings) for number, of_one in enumerate(parts.values())}


def _factory(parts: Sequence[OwnPart], holdings: Holdings) -> ShardedTensorFactory:
    """Makes of a parameter, or of an optimiser state of its shape, the regions of whole tensors."""
    tensor, key = parts[0].piece.tensor, parts[0].piece.name

    cuts = [boxes_of(part.region, tuple(holdings.shapes[part.piece.name])) for part in parts]

    def build(full_key: str, data: Tensor, *_: Any) -> list[ShardedTensor]:
        prefix = full_key.removesuffix(key)
        return [
            shard
            for part, cut in zip(parts, cuts, strict=True)
            for shard in _shards(prefix, part, cut, data, holdings)
        ]

    def merge(loaded: Sequence[Tensor]) -> Tensor:
        # What no piece covers pads the vocabulary.
        whole = torch.zeros(tensor.shape, dtype=loaded[0].dtype, device=loaded[0].device)
        values = iter(loaded)
        for part, cut in zip(parts, cuts, strict=True):
            folded = whole.new_empty(cut.folded)
            for box in cut.boxes:
                target = folded[box.place]
                target.copy_(next(values).view(target.shape))
            local = outermost_first(part.piece.local(whole), part.region)
            local.copy_(folded.view(local.shape))
        return whole

    return ShardedTensorFactory(key=key, data=tensor, build_fn=build, merge_fn=merge)


def _shards(
    prefix: str, part: OwnPart, cut: Boxes, data: Tensor, holdings: Holdings
) -> Iterator[ShardedTensor]:
    name, region, rank = part.piece.name, part.region, dist.get_rank()
    folded = outermost_first(part.piece.local(data), region).reshape(cut.folded)
    for box in cut.boxes:
        yield ShardedTensor(
            key=f"{prefix}{name}",
            data=folded[box.place].reshape(box.shape).contiguous(),
            dtype=data.dtype,
            local_shape=box.shape,
            global_shape=tuple(holdings.shapes[name]),
            global_offset=box.offset,
            # Shares need not be equal: the last rank of a vocabulary may hold less.
            axis_fragmentations=None,
            replica_id=0 if holdings.holders[name][region] == rank else 1 + rank,
        )
