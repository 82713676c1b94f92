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
from harts.megatron.checkpoint import load_distributed, save_distributed
from harts.megatron.engine import MegatronEngine
from harts.megatron.hugging_face import DirectoryWeights, save_hugging_face

__all__ = [
    "MODEL_TYPES",
    "DirectoryWeights",
    "MegatronEngine",
    "build_model",
    "load_distributed",
    "load_hugging_face",
    "save_distributed",
    "save_hugging_face",
    "transformer_config",
    "weight_pieces",
]
