"""Ling 3 (``bailing_hybrid``) in Megatron: configuration, layers, and where its weights lie.

Shapes: H heads · K head dim · W convolution width · E experts · I expert width · D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn

from harts.errors import UnsupportedError
from harts.megatron.kimi_delta_attention import (
    KimiDeltaShape,
    KimiDeltaSubmodules,
    TreeKimiDeltaAttention,
)
from harts.megatron.latent_attention import LatentShape, LatentSubmodules, TreeLatentAttention
from harts.megatron.layers import GatedRootMeanSquareNorm, RootMeanSquareNorm
from harts.megatron.model import TreeTransformerLayer
from harts.megatron.ranks import ParallelRanks
from harts.megatron.router import TreeRouter
from harts.megatron.weights import (
    Piece,
    gated,
    head_columns,
    linear,
    replicated,
    vocabulary_rows,
)

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
    _refuse(source)
    sparse = [kind == "sparse" for kind in source.mlp_layer_types]
    chosen: dict[str, Any] = {
        "num_layers": source.num_hidden_layers,
        "hidden_size": source.hidden_size,
        "ffn_hidden_size": source.intermediate_size,
        "num_attention_heads": source.num_attention_heads,
        "kv_channels": source.qk_head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": source.rms_norm_eps,
        "multi_latent_attention": True,
        "q_lora_rank": None,
        "kv_lora_rank": source.kv_lora_rank,
        "qk_head_dim": source.qk_nope_head_dim,
        "qk_pos_emb_head_dim": source.qk_rope_head_dim,
        "v_head_dim": source.v_head_dim,
        "rope_type": "rope",
        "rotary_base": source.rope_parameters["rope_theta"],
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "sequence_parallel": settings.get("tensor_model_parallel_size", 1) > 1,
    }
    if any(sparse):
        chosen |= _expert_settings(source, sparse)
    return MLATransformerConfig(**(chosen | settings))


def _expert_settings(source: Any, sparse: list[bool]) -> dict[str, Any]:
    return {
        "num_moe_experts": source.num_local_experts,
        "moe_layer_freq": [int(s) for s in sparse],
        "moe_ffn_hidden_size": source.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": (
            source.moe_intermediate_size * source.n_shared_experts
        ),
        "moe_router_topk": source.num_experts_per_tok,
        "moe_router_num_groups": source.n_group,
        "moe_router_group_topk": source.topk_group,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": source.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _refuse(source: Any) -> None:
    rope = (source.rope_parameters or {}).get("rope_type", "default")
    per_group = source.num_experts_per_tok // source.topk_group
    for wrong, name, expected in (
        (source.q_lora_rank is not None, f"q_lora_rank={source.q_lora_rank}", "None"),
        (rope != "default", f"rope_type={rope!r}", "'default'"),
        (source.attention_bias, "attention_bias=True", "False"),
        (source.tie_word_embeddings, "tie_word_embeddings=True", "False"),
        (not source.norm_topk_prob, "norm_topk_prob=False", "True"),
        (source.hidden_act != "silu", f"hidden_act={source.hidden_act!r}", "'silu'"),
        (
            source.num_key_value_heads != source.num_attention_heads,
            f"num_key_value_heads={source.num_key_value_heads}",
            f"num_attention_heads={source.num_attention_heads}",
        ),
        (
            "sparse" in source.mlp_layer_types and per_group != 2,
            f"num_experts_per_tok={source.num_experts_per_tok}, topk_group={source.topk_group}",
            "twice as many experts a token as groups, since Megatron ranks a group by its best "
            "num_experts_per_tok // topk_group experts and the model by its best 2",
        ),
    ):
        if wrong:
            raise UnsupportedError(
                f"bailing_hybrid with {name} does not run in Megatron yet: expected {expected}. "
                "Train it with the Hugging Face engine (harts.models.prepare)"
            )


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
        ModuleSpec(
            module=TreeTransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RootMeanSquareNorm,
                self_attention=attention[kind],
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=RootMeanSquareNorm,
                mlp=_experts(source) if mlp == "sparse" else _dense(),
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for kind, mlp in zip(source.layer_types, source.mlp_layer_types, strict=True)
    ]


def _dense() -> Any:
    return ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )


def _experts(source: Any) -> Any:
    spec = get_moe_module_spec(
        use_te=False, num_experts=source.num_local_experts, moe_grouped_gemm=False
    )
    # Newer versions bind the submodules to the class, where older ones name both in a ModuleSpec.
    parts = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    parts.router = TreeRouter
    return spec


def weight_pieces(chunk: nn.Module, source: Any, ranks: ParallelRanks) -> Iterator[Piece]:
    """Where the Hugging Face weights lie in one model chunk of this rank."""
    model: Any = chunk
    shard = {"rank": ranks.tp_rank, "size": ranks.tp_size}
    vocabulary = {"rank": ranks.tp_rank, "vocabulary": source.vocab_size}
    if model.pre_process:
        embedding = model.embedding.word_embeddings.weight
        yield from vocabulary_rows("model.embed_tokens.weight", embedding, **vocabulary)
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        yield from replicated(prefix + "input_layernorm.weight", layer.input_layernorm.weight)
        yield from replicated(
            prefix + "post_attention_layernorm.weight", layer.pre_mlp_layernorm.weight
        )
        attention = _latent if isinstance(layer.self_attention, TreeLatentAttention) else _delta
        yield from attention(prefix + "self_attn.", layer.self_attention, shard)
        if hasattr(layer.mlp, "router"):
            yield from _expert_layer(prefix + "mlp.", layer.mlp, shard, ranks)
        else:
            yield from _mlp(prefix + "mlp.", layer.mlp, shard)
    if model.post_process:
        yield from replicated("model.norm.weight", model.decoder.final_layernorm.weight)
        yield from vocabulary_rows("lm_head.weight", model.output_layer.weight, **vocabulary)


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


def _mlp(prefix: str, mlp: Any, shard: dict[str, int]) -> Iterator[Piece]:
    yield from gated(
        prefix + "gate_proj.weight", prefix + "up_proj.weight", mlp.linear_fc1.weight, **shard
    )
    yield from linear(prefix + "down_proj.weight", mlp.linear_fc2.weight, dim=1, **shard)


def _expert_layer(
    prefix: str, moe: Any, shard: dict[str, int], ranks: ParallelRanks
) -> Iterator[Piece]:
    yield from replicated(prefix + "gate.weight", moe.router.weight)
    yield from replicated(
        prefix + "gate.e_score_correction_bias", moe.router.expert_bias, buffer=True
    )
    yield from _mlp(prefix + "shared_experts.", moe.shared_experts, shard)
    rank, size = ranks.expert_tp_rank, ranks.expert_tp_size
    for number, expert in zip(moe.local_expert_indices, moe.experts.local_experts, strict=True):
        yield from _expert(prefix + "experts.", expert, number, rank, size)


def _expert(prefix: str, expert: Any, number: int, rank: int, size: int) -> Iterator[Piece]:
    """gate_up_proj [E, 2 I, D] and down_proj [E, D, I] of one expert."""

    def half_of(which: int) -> Any:
        def whole(x: Tensor) -> Tensor:
            return x[number].chunk(2)[which].chunk(size)[rank]

        return whole

    for which in (0, 1):
        yield Piece(
            name=prefix + "gate_up_proj",
            whole=half_of(which),
            local=lambda x, which=which: x.chunk(2)[which],  # type: ignore[misc]
            tensor=expert.linear_fc1.weight,
        )
    yield Piece(
        name=prefix + "down_proj",
        whole=lambda x: torch.chunk(x[number], size, dim=1)[rank],
        local=lambda x: x,
        tensor=expert.linear_fc2.weight,
    )
