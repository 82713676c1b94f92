"""The sigmoid router with expert groups of DeepSeek-V3 and its kin, without sorting.

PyTorch's top-k sorts short rows slowly on a GPU. Taking the largest number a few times over fuses
into one kernel under ``torch.compile``.

Shapes: R rows · E experts · G groups · k experts a row.
"""

from typing import Any

import torch
from torch import Tensor, nn

from harts.ops.compilation import compiled, only_rows_vary
from harts.ops.wide_product import wide_product


def choose_experts(router: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and numbers, each [R, k], of the experts for logits [R, E]; ties go to the first.

    A group counts for the sum of its best two scores, bias included; experts come from the best
    ``topk_group`` groups. Weights are scores without bias.
    """
    only_rows_vary(logits)
    scores = logits.sigmoid()
    biased = (scores + router.e_score_correction_bias).detach()
    groups = biased.view(-1, router.num_group, router.num_experts // router.num_group)
    best = groups.amax(-1, keepdim=True)
    second = _without(groups, groups.argmax(-1, keepdim=True)).amax(-1)
    kept = _largest(best.squeeze(-1) + second, router.topk_group)
    numbers = torch.arange(router.num_group, device=logits.device)
    allowed = (numbers[:, None] == kept[:, None, :]).any(-1, keepdim=True)
    chosen = _largest(groups.masked_fill(~allowed, -torch.inf).flatten(1), router.top_k)
    weights = scores.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor, chosen


def _largest(scores: Tensor, count: int) -> Tensor:
    found = []
    for _ in range(count):
        found.append(scores.argmax(-1, keepdim=True))
        scores = _without(scores, found[-1])
    return torch.cat(found, -1)


def _without(scores: Tensor, at: Tensor) -> Tensor:
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(numbers == at, -torch.inf)


class GroupRouter(nn.Module):
    """Put before a library's router of this kind, whose forward it is until it is compiled."""

    backend: str | None = None
    """Of ``torch.compile``."""

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [R, E] in float32, then weights and numbers [R, k]."""
        if self.backend is None:
            library: tuple[Tensor, Tensor, Tensor] = super().forward(hidden)
            return library
        logits = wide_product(hidden.view(-1, self.hidden_dim), self.weight)
        return logits, *compiled(choose_experts, self.backend)(self, logits)
