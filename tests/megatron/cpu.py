"""Megatron-core on the CPU, by default in float64, for tests: one scope where CUDA means the CPU.

Megatron-core asks for the current CUDA device, streams and random states even where all tensors
are on the CPU. None of that touches a number here: initialisation is overwritten by the test's
weights, dropout is off, and gloo waits where CUDA would synchronise.

Library code casts to float32 in routers, norms and optimisers. A comparison to the last digit must
lose none there, so the scope also reads float32 as float64, in backward and recomputation as well,
where modes of torch do not reach.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Reads every request for CUDA as one for the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            name: str = func(*args)
            return name.replace("torch.", "torch.cuda.").replace("Double", "Float")
        if "device" in named:
            named["device"] = cpu_for(named["device"])
        if func is torch.Tensor.to:
            args = [cpu_for(a) if isinstance(a, (torch.device, str)) else a for a in args]
        return func(*args, **named)


def cpu_for(device: Any) -> Any:
    return "cpu" if str(device).startswith("cuda") else device


class _NoStream:
    def __init__(self, *_args: object, **_kwargs: object) -> None:
        return None

    def __getattr__(self, _name: str) -> Callable[..., "_NoStream"]:
        return lambda *_a, **_k: self

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = object.__hash__


def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    """As NCCL does it: parts may differ in size."""
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(own)
        dist.broadcast(output, group=group, group_src=rank)


def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None) -> None:
    """As NCCL does it: parts may differ in size."""
    for rank, part in enumerate(inputs):
        total = part.contiguous().clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)


@contextlib.contextmanager
def megatron_on_cpu(*, float64: bool = True) -> Iterator[None]:
    """Everything of Megatron's that a test builds or runs goes inside."""
    import megatron.core.tensor_parallel.random as mg_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    stream = _NoStream()
    state = torch.zeros(8, dtype=torch.uint8)
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "Stream", _NoStream),
        (torch.cuda, "current_stream", lambda *_a: stream),
        (torch.cuda, "default_stream", lambda *_a: stream),
        (torch.cuda, "stream", lambda _s: contextlib.nullcontext()),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "manual_seed", nothing),
        (torch.cuda, "get_rng_state", lambda *_a, **_k: state),
        (mg_random, "_get_cuda_rng_state", lambda *_a, **_k: state),
        (mg_random, "_set_cuda_rng_state", nothing),
        (dist, "all_gather", all_gather),
        (dist, "reduce_scatter", reduce_scatter),
        (moe_utils, "te_general_gemm", None),
        (dispatcher, "maybe_move_tensor_to_cpu", to_cpu),
    ]
    if float64:
        replaced += [
            (torch, "float32", torch.float64),
            (torch, "float", torch.float64),
            (torch.Tensor, "float", torch.Tensor.double),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(_OnCpu())
        yield
