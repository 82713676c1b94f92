"""Qwen3, Qwen3-Next and Qwen3.5 in Megatron, dense and MoE.

Shapes: H key heads of linear attention, each of which serves G value heads · K key dim · V value
dim · W convolution width.

The hybrids, Qwen3-Next and Qwen3.5, have Gated DeltaNet layers, an output gate of attention, shared
experts with a gate, and norms whose weights are centred at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

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
from harts.megatron.gated_delta_net import (
    GatedDeltaShape,
    GatedDeltaSubmodules,
    TreeGatedDeltaNet,
)
from harts.megatron.grouped_attention import (
    GroupedShape,
    GroupedSubmodules,
    TreeGroupedAttention,
)
from harts.megatron.layers import RootMeanSquareNorm, SwishGatedNorm, ZeroCentredNorm
from harts.megatron.ranks import ParallelRanks
from harts.megatron.weights import Piece, head_columns, linear, replicated

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_HYBRIDS = MODEL_TYPES[2:]
_FUSED = "qwen3_next"
"""Names all parts of a key head's projection in two tensors; Qwen3.5 has one for each kind."""


def transformer_config(source: Any, **settings: Any) -> Any:
    """Megatron's configuration of a Hugging Face one of these model types.

    Args:
        source: the Hugging Face configuration.
        settings: anything of ``TransformerConfig``: parallel sizes, precision, recomputation.

    Raises:
        UnsupportedError: a setting of the model that this engine does not know.
    """
    kinds = sorted(set(_layer_types(source)) - {"full_attention", "linear_attention"})
    window = kinds or getattr(source, "sliding_window", None) is not None
    found = f"layer types {kinds} and sliding_window={getattr(source, 'sliding_window', None)}"
    refuse(source, (*common_faults(source), (bool(window), found, "attention without a window")))
    sparse = _sparse(source)
    chosen: dict[str, Any] = {
        **common_settings(source, settings),
        **expert_settings(source, sparse),
        "kv_channels": _head_dim(source),
        "num_query_groups": source.num_key_value_heads,
    }
    if any(sparse):
        chosen["moe_router_pre_softmax"] = not getattr(source, "norm_topk_prob", True)
        if source.model_type in _HYBRIDS:
            chosen["moe_shared_expert_intermediate_size"] = source.shared_expert_intermediate_size
            chosen["moe_shared_expert_gate"] = True
    return TransformerConfig(**(chosen | settings))


def final_norm(source: Any) -> type[nn.Module]:
    """Class of the norm after the last layer, and of all norms but those of gated outputs."""
    return ZeroCentredNorm if source.model_type in _HYBRIDS else RootMeanSquareNorm


def layer_specs(source: Any) -> list[Any]:
    """Megatron's specification of every layer of the model, in order."""
    attention = {"linear_attention": _delta_spec, "full_attention": _grouped_spec}
    return [
        layer_spec(
            attention[kind](source),
            expert_ffn(source) if sparse else dense_ffn(),
            final_norm(source),
        )
        for kind, sparse in zip(_layer_types(source), _sparse(source), strict=True)
    ]


def _layer_types(source: Any) -> list[str]:
    return getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers


def _sparse(source: Any) -> list[bool]:
    """Which layers are MoE."""
    if getattr(source, "num_experts", 0) == 0:
        return [False] * source.num_hidden_layers
    if source.model_type == "qwen3_5_moe_text":
        return [True] * source.num_hidden_layers
    return [
        i not in source.mlp_only_layers and (i + 1) % source.decoder_sparse_step == 0
        for i in range(source.num_hidden_layers)
    ]


def _head_dim(source: Any) -> int:
    found: int | None = getattr(source, "head_dim", None)
    return source.hidden_size // source.num_attention_heads if found is None else found


def _delta_spec(source: Any) -> Any:
    return ModuleSpec(
        module=TreeGatedDeltaNet,
        params={
            "shape": GatedDeltaShape(
                key_heads=source.linear_num_key_heads,
                values_per_key=source.linear_num_value_heads // source.linear_num_key_heads,
                key_dim=source.linear_key_head_dim,
                value_dim=source.linear_value_head_dim,
                convolution_width=source.linear_conv_kernel_dim,
                norm_epsilon=source.rms_norm_eps,
            )
        },
        submodules=GatedDeltaSubmodules(
            in_proj=ColumnParallelLinear, out_norm=SwishGatedNorm, out_proj=RowParallelLinear
        ),
    )


