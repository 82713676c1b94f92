"""Policy objectives on log-probs in original order: L = F(lambda, xi) (paper section 3.5, Eq. 18).

Shapes: S semantic positions (all tokens) · N trajectories · P = S - N log-prob positions.

Entry i of a trajectory's log-probs predicts its token i + 1, so a trajectory of n tokens has n - 1.
`prepare_step` fixes the metadata xi once for the whole optimisation step, reduction weights
included; `StepTargets.select` hands out a microbatch's part of it unchanged. An objective is a sum
over positions of weight * term, so no grouping into microbatches can change its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.errors import InputError
from harts.trajectories import TrajectoryBatch

Reduction = Literal["token-mean", "sequence-mean"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTargets:
    """The metadata xi of an optimisation step, or of some of its trajectories, per position.

    Masked positions hold 0 in every column, so that whatever the file had there can reach neither
    a loss nor, through 0 * inf, a gradient.
    """

    mask: Tensor  # [P] bool, True where the predicted token was produced by the policy
    advantages: Tensor  # [P] float64
    weights: Tensor  # [P] float64, the reduction; sums to 1 over the whole step
    old_logprobs: Tensor | None  # [P] float64, of the policy that sampled; None: the current one
    ref_logprobs: Tensor | None  # [P] float64, of the reference policy
    position_offsets: NDArray[np.int64]  # [N+1]
    unknown_rewards: int  # trajectories of the step left out because their reward is NaN

    def select(self, members: NDArray[np.int64]) -> StepTargets:
        """Return the part of the trajectories `members` (rows of this record), in that order.

        Weights keep the denominators of the whole step. Raises InputError for a row out of range.
        """
        rows = np.asarray(members, dtype=np.int64)
        count = len(self.position_offsets) - 1
        if rows.size and (rows.min() < 0 or rows.max() >= count):
            raise InputError(
                f"expected members within 0..{count - 1}, the trajectories of this step; got "
                f"{rows.min()}..{rows.max()}. Select from the step whose batch was planned."
            )
        lengths = np.diff(self.position_offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        shift = np.repeat(self.position_offsets[rows] - offsets[:-1], lengths)
        index = torch.from_numpy(shift + np.arange(offsets[-1])).to(self.mask.device)
        return self._map(lambda column: column[index], offsets)

    def to(self, device: torch.device | str) -> StepTargets:
        """Return this record with its tensors on `device`."""
        return self._map(lambda column: column.to(device), self.position_offsets)

    def _map(
        self, change: Callable[[Tensor], Tensor], position_offsets: NDArray[np.int64]
    ) -> StepTargets:
        old, ref = self.old_logprobs, self.ref_logprobs
        return StepTargets(
            mask=change(self.mask),
            advantages=change(self.advantages),
            weights=change(self.weights),
            old_logprobs=None if old is None else change(old),
            ref_logprobs=None if ref is None else change(ref),
            position_offsets=position_offsets,
            unknown_rewards=self.unknown_rewards,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveOutput:
    """A microbatch's share of the step: the shares of all microbatches add up to the step's."""

    loss: Tensor  # [], with a graph to the log-probs
    metrics: Mapping[str, Tensor]  # each [], detached, weighted by the reduction as the loss is


class PolicyObjective(Protocol):
    """Any objective that sees the model only through log-probs in original order (Eq. 18)."""

    @property
    def reduction(self) -> Reduction:
        """How positions are averaged over the step."""

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs` enter the loss."""

    def advantages(self, batch: TrajectoryBatch) -> NDArray[np.float64]:
        """Return [P] advantages; NaN leaves a position out of the loss."""

    def __call__(self, logprobs: Tensor, targets: StepTargets) -> ObjectiveOutput:
        """Return loss and metrics of [P] log-probs and the targets of the same trajectories."""


