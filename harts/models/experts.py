"""Routed experts of a library's model through the grouped products of `harts.ops.experts`.

Shapes: R rows · k experts a row · D model width.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from harts.ops.experts import routed_experts

EXPERTS_NAME = "harts_grouped"
_REPLACED = ("eager", "batched_mm", "grouped_mm")
"""The library's own forms of the same sum; another one was chosen for a reason, and stays."""


def group_experts(model: PreTrainedModel) -> None:
    """Set the grouped form on a model whose experts it can run."""
    modules = expert_modules(model)
    chosen = getattr(model.config, "_experts_implementation", None)
    if modules and chosen in _REPLACED and all(_known(m) for m in modules):
        model.set_experts_implementation(EXPERTS_NAME)


def expert_modules(model: nn.Module) -> list[Any]:
    """Modules whose forward the library's registry of experts functions chooses."""
    return [m for m in model.modules() if hasattr(m, "_is_expert_parallel")]


def _known(module: Any) -> bool:
    plain = module.has_gate and module.is_concatenated
    other = module.has_bias or module.is_transposed or module.has_post_expert_norm
    silu = isinstance(module.act_fn, nn.SiLU | SiLUActivation)
    return plain and silu and not other and not module._is_expert_parallel


def _experts(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The registered experts function: hidden [R, D], experts and weights [R, k] to [R, D]."""
    return routed_experts(
        hidden,
        experts,
        weights,
        module.gate_up_proj,
        module.down_proj,
        getattr(module, "backend", None),
    )


# At import, so that a process that only unpickles a model has it too.
ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts)
