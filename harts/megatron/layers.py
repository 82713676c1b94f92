"""Small modules that Megatron's local layers lack under sequence parallelism, and head exchange.

Shapes: R rows, r of them on this rank · H heads of this rank · X numbers a head · D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from harts.errors import UnsupportedError


class RootMeanSquareNorm(nn.Module):
    """RMSNorm whose weight is used on a part of the rows, or heads, of each tensor-parallel rank.

    The weight is marked so that Megatron sums its gradient over those ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device_of(config))
        )
        mark_replicated(self.weight, config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]; sums in float32."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class GatedRootMeanSquareNorm(RootMeanSquareNorm):
    """RMSNorm of each head, times the sigmoid of a gate."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """[..., X] and a gate of the same shape to [..., X]; all in float32 inside."""
        assert gate is not None
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        gated = self.weight.to(wide.dtype) * normed * torch.sigmoid(gate.to(wide.dtype))
        return gated.to(x.dtype)


class ZeroCentredNorm(RootMeanSquareNorm):
    """RMSNorm whose weight is what it scales by, less one."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]; all in float32 inside."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class SwishGatedNorm(RootMeanSquareNorm):
    """RMSNorm of each head, times the SiLU of a gate."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """[..., X] and a gate of the same shape to [..., X]; the gate in float32."""
        assert gate is not None
        wide = gate if gate.dtype == torch.float64 else gate.float()
        return (super().forward(x) * nn.functional.silu(wide)).to(x.dtype)


class Float32Parameters(MegatronModule):  # type: ignore[misc]
    """A base whose own parameters and buffers stay in float32 when a model is cast to half.

    Megatron's ``Float16Module`` casts everything; a model of Hugging Face keeps some of it.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def without_halving(x: Tensor) -> Tensor:
            moved: Tensor = fn(x)
            halved = moved.dtype in (torch.bfloat16, torch.float16)
            return x.to(moved.device) if halved else moved

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(without_halving, recurse=False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """What a parameter is kept in that is never halved."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ReplicatedLinear(nn.Module):
    """A projection that every tensor-parallel rank holds whole and applies to its own rows."""

    def __init__(self, config: Any, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(
                output_size, input_size, dtype=config.params_dtype, device=device_of(config)
            )
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        mark_replicated(self.weight, config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., output size]."""
        return nn.functional.linear(x, self.weight)


def column_projection(
    module: Any, config: Any, tp_group: Any, inputs: int, outputs: int, buffer: str
) -> Any:
    """A matrix [outputs, inputs] without bias, cut by outputs; ``buffer`` is Megatron's name."""
    return build_module(
        module,
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name=buffer,
        tp_group=tp_group,
    )


def row_projection(module: Any, config: Any, tp_group: Any, inputs: int, buffer: str) -> Any:
    """A matrix [D, inputs] without bias, cut by inputs, of which each rank has its own part."""
    return build_module(
        module,
        inputs,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name=buffer,
        tp_group=tp_group,
    )


def mark_replicated(parameter: nn.Parameter, config: Any) -> None:
    """Have Megatron sum the gradient over tensor-parallel ranks."""
    setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def mark_split(parameter: nn.Parameter, dim: int = 0) -> None:
    """Tell Megatron that each tensor-parallel rank holds a part of ``dim``."""
    for name, value in (
        ("tensor_model_parallel", True),
        ("partition_dim", dim),
        ("partition_stride", 1),
    ):
        setattr(parameter, name, value)


@contextmanager
def drawn_apart(config: Any, *, expert: bool = False) -> Iterator[None]:
    """Initial values that differ between ranks which hold different parts of a tensor."""
    if config.use_cpu_initialization:
        yield
        return
    name = get_expert_parallel_rng_tracker_name() if expert else None
    with get_cuda_rng_tracker().fork(*(() if name is None else (name,))):
        yield


def rotary_angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """[r, dim / 2] in float32: each position times each frequency."""
    dims = torch.arange(0, dim, 2, device=positions.device)
    return positions[:, None].float() * (1.0 / base ** (dims.float() / dim))


def device_of(config: Any) -> torch.device | str | int:
    """Where Megatron builds its parameters."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def heads_of_rank(heads: int, pg_collection: Any, *, kind: str) -> int:
    """Heads of one tensor-parallel rank.

    Raises:
        UnsupportedError: context parallelism could not trade rows for whole ones of them.
    """
    tp: int = pg_collection.tp.size()
    cp: int = pg_collection.cp.size()
    if heads % (tp * cp):
        raise UnsupportedError(
            f"{heads} {kind} heads cannot be cut over tensor parallel size {tp} times context "
            f"parallel size {cp}; make their product divide the heads"
        )
    return heads // tp


def rows_to_heads(x: Tensor, group: Any) -> Tensor:
    """Trade rows for heads over context parallelism: [r, H, X] to [r CP, H / CP, X].

    Ranks hold contiguous rows and get contiguous heads (DeepSpeed-Ulysses).
    """
    size = group.size()
    if size == 1:
        return x
    rows, heads, width = x.shape
    send = x.view(rows, size, heads // size, width).transpose(0, 1)
    received: Tensor = all_to_all(group, send.reshape(size * rows, -1))
    return received.view(size * rows, heads // size, width)


def heads_to_rows(x: Tensor, group: Any) -> Tensor:
    """The way back: [R, H / CP, X] to [R / CP, H, X]."""
    size = group.size()
    if size == 1:
        return x
    rows, heads, width = x.shape
    received: Tensor = all_to_all(group, x.reshape(rows, -1))
    parts = received.view(size, rows // size, heads, width).transpose(0, 1)
    return parts.reshape(rows // size, size * heads, width)


def own_heads(parameter: Tensor, group: Any) -> Tensor:
    """The part of dim 0 that belongs to this rank's heads after `rows_to_heads`."""
    if group.size() == 1:
        return parameter
    heads = parameter.shape[0] // group.size()
    return parameter[group.rank() * heads : (group.rank() + 1) * heads]