def _grouped_spec(source: Any) -> Any:
    partial_rotary = source.rope_parameters.get("partial_rotary_factor", 1.0)
    return ModuleSpec(
        module=TreeGroupedAttention,
        params={
            "shape": GroupedShape(
                heads=source.num_attention_heads,
                key_value_heads=source.num_key_value_heads,
                head_dim=_head_dim(source),
                rotary_dim=int(_head_dim(source) * partial_rotary),
                rotary_base=source.rope_parameters["rope_theta"],
                norm_epsilon=source.rms_norm_eps,
                gated=source.model_type in _HYBRIDS,
            )
        },
        submodules=GroupedSubmodules(
            linear_qkv=ColumnParallelLinear,
            q_layernorm=final_norm(source),
            k_layernorm=final_norm(source),
            linear_proj=RowParallelLinear,
        ),
    )


def weight_pieces(chunk: nn.Module, source: Any, ranks: ParallelRanks) -> Iterator[Piece]:
    """Where the Hugging Face weights lie in one model chunk of this rank."""
    attention = partial(_attention, fused=source.model_type == _FUSED)
    return decoder_pieces(chunk, source, ranks, attention, shared_experts="shared_expert")


def _attention(prefix: str, layer: Any, shard: dict[str, int], *, fused: bool) -> Iterator[Piece]:
    if isinstance(layer, TreeGroupedAttention):
        return _grouped(prefix + "self_attn.", layer, shard)
    return _delta(prefix + "linear_attn.", layer, shard, fused=fused)


def _grouped(prefix: str, layer: Any, shard: dict[str, int]) -> Iterator[Piece]:
    shape = layer.shape
    query = prefix + "q_proj.weight"
    keys = {prefix + "k_proj.weight": shape.head_dim, prefix + "v_proj.weight": shape.head_dim}
    if layer.linear_kv is None:
        columns = {query: shape.queries_columns, **keys}
        heads = {"heads": shape.key_value_heads, **shard}
        yield from head_columns(columns, layer.linear_qkv.weight, **heads)
    else:
        yield from linear(query, layer.linear_qkv.weight, dim=0, **shard)
        for half, name in enumerate(keys):
            yield Piece(
                name=name,
                whole=lambda x: x,
                local=lambda x, half=half: x.chunk(2)[half],  # type: ignore[misc]
                tensor=layer.linear_kv.weight,
            )
    yield from replicated(prefix + "q_norm.weight", layer.q_layernorm.weight)
    yield from replicated(prefix + "k_norm.weight", layer.k_layernorm.weight)
    yield from linear(prefix + "o_proj.weight", layer.linear_proj.weight, dim=1, **shard)


def _delta(prefix: str, layer: Any, shard: dict[str, int], *, fused: bool) -> Iterator[Piece]:
    shape: GatedDeltaShape = layer.shape
    per_key, values = shape.values_per_key, shape.values_per_key * shape.value_dim
    qkv = (shape.key_dim, shape.key_dim, values)
    own = shape.key_heads // shard["size"]
    mine = slice(shard["rank"] * own, (shard["rank"] + 1) * own)
    if fused:
        columns = {"in_proj_qkvz": shape.convolved + values, "in_proj_ba": 2 * per_key}
        named = {f"{prefix}{name}.weight": numbers for name, numbers in columns.items()}
        yield from head_columns(named, layer.in_proj.weight, heads=shape.key_heads, **shard)
    else:
        first = 0
        for name, dims in {"qkv": qkv, "z": (values,), "b": (per_key,), "a": (per_key,)}.items():
            whole = f"{prefix}in_proj_{name}.weight"
            yield from _by_key_head(whole, layer.in_proj.weight, dims, shape, mine, first)
            first += sum(dims)
    yield from _by_key_head(prefix + "conv1d.weight", layer.conv_weight, qkv, shape, mine)
    for name, tensor in (("A_log", layer.decay_log_rate), ("dt_bias", layer.decay_bias)):
        yield Piece(
            name=prefix + name,
            whole=lambda x: x.view(shape.key_heads, -1)[mine],
            local=lambda x: x,
            tensor=tensor,
        )
    yield from replicated(prefix + "norm.weight", layer.out_norm.weight)
    yield from linear(prefix + "out_proj.weight", layer.out_proj.weight, dim=1, **shard)


def _by_key_head(
    name: str,
    tensor: Tensor,
    dims: Sequence[int],
    shape: GatedDeltaShape,
    mine: slice,
    column: int = 0,
) -> Iterator[Piece]:
    """A tensor that holds ``dims`` numbers of all key heads, one kind after the other.

    Here each key head has its own, side by side from ``column``.
    """
    heads, own, row = shape.key_heads, mine.stop - mine.start, 0
    for dim in dims:
        rows, columns = slice(row, row + heads * dim), slice(column, column + dim)
        yield Piece(
            name=name,
            whole=lambda x, r=rows: x[r].view(heads, -1, x.shape[-1])[mine],  # type: ignore[misc]
            local=lambda x, c=columns: x.view(own, -1, x.shape[-1])[:, c],  # type: ignore[misc]
            tensor=tensor,
        )
        row, column = rows.stop, columns.stop
