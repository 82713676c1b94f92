"""What HARTS must know of a model family, and the registry of the families it supports.

To add a family: write one module beside this one that defines ``FAMILY``, and list it below.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from harts.errors import UnsupportedError

_MODULES: Mapping[str, str] = {
    "bailing_hybrid": "harts.models.bailing_hybrid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The seams of one ``transformers`` model class.

    Full attention needs no entry: it goes through the library's attention registry.
    """

    model_type: str
    """``config.model_type`` of the library."""
    tree_layers: Mapping[type[nn.Module], type[nn.Module]]
    """Linear-attention layer class -> subclass that takes ``tree=TreeIndex`` in its forward."""
    router_class: type[nn.Module]
    """Router whose forward returns (logits [R, E], weights, selected experts [R, k])."""
    router_score: Literal["sigmoid", "softmax"]
    """How router logits become the probabilities of the load-balancing loss."""
    expert_bias: str | None
    """Name of the router's buffer [E] that balances the load without a loss, if it has one."""
    chunk_size: int
    """B: chunk length of the family's linear-attention kernel."""
    small_model: Callable[[int], nn.Module]
    """Makes a small random model for a vocabulary size, on the library's reference paths."""


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
