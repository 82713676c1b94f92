"""From processes that torchrun started to Megatron's process groups, and wrapped models."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from harts.errors import InputError
from harts.megatron.build import build_model, load_hugging_face, transformer_config
from harts.training.parallel import MegatronConfig


@contextlib.contextmanager
def process_groups(sizes: MegatronConfig, seed: int = 0) -> Iterator[None]:
    """Join the other processes, and make Megatron's groups of them, for as long as it lasts.

    Raises:
        InputError: no GPU for this process.
    """
    joined = not dist.is_initialized()
    if joined:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if not torch.cuda.device_count():
            raise InputError(
                "engine: megatron needs a GPU for each process, and this machine has none; use "
                "engine: huggingface"
            )
        if local >= torch.cuda.device_count():
            raise InputError(
                f"process {local} of this machine found {torch.cuda.device_count()} GPUs; Megatron "
                "needs one for each process: lower torchrun --nproc-per-node"
            )
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
    try:
        parallel_state.initialize_model_parallel(
            virtual_pipeline_model_parallel_size=sizes.virtual_stages, **_sizes(sizes)
        )
        model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if joined:
            dist.destroy_process_group()


def wrapped_model(
    source: Any,
    sizes: MegatronConfig,
    dtype: torch.dtype,
    *,
    recompute: bool,
    weights: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> list[Any]:
    """The model chunks of this rank in training mode, whose gradients Megatron reduces.

    Args:
        source: the Hugging Face configuration.
        sizes: under which the process groups were made.
        dtype: of parameters; gradients are summed in float32.
        recompute: recompute each layer in backward.
        weights: Hugging Face weights; drawn at random where None.
        settings: anything else of Megatron's transformer configuration.
    """
    if recompute:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    config = transformer_config(
        source,
        virtual_pipeline_model_parallel_size=sizes.virtual_stages,
        # Interleaved stages of two ranks need it, and it serves any number of them.
        overlap_p2p_comm=sizes.virtual_stages is not None,
        batch_p2p_comm=sizes.virtual_stages is None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **_sizes(sizes),
        **settings,
    )
    chunks = build_model(source, config)
    if weights is not None:
        load_hugging_face(chunks, source, weights)
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    device = torch.cuda.current_device()
    return [
        DistributedDataParallel(config, reduction, chunk.to(device)).train() for chunk in chunks
    ]


def _sizes(sizes: MegatronConfig) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": sizes.tensor_parallel,
        "pipeline_model_parallel_size": sizes.pipeline_parallel,
        "context_parallel_size": sizes.context_parallel,
        "expert_model_parallel_size": sizes.expert_parallel,
        "expert_tensor_parallel_size": sizes.expert_tensor_parallel,
    }
