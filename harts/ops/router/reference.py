"""Router statistics over compact rows, weighted so that they equal those of all occurrences.

Shapes: R physical rows (padding included) · E experts · k experts per token.

Each compact row is routed once and stands for q tokens (paper Eq. 20 and section 3.5, MoE
semantics). Statistics add over rows, ranks and accumulated calls; the losses are ratios of sums,
so they are taken once, after adding. By the engines' convention they are per microbatch: sum
statistics over no more than one microbatch before a loss. The load-balancing loss has two more
forms, which no plan can change: of each trajectory (`harts.ops.router.sequences`), and of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from harts.errors import InputError
from harts.ops.router.sequences import (
    TrajectoryRows,
    counts_of_runs,
    sequence_balancing_loss,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterStatistics:
    """Sums over tokens of one router; `+` adds those of two sets of rows."""

    mass: Tensor
    """[E] sum of q * p, the routing probability; differentiable."""

    counts: Tensor
    """[E] float64, q-weighted top-k assignments: exact integers without gradient."""

    z_sum: Tensor
    """[] sum of q * logsumexp(logits)**2; differentiable."""

    tokens: Tensor
    """[] float64, sum of q: semantic tokens behind these sums."""

    sequence_losses: Tensor | None = None
    """[] sum over trajectories of each one's own `load_balancing_loss`, differentiable; None where
    nobody asked for it."""

    def __add__(self, other: RouterStatistics) -> RouterStatistics:
        """Statistics of both sets of rows together."""
        alone = [s.sequence_losses for s in (self, other) if s.sequence_losses is not None]
        return RouterStatistics(
            mass=self.mass + other.mass,
            counts=self.counts + other.counts,
            z_sum=self.z_sum + other.z_sum,
            tokens=self.tokens + other.tokens,
            sequence_losses=sum(alone[1:], alone[0]) if alone else None,
        )


def router_statistics(
    logits: Tensor,
    selected: Tensor,
    multiplicity: Tensor,
    score: Literal["sigmoid", "softmax"] = "softmax",
    *,
    trajectories: TrajectoryRows | None = None,
    over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> RouterStatistics:
    """Sum what a router did over its rows, each weighted by the tokens it stands for.

    Args:
        logits: [R, E] router logits. Rows of multiplicity 0 may hold anything, NaN included.
        selected: [R, k] experts chosen for each row; anything at rows of multiplicity 0.
        multiplicity: [R] q, integer; 0 at padding.
        score: how logits become probabilities: "softmax", or "sigmoid" scores divided by their
            row sum (Megatron's auxiliary loss for sigmoid routers).
        trajectories: of the rows at hand; asks for ``sequence_losses``.
        over_ranks: sums [X, E] counts of runs over the ranks that hold rows of the microbatch.

    Returns:
        The sums; `mass` and `z_sum` in float32, or float64 for float64 logits.

    Raises:
        InputError: shapes do not fit, the score is unknown, or a chosen expert does not exist.
    """
    _check(logits, selected, multiplicity, score)
    experts = logits.shape[1]
    real = multiplicity > 0
    # `where` and not a multiplication: 0 * NaN of a padding row is NaN, in the gradient too.
    clean = torch.where(real[:, None], logits, 0.0)
    clean = clean if clean.dtype == torch.float64 else clean.float()
    q = multiplicity.to(clean.dtype)
    probability = _probability(clean, score)
    chosen = torch.where(real[:, None], selected, 0)
    _check_chosen(chosen, experts)
    weights = multiplicity[:, None].expand_as(chosen).double()
    counts = weights.new_zeros(experts).index_add(0, chosen.flatten(), weights.flatten())
    alone = None
    if trajectories is not None:
        by_run = over_ranks(counts_of_runs(trajectories, chosen, experts))
        alone = sequence_balancing_loss(trajectories, probability, by_run, chosen.shape[1])
    return RouterStatistics(
        mass=q @ probability,
        counts=counts,
        z_sum=q @ clean.logsumexp(-1).square(),
        tokens=multiplicity.sum().double(),
        sequence_losses=alone,
    )


def z_loss(statistics: RouterStatistics) -> Tensor:
    """Mean over tokens of the squared log-partition, without a coefficient; 0 without tokens."""
    return statistics.z_sum / _tokens(statistics)


def load_balancing_loss(
    statistics: RouterStatistics, top_k: int, step_counts: Tensor | None = None
) -> Tensor:
    """Switch-style E * sum_e (share of assignments of e) * (mean probability of e).

    1 for a router that is uniform in both. No coefficient; 0 without tokens.

    Args:
        statistics: sums over one microbatch.
        top_k: k, experts chosen per token.
        step_counts: [E] assignments of a whole step. Share and mean are then over the step's
            tokens, and the result is what this microbatch adds to the step's one loss.

    Raises:
        InputError: top_k is not positive.
    """
    if top_k < 1:
        raise InputError(f"load_balancing_loss: top_k must be at least 1; got {top_k}.")
    counts = statistics.counts if step_counts is None else step_counts
    tokens = _tokens(statistics) if step_counts is None else counts.sum() / top_k
    mass = statistics.mass
    share = counts.to(mass.dtype) / (tokens * top_k).to(mass.dtype)
    return len(share) * (share * (mass / tokens.to(mass.dtype))).sum()


def updated_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Auxiliary-loss-free balancing: one step of the routing bias towards experts in need.

    Args:
        bias: [E] bias added to the scores for selection only.
        counts: [E] assignments of the whole optimisation step, over all ranks.
        rate: step size.

    Returns:
        [E] a new bias in the dtype of `bias`, without gradient.

    Raises:
        InputError: bias and counts are not both [E].
    """
    if bias.dim() != 1 or bias.shape != counts.shape:
        raise InputError(
            f"updated_expert_bias: bias and counts must both be [E]; got {tuple(bias.shape)} and "
            f"{tuple(counts.shape)}."
        )
    load = counts.detach().double()
    return bias.detach() + rate * torch.sign(load.mean() - load).to(bias.dtype)


def _tokens(statistics: RouterStatistics) -> Tensor:
    """Token count in the dtype of the sums; 1 in place of 0, whose sums are 0."""
    return statistics.tokens.clamp(min=1).to(statistics.mass.dtype)


def _probability(logits: Tensor, score: str) -> Tensor:
    """[R, E] routing probabilities."""
    if score == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _check_chosen(chosen: Tensor, experts: int) -> None:
    # On a GPU a look would wait for it, and index_add refuses such a number itself.
    if chosen.is_cuda or not chosen.numel():
        return
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < experts:
        raise InputError(
            f"router_statistics: selected experts must lie in [0, {experts}); got "
            f"{int(chosen.min())} .. {int(chosen.max())}. Pass global expert numbers."
        )


def _check(logits: Tensor, selected: Tensor, multiplicity: Tensor, score: str) -> None:
    rows = logits.shape[0] if logits.dim() == 2 else None
    if rows is None or selected.dim() != 2 or selected.shape[0] != rows:
        raise InputError(
            f"router_statistics: logits must be [R, E] and selected [R, k]; got "
            f"{tuple(logits.shape)} and {tuple(selected.shape)}."
        )
    if multiplicity.shape != (rows,) or multiplicity.is_floating_point():
        raise InputError(
            f"router_statistics: multiplicity must be [{rows}] integers; got "
            f"{tuple(multiplicity.shape)} {multiplicity.dtype}. Pass TreeIndex.multiplicity."
        )
    if selected.is_floating_point():
        raise InputError(
            f"router_statistics: selected must hold expert numbers; got {selected.dtype}."
        )
    if score not in ("sigmoid", "softmax"):
        raise InputError(f"router_statistics: score must be 'sigmoid' or 'softmax'; got {score!r}.")
