"""What HARTS must know of a model family, and the registry of the families it supports.

To add a family: write one module beside this one that defines ``FAMILY``, and list it below.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from harts.errors import UnsupportedError

_MODULES: Mapping[str, str] = {
    "bailing_hybrid": "harts.models.bailing_hybrid",
    "deepseek_v3": "harts.models.deepseek_v3",
    "kimi_linear": "harts.models.kimi_linear",
    "llama": "harts.models.llama",
    "olmo_hybrid": "harts.models.olmo_hybrid",
    "qwen3": "harts.models.qwen3",
    "qwen3_5_moe_text": "harts.models.qwen3_5_moe",
    "qwen3_5_text": "harts.models.qwen3_5",
    "qwen3_moe": "harts.models.qwen3_moe",
    "qwen3_next": "harts.models.qwen3_next",
}
MODEL_TYPES = tuple(_MODULES)
"""Every ``config.model_type`` that has an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The seams of one ``transformers`` model class.

    Full attention needs no entry: it goes through the library's attention registry.
    """

    model_type: str
    """``config.model_type`` of the library."""
    small_model: Callable[[int], nn.Module]
    """Makes a small random model for a vocabulary size, on the library's reference paths."""
    tree_layers: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    """Linear-attention layer class -> subclass that takes ``tree=TreeIndex`` in its forward."""
    router_class: type[nn.Module] | None = None
    """Router whose forward returns (logits [R, E], weights, selected experts [R, k])."""
    tree_routers: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    """Router class -> subclass with a compiled form."""
    router_score: Literal["sigmoid", "softmax"] = "softmax"
    """How router logits become the probabilities of the load-balancing loss."""
    expert_bias: str | None = None
    """Name of the router's buffer [E] that balances the load without a loss, if it has one."""
    chunk_size: int = 64
    """B: chunk length of the family's linear-attention kernel; plans without one use it too."""

    def routers(self, model: nn.Module) -> list[Any]:
        """The routers of a model, in the order of its layers; none in a dense model."""
        wanted = self.router_class
        return [] if wanted is None else [m for m in model.modules() if isinstance(m, wanted)]


def family_of(model: nn.Module) -> ModelFamily:
    """Look a model's family up.

    Raises:
        UnsupportedError: HARTS has no adapter for ``model``; the message lists those it has.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no config.model_type: expected a causal language model "
            f"of transformers, one of {sorted(_MODULES)}"
        )
    return family_named(model_type)


def family_named(model_type: str) -> ModelFamily:
    """The family of a ``config.model_type``.

    Raises:
        UnsupportedError: HARTS has no adapter for it; the message lists those it has.
    """
    if model_type not in _MODULES:
        raise UnsupportedError(
            f"no adapter for model type {model_type!r}: expected one of {sorted(_MODULES)}. "
            "docs/models.md says how to add a family."
        )
    family = importlib.import_module(_MODULES[model_type]).FAMILY
    assert isinstance(family, ModelFamily)
    return family
