"""What the families share: settings, layers, FFNs and experts, and where their weights lie.

Shapes: E experts · I expert width · D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn

from harts.errors import UnsupportedError
from harts.megatron.experts import GroupedExperts
from harts.megatron.model import TreeTransformerLayer
from harts.megatron.ranks import ParallelRanks
from harts.megatron.router import TreeRouter
from harts.megatron.weights import Piece, gated, linear, replicated, vocabulary_rows

AttentionPieces = Callable[[str, Any, dict[str, int]], Iterator[Piece]]
"""Where the weights of an attention layer lie: of the decoder layer's prefix, the layer, and the
rank and size of tensor parallelism."""


def refuse(source: Any, faults: Iterable[tuple[bool, str, str]]) -> None:
    """Raise for the first fault: whether it is one, what the model has, what it should have.

    Raises:
        UnsupportedError: there is one.
    """
    for wrong, found, expected in faults:
        if wrong:
            raise UnsupportedError(
                f"{source.model_type} with {found} does not run in Megatron yet: expected "
                f"{expected}. Train it with the Hugging Face engine (harts.models.prepare)"
            )


def common_faults(source: Any) -> Iterator[tuple[bool, str, str]]:
    """What no family may have; see `refuse`."""
    rope = (source.rope_parameters or {}).get("rope_type", "default")
    yield rope != "default", f"rope_type={rope!r}", "'default'"
    yield source.attention_bias, "attention_bias=True", "False"
    yield source.tie_word_embeddings, "tie_word_embeddings=True", "False"
    yield source.hidden_act != "silu", f"hidden_act={source.hidden_act!r}", "'silu'"


def common_settings(source: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of Megatron's configuration that follow from any supported model."""
    return {
        "num_layers": source.num_hidden_layers,
        "hidden_size": source.hidden_size,
        "ffn_hidden_size": getattr(source, "intermediate_size", None),
        "num_attention_heads": source.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": source.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # looked at in dense models too
        "sequence_parallel": settings.get("tensor_model_parallel_size", 1) > 1,
    }


def expert_settings(source: Any, sparse: list[bool]) -> dict[str, Any]:
    """Settings of the MoE layers, ``sparse`` says which; none in a dense model."""
    if not any(sparse):
        return {}
    return {
        "num_moe_experts": source.num_experts,
        "moe_layer_freq": [int(s) for s in sparse],
        "moe_ffn_hidden_size": source.moe_intermediate_size,
        "moe_router_topk": source.num_experts_per_tok,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def layer_spec(attention: Any, ffn: Any, norm: type[nn.Module]) -> Any:
    """Megatron's specification of one layer."""
    return ModuleSpec(
        module=TreeTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ffn,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def dense_ffn() -> Any:
    """Specification of a gated MLP."""
    return ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )


def expert_ffn(source: Any, *, float32_router: bool = False) -> Any:
    """Specification of an MoE layer, with shared experts where the configuration has them."""
    spec = get_moe_module_spec(use_te=False, num_experts=source.num_experts, moe_grouped_gemm=False)
    # Newer versions bind the submodules to the class, where older ones name both in a ModuleSpec.
    parts = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    parts.router = partial(TreeRouter, float32=float32_router)
    parts.experts = GroupedExperts
    return spec


def decoder_pieces(
    chunk: nn.Module,
    source: Any,
    ranks: ParallelRanks,
    attention: AttentionPieces,
    *,
    shared_experts: str,
) -> Iterator[Piece]:
    """Where the Hugging Face weights lie in one model chunk of this rank.

    Args:
        chunk: built of `layer_spec`.
        source: the Hugging Face configuration.
        ranks: where this process stands.
        attention: pieces of an attention layer.
        shared_experts: what Hugging Face names the experts that every token uses.
    """
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
        yield from attention(prefix, layer.self_attention, shard)
        if hasattr(layer.mlp, "router"):
            yield from _moe(prefix + "mlp.", layer.mlp, shard, ranks, shared_experts)
        else:
            yield from _mlp(prefix + "mlp.", layer.mlp, shard)
    if model.post_process:
        yield from replicated("model.norm.weight", model.decoder.final_layernorm.weight)
        yield from vocabulary_rows("lm_head.weight", model.output_layer.weight, **vocabulary)


def _mlp(prefix: str, mlp: Any, shard: dict[str, int]) -> Iterator[Piece]:
    yield from gated(
        prefix + "gate_proj.weight", prefix + "up_proj.weight", mlp.linear_fc1.weight, **shard
    )
    yield from linear(prefix + "down_proj.weight", mlp.linear_fc2.weight, dim=1, **shard)


def _moe(
    prefix: str, moe: Any, shard: dict[str, int], ranks: ParallelRanks, shared_experts: str
) -> Iterator[Piece]:
    yield from replicated(prefix + "gate.weight", moe.router.weight)
    if moe.router.enable_expert_bias:
        yield from replicated(
            prefix + "gate.e_score_correction_bias", moe.router.expert_bias, buffer=True
        )
    if moe.shared_experts is not None:
        yield from _mlp(f"{prefix}{shared_experts}.", moe.shared_experts, shard)
        if moe.shared_experts.gate_weight is not None:
            yield from replicated(
                f"{prefix}{shared_experts}_gate.weight", moe.shared_experts.gate_weight
            )
    yield from _routed(prefix + "experts.", moe, ranks.expert_tp_rank, ranks.expert_tp_size)


def _routed(prefix: str, moe: Any, rank: int, size: int) -> Iterator[Piece]:
    """gate_up_proj [E, 2 I, D] and down_proj [E, D, I] of this rank's experts."""
    first, count = moe.local_expert_indices[0], len(moe.local_expert_indices)

    def half(x: Tensor, which: int) -> Tensor:
        return x[first : first + count].chunk(2, dim=1)[which].chunk(size, dim=1)[rank]

    for which in (0, 1):
        yield Piece(
            name=prefix + "gate_up_proj",
            whole=partial(half, which=which),
            local=lambda x, which=which: x.chunk(2, dim=1)[which],  # type: ignore[misc]
            tensor=moe.experts.gate_up,
        )
    yield Piece(
        name=prefix + "down_proj",
        whole=lambda x: torch.chunk(x[first : first + count], size, dim=2)[rank],
        local=lambda x: x,
        tensor=moe.experts.down,
    )
