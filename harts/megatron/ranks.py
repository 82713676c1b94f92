"""Where one process stands in Megatron's grid of parallel groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRanks:
    """Rank and size of this process along every axis that HARTS reads."""

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    """Replica of the plan that this process helps to run."""
    dp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1


def current_ranks() -> ParallelRanks:
    """The grid that ``parallel_state.initialize_model_parallel`` set up."""
    state: Any = parallel_state
    return ParallelRanks(
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
        expert_tp_rank=state.get_expert_tensor_parallel_rank(),
        expert_tp_size=state.get_expert_tensor_parallel_world_size(),
    )
