"""Ling 3 (``bailing_hybrid``) in Megatron: configuration, layers, and where its weights lie.

Shapes: H heads · K head dim · W convolution width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from harts.megatron.decoder import (
    common_faults,
    common_settings,
    decoder_pieces,
    dense_ffn,
    expert_ffn,
    expert_settings,
    layer_spec,
    refuse,
)
from harts.megatron.kimi_delta_attention import (
    KimiDeltaShape,
    KimiDeltaSubmodules,
    TreeKimiDeltaAttention,
)
from harts.megatron.latent_attention import LatentShape, LatentSubmodules, TreeLatentAttention
from harts.megatron.layers import GatedRootMeanSquareNorm, RootMeanSquareNorm
from harts.megatron.ranks import ParallelRanks
from harts.megatron.weights import Piece, head_columns, linear, replicated

_LATENT_NORM_EPSILON = 1e-6
"""The library's model gives its latent norm no epsilon of the configuration."""


def transformer_config(source: Any, **settings: Any) -> Any:
    """Megatron's configuration of a ``BailingHybridConfig``.

    Args:
        source: the Hugging Face configuration.
        settings: anything of ``MLATransformerConfig``: parallel sizes, precision, recomputation.

    Raises:
        UnsupportedError: a setting of the model that this engine does not know.
    """
    refuse(source, (*common_faults(source), *_faults(source)))
    sparse = [kind == "sparse" for kind in source.mlp_layer_types]
    chosen: dict[str, Any] = {
        **common_settings(source, settings),
        "kv_channels": source.qk_head_dim,
        "multi_latent_attention": True,
        "q_lora_rank": None,
        "kv_lora_rank": source.kv_lora_rank,
        "qk_head_dim": source.qk_nope_head_dim,
        "qk_pos_emb_head_dim": source.qk_rope_head_dim,
        "v_head_dim": source.v_head_dim,
        "rope_type": "rope",
        "rotary_base": source.rope_parameters["rope_theta"],
    }
    if any(sparse):
        chosen |= expert_settings(source, sparse) | {
            "moe_shared_expert_intermediate_size": (
                source.moe_intermediate_size * source.n_shared_experts
            ),
            "moe_router_num_groups": source.n_group,
            "moe_router_group_topk": source.topk_group,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": source.routed_scaling_factor,
        }
    return MLATransformerConfig(**(chosen | settings))


def _faults(source: Any) -> Iterator[tuple[bool, str, str]]:
    per_group = source.num_experts_per_tok // source.topk_group
    yield source.q_lora_rank is not None, f"q_lora_rank={source.q_lora_rank}", "None"
    yield not source.norm_topk_prob, "norm_topk_prob=False", "True"
    yield (
        source.num_key_value_heads != source.num_attention_heads,
        f"num_key_value_heads={source.num_key_value_heads}",
        f"num_attention_heads={source.num_attention_heads}",
    )
    yield (
        "sparse" in source.mlp_layer_types and per_group != 2,
        f"num_experts_per_tok={source.num_experts_per_tok}, topk_group={source.topk_group}",
        "twice as many experts a token as groups, since Megatron ranks a group by its best "
        "num_experts_per_tok // topk_group experts and the model by its best 2",
    )


def final_norm(_source: Any) -> type[nn.Module]:
    """Class of the norm after the last layer."""
    return RootMeanSquareNorm


