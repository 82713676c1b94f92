"""Running a model with the experts that another run chose, so that routing is not compared.

Shapes: R physical rows · E experts · k experts a token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harts.layout import CompactLayout
from harts.models.policy import TreePolicy


def router_weights(router: Any, logits: Tensor, selected: Tensor, score: str) -> Tensor:
    """Weights [R, k] that a library router gives to the experts ``selected`` [R, k]."""
    scores = logits.sigmoid() if score == "sigmoid" else logits.float().softmax(-1)
    weights = scores.gather(1, selected)
    if getattr(router, "norm_topk_prob", True):
        epsilon = 1e-20 if score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return (weights * getattr(router, "routed_scaling_factor", 1.0)).to(logits.dtype)


@contextmanager
def pinned_routing(
    policy: TreePolicy, choose: Callable[[CompactLayout], Sequence[Tensor]]
) -> Iterator[Callable[[CompactLayout], None]]:
    """Use the experts [R, k] that ``choose`` gives for each layout, one tensor a MoE layer.

    Their weights are the model's own. What is yielded must be told each layout before the decoder
    runs on it; calling the policy tells it.
    """
    current: list[Tensor] = []

    def use(layout: CompactLayout) -> None:
        current[:] = choose(layout)

    def pin(layer: int) -> Any:
        def hook(router: Any, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits, selected = output[0], current[layer]
            weights = router_weights(router, logits, selected, policy.family.router_score)
            return logits, weights.to(output[1].dtype), selected

        return hook

    routers = policy.family.routers(policy.model)
    # Before the policy's own hook, whose statistics are then of the experts that ran.
    hooks = [r.register_forward_hook(pin(i), prepend=True) for i, r in enumerate(routers)]
    hooks.append(policy.register_forward_pre_hook(lambda _, inputs: use(inputs[0])))
    try:
        yield use
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def recorded_routing(policy: TreePolicy) -> Iterator[list[Tensor]]:
    """Collect the experts [R, k] that each router chooses, in the order of the layers."""
    found: list[Tensor] = []

    def record(_router: Any, _inputs: Any, output: tuple[Tensor, ...]) -> None:
        found.append(output[2].detach())

    hooks = [r.register_forward_hook(record) for r in policy.family.routers(policy.model)]
    try:
        with torch.no_grad():
            yield found
    finally:
        for hook in hooks:
            hook.remove()
