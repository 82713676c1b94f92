"""Which parallel sizes a benchmark in Megatron runs under, and the engine that it builds there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from harts.errors import InputError
from harts.megatron import MegatronEngine
from harts.megatron.launch import wrapped_model
from harts.training.model import ModelConfig, build_model
from harts.training.parallel import MegatronConfig

SUGGESTED = {
    1: ("dp1",),
    2: ("dp2-ep2", "tp2-ep2", "pp2", "cp2"),
    4: ("tp2-pp2-ep2", "dp2-tp2-ep4", "tp2-cp2-ep4", "dp2-pp2-ep2"),
    8: ("dp4-tp2-ep8", "dp2-pp4-ep2", "dp2-tp2-pp2-ep4", "dp2-tp2-cp2-ep8", "dp8-ep8"),
}
"""Configurations by number of GPUs; on eight, the first three are those of the paper's Table 4."""
_AXIS = re.compile(r"(dp|tp|pp|cp|ep)([1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Parallel sizes; experts are cut by EP alone, each of them whole."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def named(cls, name: str, processes: int) -> Grid:
        """The sizes in a name such as ``dp2-tp2-ep4``; an axis that is not named has size 1.

        Raises:
            InputError: another kind of name, or sizes that do not make up ``processes``.
        """
        parts = [_AXIS.fullmatch(part) for part in name.split("-")]
        sizes = {part[1]: int(part[2]) for part in parts if part}
        if len(sizes) < len(parts):
            raise InputError(
                f"expected a configuration such as dp2-tp2-ep4, each of {_axes()} at most once, "
                f"got {name!r}"
            )
        grid = cls(**sizes)
        if grid.processes != processes:
            known = SUGGESTED.get(processes)
            hint = f" On {processes} GPUs: {', '.join(known)}." if known else ""
            raise InputError(
                f"{name} needs dp x tp x pp x cp = {grid.processes} processes, and {processes} "
                f"were started; give torchrun --nproc-per-node {grid.processes}.{hint}"
            )
        if grid.dp * grid.tp * grid.cp % grid.ep:
            raise InputError(
                f"{name}: expert parallel size {grid.ep} does not divide dp x tp x cp = "
                f"{grid.dp * grid.tp * grid.cp}, the processes of one pipeline stage"
            )
        return grid

    @property
    def processes(self) -> int:
        """How many it takes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sizes(self) -> MegatronConfig:
        """What a run's configuration calls them."""
        return MegatronConfig(
            tensor_parallel=self.tp,
            pipeline_parallel=self.pp,
            context_parallel=self.cp,
            expert_parallel=self.ep,
        )


def _axes() -> str:
    return ", ".join(field.name for field in fields(Grid))


def build_engine(model: ModelConfig, grid: Grid, device: str, *, recompute: bool) -> MegatronEngine:
    """The engine of this rank; weights are those that the library draws, the same on every grid.

    Args:
        model: what is built.
        grid: its process groups must exist.
        device: where it lives, "cpu" or "cuda".
        recompute: recompute each layer in backward.
    """
    with torch.device(device):
        library = build_model(model)
    chunks = wrapped_model(
        library.config,
        grid.sizes,
        getattr(torch, model.dtype),
        recompute=recompute,
        weights=library.state_dict(),
        perform_initialization=False,
        # Every step runs with the same weights and the same routing.
        moe_router_bias_update_rate=0.0,
    )
    return MegatronEngine(chunks)


def parameters_of(chunks: Sequence[Any]) -> int:
    """Numbers that this rank holds."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())
