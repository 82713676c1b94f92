"""Settings of Megatron that a step over rollout trees cannot have, each refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harts.errors import UnsupportedError
from harts.megatron.ranks import ParallelRanks


def check_supported(config: Any, ranks: ParallelRanks) -> None:
    """Refuse what would give wrong gradients or has not been tried.

    Args:
        config: Megatron's transformer configuration.
        ranks: the grid of this process.

    Raises:
        UnsupportedError: names every setting at fault, why, and what to set.
    """
    found = [
        sentence
        for wrong, sentence in (
            *_parallelism(config, ranks),
            *_losses(config),
            *_execution(config),
            *_experts(config, ranks),
        )
        if wrong
    ]
    if found:
        raise UnsupportedError(
            "this Megatron configuration cannot train on rollout trees: " + "; ".join(found)
        )


def _parallelism(config: Any, ranks: ParallelRanks) -> Iterator[tuple[bool, str]]:
    tp, cp, heads = ranks.tp_size, ranks.cp_size, config.num_attention_heads
    yield (
        tp > 1 and not config.sequence_parallel,
        "tensor parallelism without sequence_parallel leaves gradients of norms unsummed; set "
        "sequence_parallel=True",
    )
    yield (
        heads % (tp * cp) != 0,
        f"{heads} heads cannot be cut over tensor parallel size {tp} times context parallel size "
        f"{cp}; make their product divide the heads",
    )
    yield (
        ranks.pp_size > 1 and not config.variable_seq_lengths,
        "microbatches differ in rows, so pipeline stages must exchange shapes; set "
        "variable_seq_lengths=True",
    )
    yield (
        config.virtual_pipeline_model_parallel_size is not None
        and ranks.pp_size == 2
        and not config.overlap_p2p_comm,
        "with 2 interleaved pipeline stages Megatron mixes up messages between the same two ranks; "
        "set overlap_p2p_comm=True and batch_p2p_comm=False, or use more stages",
    )
    yield (
        getattr(config, "pipeline_model_parallel_layout", None) is not None,
        "a pipeline_model_parallel_layout is not known here; leave it None",
    )
    yield (
        getattr(config, "hybrid_context_parallel", False) is True,
        "hybrid_context_parallel cuts a packed sequence at its sub-sequences, which a tree does "
        "not have; set it False",
    )


def _losses(config: Any) -> Iterator[tuple[bool, str]]:
    yield (
        not config.calculate_per_token_loss,
        "the step's denominators are in the loss already, so gradients must be summed over "
        "microbatches and replicas, not averaged; set calculate_per_token_loss=True",
    )
    kind = config.moe_router_load_balancing_type
    kinds = [kind] if isinstance(kind, str) else list(kind)
    yield (
        set(kinds) != {"none"} and config.num_moe_experts is not None,
        f"moe_router_load_balancing_type={kind!r} would count rows, not tokens, and take a packed "
        "tree for one sequence; set it to 'none' and give RouterLosses a coefficient and a form of "
        "load_balancing: 'microbatch', 'sequence' or 'global'",
    )
    yield (
        config.moe_z_loss_coeff is not None,
        "moe_z_loss_coeff would count rows, not tokens; leave it None and give RouterLosses a "
        "z_coefficient",
    )
    yield (
        config.mtp_num_layers is not None,
        "multi-token prediction is no part of the policy's log-probs; leave mtp_num_layers None",
    )


def _execution(config: Any) -> Iterator[tuple[bool, str]]:
    yield (
        config.hidden_dropout > 0 or config.attention_dropout > 0,
        "a shared row would draw one dropout mask for all of its trajectories; set both to 0",
    )
    yield (
        config.recompute_granularity not in (None, "full"),
        f"recompute_granularity={config.recompute_granularity!r}: recompute whole layers ('full') "
        "or nothing (None), so that each layer sees the tree of its microbatch",
    )
    yield (
        bool(config.distribute_saved_activations),
        "distribute_saved_activations is not tried; set it False",
    )
    yield (
        bool(config.fp8 or getattr(config, "fp4", None)),
        "fp8 and fp4 are not tried; leave them None",
    )
    yield (
        bool(getattr(config, "enable_cuda_graph", False))
        or getattr(config, "cuda_graph_impl", "none") != "none",
        "trees change shape with every microbatch, so CUDA graphs do not fit; set "
        "cuda_graph_impl='none'",
    )
    yield (
        bool(getattr(config, "overlap_moe_expert_parallel_comm", False)),
        "overlap_moe_expert_parallel_comm runs layers in pieces that lose the tree; set it False",
    )
    yield (
        bool(config.heterogeneous_block_specs),
        "heterogeneous_block_specs is not known here; set it False",
    )


def _experts(config: Any, ranks: ParallelRanks) -> Iterator[tuple[bool, str]]:
    if config.num_moe_experts is None:
        return
    yield (
        config.moe_expert_capacity_factor is not None,
        "dropping tokens would drop a shared row from all of its trajectories; leave "
        "moe_expert_capacity_factor None",
    )
    yield (
        config.moe_token_dispatcher_type != "alltoall",
        f"moe_token_dispatcher_type={config.moe_token_dispatcher_type!r}: replicas have different "
        "numbers of rows; set it to 'alltoall'",
    )
    yield (
        config.num_moe_experts % ranks.ep_size != 0,
        f"{config.num_moe_experts} experts cannot be cut over expert parallel size {ranks.ep_size}",
    )
    yield (
        config.moe_input_jitter_eps is not None
        or bool(getattr(config, "moe_router_force_load_balancing", False)),
        "routing must be deterministic; leave moe_input_jitter_eps None and "
        "moe_router_force_load_balancing False",
    )
    yield (
        config.moe_apply_probs_on_input or getattr(config, "moe_latent_size", None) is not None,
        "experts weigh what they make and take rows as wide as the model's; leave "
        "moe_apply_probs_on_input False and moe_latent_size None",
    )
    yield (
        bool(getattr(config, "moe_router_fusion", False)),
        "moe_router_fusion is not tried; set it False",
    )