def layer_specs(source: Any) -> list[Any]:
    """Megatron's specification of every layer of the model, in order."""
    delta = ModuleSpec(
        module=TreeKimiDeltaAttention,
        params={
            "shape": KimiDeltaShape(
                heads=source.linear_num_heads,
                head_dim=source.linear_head_dim,
                convolution_width=source.linear_conv_kernel_dim,
                norm_epsilon=source.rms_norm_eps,
                lowest_log_decay=source.kda_lower_bound if source.kda_safe_gate else None,
            )
        },
        submodules=KimiDeltaSubmodules(
            in_proj=ColumnParallelLinear,
            out_norm=GatedRootMeanSquareNorm,
            out_proj=RowParallelLinear,
        ),
    )
    latent = ModuleSpec(
        module=TreeLatentAttention,
        params={
            "shape": LatentShape(
                heads=source.num_attention_heads,
                key_dim=source.qk_nope_head_dim,
                rotary_dim=source.qk_rope_head_dim,
                value_dim=source.v_head_dim,
                latent_dim=source.kv_lora_rank,
                rotary_base=source.rope_parameters["rope_theta"],
                norm_epsilon=_LATENT_NORM_EPSILON,
            )
        },
        submodules=LatentSubmodules(
            linear_query=ColumnParallelLinear,
            linear_up=ColumnParallelLinear,
            latent_norm=RootMeanSquareNorm,
            linear_proj=RowParallelLinear,
        ),
    )
    attention = {"linear_attention": delta, "full_attention": latent}
    return [
        layer_spec(
            attention[kind],
            expert_ffn(source, float32_router=True) if ffn == "sparse" else dense_ffn(),
            RootMeanSquareNorm,
        )
        for kind, ffn in zip(source.layer_types, source.mlp_layer_types, strict=True)
    ]


def weight_pieces(chunk: nn.Module, source: Any, ranks: ParallelRanks) -> Iterator[Piece]:
    """Where the Hugging Face weights lie in one model chunk of this rank."""
    return decoder_pieces(chunk, source, ranks, _attention, shared_experts="shared_experts")


def _attention(prefix: str, layer: Any, shard: dict[str, int]) -> Iterator[Piece]:
    of = _latent if isinstance(layer, TreeLatentAttention) else _delta
    return of(prefix + "self_attn.", layer, shard)


def _delta(prefix: str, layer: Any, shard: dict[str, int]) -> Iterator[Piece]:
    shape = layer.shape
    dim, heads = shape.head_dim, shape.heads
    parts = {
        "g_proj": dim,
        "q_proj": dim,
        "k_proj": dim,
        "v_proj": dim,
        "forget_gate.f_proj": dim,
        "b_proj": 1,
    }
    columns = {f"{prefix}{name}.weight": numbers for name, numbers in parts.items()}
    yield from head_columns(columns, layer.in_proj.weight, heads=heads, **shard)
    own = heads // shard["size"]
    mine = slice(shard["rank"] * own, (shard["rank"] + 1) * own)
    # conv1d.weight holds all queries, then all keys, then all values; here each head has its own.
    yield Piece(
        name=prefix + "conv1d.weight",
        whole=lambda x: x.view(3, heads, dim, -1)[:, mine],
        local=lambda x: x.view(own, 3, dim, -1).transpose(0, 1),
        tensor=layer.conv_weight,
    )
    yield from linear(prefix + "forget_gate.A_log", layer.decay_log_rate, dim=0, **shard)
    yield Piece(
        name=prefix + "forget_gate.dt_bias",
        whole=lambda x: x.view(heads, dim)[mine],
        local=lambda x: x,
        tensor=layer.decay_bias,
    )
    yield from replicated(prefix + "o_norm.weight", layer.out_norm.weight)
    yield from linear(prefix + "o_proj.weight", layer.out_proj.weight, dim=1, **shard)


def _latent(prefix: str, layer: Any, shard: dict[str, int]) -> Iterator[Piece]:
    shape = layer.shape
    columns = {prefix + "q_proj.weight": shape.query_columns - 1, prefix + "g_proj.weight": 1}
    yield from head_columns(columns, layer.linear_query.weight, heads=shape.heads, **shard)
    yield from replicated(prefix + "kv_a_proj_with_mqa.weight", layer.linear_down.weight)
    yield from replicated(prefix + "kv_a_layernorm.weight", layer.latent_norm.weight)
    yield from linear(prefix + "kv_b_proj.weight", layer.linear_up.weight, dim=0, **shard)
    yield from linear(prefix + "o_proj.weight", layer.linear_proj.weight, dim=1, **shard)
