"""Rollout trees on Megatron-core: tensor, sequence, pipeline, expert, context and data parallelism.

Needs ``megatron-core``, from PyPI and unchanged (``pip install harts[megatron]``).
"""

from importlib.util import find_spec

if find_spec("megatron") is None:
    raise ImportError(
        "harts.megatron needs megatron-core, which is not installed; pip install 'harts[megatron]'"
    )

from harts.megatron.build import (
    MODEL_TYPES,
    build_model,
    load_hugging_face,
    transformer_config,
    weight_pieces,
)
from harts.megatron.engine import MegatronEngine

__all__ = [
    "MODEL_TYPES",
    "MegatronEngine",
    "build_model",
    "load_hugging_face",
    "transformer_config",
    "weight_pieces",
]