def prepare_step(batch: TrajectoryBatch, objective: PolicyObjective) -> StepTargets:
    """Return the targets of a whole optimisation step, on the CPU in float64.

    `batch` must hold every trajectory of the step, over all microbatches and replicas: the
    reduction's denominators and the group statistics are taken here.

    Raises InputError when a needed column is absent or no position is left to train on.
    """
    offsets = np.asarray(batch.position_offsets, dtype=np.int64)
    mask = batch.at_positions(batch.loss_mask).astype(np.bool_)
    advantages = objective.advantages(batch)
    mask &= ~np.isnan(advantages)
    if not mask.any():
        raise InputError(
            f"expected at least one position to train on in {len(batch)} trajectories; got none: "
            "every loss_mask is 0 or every reward is NaN. Give rewards or an advantages column, "
            "or drop this step."
        )
    if objective.needs_reference and batch.ref_logprobs is None:
        raise InputError(
            "expected a ref_logprobs column, since the KL coefficient is above 0; the batch has "
            "none. Add the reference policy's per-token log-probs, or set kl_coefficient=0."
        )

    def kept(values: NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(np.where(mask, values, 0.0).astype(np.float64))

    old, ref = batch.logprobs, batch.ref_logprobs
    return StepTargets(
        mask=torch.from_numpy(mask),
        advantages=kept(advantages),
        weights=torch.from_numpy(_reduction_weights(mask, offsets, objective.reduction)),
        old_logprobs=None if old is None else kept(batch.at_positions(old)),
        ref_logprobs=None if ref is None else kept(batch.at_positions(ref)),
        position_offsets=offsets,
        unknown_rewards=0 if batch.advantages is not None else int(np.isnan(batch.rewards).sum()),
    )


def group_advantages(
    batch: TrajectoryBatch, *, scale_by_std: bool = True, epsilon: float = 1e-6
) -> NDArray[np.float64]:
    """Return [N] advantages (r - mean) / (std + epsilon) over each rollout tree (`tree_ids`).

    The group-relative advantage of Shao et al. (2024), DeepSeekMath, section 4.1, with the sample
    standard deviation (n - 1) that RL engines use; without `scale_by_std`, r - mean. A NaN reward
    enters no statistic and gives NaN; a tree with one known reward has advantage 0.
    """
    rewards = np.asarray(batch.rewards, dtype=np.float64)
    known = ~np.isnan(rewards)
    names, group = np.unique(np.asarray(batch.tree_ids, dtype=np.str_), return_inverse=True)

    def group_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
        totals = np.bincount(group[known], weights=values[known], minlength=len(names))
        return totals.astype(np.float64)

    count = group_sum(np.ones_like(rewards))
    centred = rewards - (group_sum(rewards) / np.maximum(count, 1))[group]
    if not scale_by_std:
        return centred
    std = np.sqrt(group_sum(centred**2) / np.maximum(count - 1, 1))
    return np.asarray(centred / (std[group] + epsilon))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClippedObjective:
    """The clipped importance-ratio surrogate with a reference KL that GRPO and PPO share.

    With ratio = exp(lp - old) and d = ref - lp, the term of a position is

        - min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        + kl_coefficient * (exp(d) - d - 1)

    the second line being the k3 estimator of KL(policy || reference). Without behaviour log-probs
    in the batch, `old` is the current log-prob detached: ratio 1, the on-policy gradient.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    reduction: Reduction = "token-mean"

    def __post_init__(self) -> None:
        _require(0 <= self.clip_low <= 1, "clip_low", "within [0, 1]", self.clip_low)
        _require(0 <= self.clip_high < math.inf, "clip_high", "finite and >= 0", self.clip_high)
        _require(
            0 <= self.kl_coefficient < math.inf,
            "kl_coefficient",
            "finite and >= 0",
            self.kl_coefficient,
        )
        choices = get_args(Reduction)
        _require(self.reduction in choices, "reduction", f"one of {choices}", self.reduction)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference KL enters the loss."""
        return self.kl_coefficient > 0

    def __call__(self, logprobs: Tensor, targets: StepTargets) -> ObjectiveOutput:
        """Return the microbatch's share of loss and metrics.

        logprobs: [P] of these trajectories in the targets' order; any float type, the objective
        itself is computed in float64.
        Metrics: `ratio` (mean importance ratio), `clip_fraction` (positions where clipping took the
        gradient) and, with reference log-probs, `kl`.
        Raises InputError when shapes differ.
        """
        if logprobs.shape != targets.mask.shape:
            raise InputError(
                f"expected log-probs of shape {tuple(targets.mask.shape)}, one for each position "
                f"of the selected trajectories; got {tuple(logprobs.shape)}. Select the targets "
                "of the same members, in the layout's order."
            )
        part = targets.to(logprobs.device)
        # Zero before any exp: a non-finite log-prob at a masked position must not make 0 * inf.
        current = torch.where(part.mask, logprobs, 0.0).to(part.weights.dtype)
        old = current.detach() if part.old_logprobs is None else part.old_logprobs
        ratio = torch.exp(current - old)
        surrogate = ratio * part.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * part.advantages
        term = -torch.minimum(surrogate, clipped)
        measured = {"ratio": ratio, "clip_fraction": (clipped < surrogate).to(ratio.dtype)}
        if part.ref_logprobs is not None:
            difference = part.ref_logprobs - current
            measured["kl"] = torch.exp(difference) - difference - 1
            if self.needs_reference:
                term = term + self.kl_coefficient * measured["kl"]
        return ObjectiveOutput(
            loss=(part.weights * term).sum(),
            metrics={k: (part.weights * v.detach()).sum() for k, v in measured.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(_ClippedObjective):
    """Group relative policy optimisation (Shao et al., 2024, Eq. 3).

    Advantages are `group_advantages` of the rewards, each trajectory's on all of its tokens;
    a batch that has an `advantages` column uses that instead.
    """

    scale_by_std: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        _ClippedObjective.__post_init__(self)
        _require(0 < self.epsilon < math.inf, "epsilon", "finite and > 0", self.epsilon)

    def advantages(self, batch: TrajectoryBatch) -> NDArray[np.float64]:
        """Return [P] advantages; NaN where the reward is unknown."""
        return _position_advantages(batch, scale_by_std=self.scale_by_std, epsilon=self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(_ClippedObjective):
    """Proximal policy optimisation, clipped (Schulman et al., 2017, Eq. 7), with a reference KL.

    Advantages are the batch's `advantages` column, a critic's estimate for each token. A batch
    without one falls back to `group_advantages`: the tree's mean reward stands in for the critic.
    """

    kl_coefficient: float = 0.05

    def advantages(self, batch: TrajectoryBatch) -> NDArray[np.float64]:
        """Return [P] advantages; NaN where neither column nor reward is known."""
        return _position_advantages(batch)


def _position_advantages(
    batch: TrajectoryBatch, *, scale_by_std: bool = True, epsilon: float = 1e-6
) -> NDArray[np.float64]:
    """Return [P]: the advantages column, else the group advantages spread over each trajectory."""
    if batch.advantages is not None:
        return batch.at_positions(batch.advantages).astype(np.float64)
    values = group_advantages(batch, scale_by_std=scale_by_std, epsilon=epsilon)
    return np.repeat(values, np.diff(batch.position_offsets))


def _reduction_weights(
    mask: NDArray[np.bool_], offsets: NDArray[np.int64], reduction: Reduction
) -> NDArray[np.float64]:
    """Return [P] weights that sum to 1 over the step and are 0 at masked positions.

    token-mean: every unmasked token alike. sequence-mean: every trajectory with an unmasked token
    alike, its tokens alike within it.
    """
    if reduction == "token-mean":
        return np.asarray(mask / mask.sum(), dtype=np.float64)
    lengths = np.diff(offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    tokens = np.bincount(owner[mask], minlength=len(lengths))
    return np.asarray(mask / (np.maximum(tokens, 1)[owner] * np.count_nonzero(tokens)))


def _require(valid: bool, name: str, expected: str, got: object) -> None:
    if not valid:
        raise InputError(
            f"expected {name} {expected}; got {got!r}. Change the objective's options."
        )
