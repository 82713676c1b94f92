"""Build the model chunks of this rank, and load Hugging Face weights into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from harts.errors import UnsupportedError
from harts.megatron import bailing_hybrid, qwen3
from harts.megatron.model import TreeGPTModel
from harts.megatron.ranks import current_ranks
from harts.megatron.support import check_supported
from harts.megatron.weights import Piece, load_pieces

_FAMILIES: Mapping[str, Any] = {
    "bailing_hybrid": bailing_hybrid,
    **dict.fromkeys(qwen3.MODEL_TYPES, qwen3),
}
MODEL_TYPES = tuple(_FAMILIES)
"""Every ``config.model_type`` that runs in Megatron."""


def family_module(source: Any) -> Any:
    """The module that knows a Hugging Face configuration's layers and weights.

    Raises:
        UnsupportedError: no such module.
    """
    model_type = getattr(source, "model_type", None)
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise UnsupportedError(
            f"model type {model_type!r} does not run in Megatron: expected one of "
            f"{sorted(_FAMILIES)}. The Hugging Face engine runs more (docs/models.md)"
        )
    return _FAMILIES[model_type]


def transformer_config(source: Any, **settings: Any) -> Any:
    """Megatron's configuration of a Hugging Face one, with ``settings`` on top.

    Raises:
        UnsupportedError: the model, or a setting of it, does not run in Megatron.
    """
    return family_module(source).transformer_config(source, **settings)


def build_model(source: Any, config: Any) -> list[TreeGPTModel]:
    """The chunks of this pipeline stage: one, or as many as its virtual stages.

    Wrap each in Megatron's ``DistributedDataParallel``, then give them to a `MegatronEngine`.

    Args:
        source: configuration of a Hugging Face model.
        config: `transformer_config` of it; process groups must be set up as it says.

    Raises:
        UnsupportedError: the configuration has a setting that trees cannot have.
    """
    check_supported(config, current_ranks())
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    return [_chunk(source, config, stage) for stage in stages]


def _chunk(source: Any, config: Any, stage: int | None) -> TreeGPTModel:
    family = family_module(source)
    specs = family.layer_specs(source)
    first = get_transformer_layer_offset(config, vp_stage=stage)
    count = get_num_layers_to_build(config, vp_stage=stage)
    where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    parts = parallel_state.get_tensor_model_parallel_world_size()
    return TreeGPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=specs[first : first + count], layer_norm=family.final_norm(source)
        ),
        vocab_size=-(-source.vocab_size // parts) * parts,
        vocabulary=source.vocab_size,
        max_sequence_length=source.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
        vp_stage=stage,
    )


def weight_pieces(chunks: Sequence[nn.Module], source: Any) -> Iterator[Piece]:
    """Where every Hugging Face tensor lies in the chunks of this rank, wrapped or not."""
    ranks = current_ranks()
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        yield from family_module(source).weight_pieces(model, source, ranks)


def load_hugging_face(
    chunks: Sequence[nn.Module], source: Any, weights: Mapping[str, Tensor]
) -> None:
    """Copy this rank's parts of Hugging Face weights into the chunks.

    Do it before an optimiser is made: one that keeps its own copy of the weights takes it then.

    Args:
        chunks: of `build_model`, wrapped or not.
        source: the Hugging Face configuration.
        weights: the whole model's tensors by name; read one at a time, so a lazy mapping will do.

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    load_pieces(weight_pieces(chunks, source), weights)
