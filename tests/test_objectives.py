"""The objective on log-probs in original order: its values, its gradient, its independence of
microbatches."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from harts.errors import InputError
from harts.objectives import (
    GRPO,
    PPO,
    ObjectiveOutput,
    PolicyObjective,
    group_advantages,
    prepare_step,
)
from harts.trajectories import TrajectoryBatch

OBJECTIVES = [
    GRPO(),
    GRPO(reduction="sequence-mean", kl_coefficient=0.3, scale_by_std=False),
    PPO(clip_low=0.1, clip_high=0.3),
    PPO(reduction="sequence-mean"),
]


def make_batch(lengths, **columns) -> TrajectoryBatch:
    """A batch of trajectories of these lengths, every token but the first of each in the loss."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    mask = np.ones(offsets[-1], dtype=np.bool_)
    mask[offsets[:-1]] = False
    per_token = {"logprobs", "ref_logprobs", "advantages"}
    for name in per_token & {k for k, v in columns.items() if v is not None}:
        columns[name] = np.asarray(columns[name], dtype=np.float32)
    defaults = {"loss_mask": mask, "rewards": np.zeros(len(lengths))}
    return TrajectoryBatch.from_flat(
        np.arange(offsets[-1], dtype=np.int32), offsets, **defaults | columns
    )


def random_batch(seed, *, advantages=False) -> tuple[TrajectoryBatch, torch.Tensor]:
    """Twelve trajectories in four trees, some of one token, and current log-probs for them.

    Behaviour log-probs lie far enough from the current ones that both clip bounds are passed.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=12)
    lengths[:2] = 1, 6
    total = int(lengths.sum())
    mask = rng.random(total) < 0.7
    mask[np.cumsum(lengths) - lengths] = False
    batch = make_batch(
        lengths,
        rewards=np.where(np.arange(12) == 3, np.nan, rng.normal(size=12)),
        tree_ids=tuple(str(i % 4) for i in range(12)),
        logprobs=-rng.exponential(size=total),
        ref_logprobs=-rng.exponential(size=total),
        advantages=rng.normal(size=total) if advantages else None,
        loss_mask=mask,
    )
    old = batch.at_positions(batch.logprobs).astype(np.float64)
    current = np.minimum(old + rng.normal(scale=0.3, size=len(old)), -1e-3)
    return batch, torch.tensor(current)


def whole(batch, objective: PolicyObjective, logprobs) -> tuple[ObjectiveOutput, torch.Tensor]:
    """Output of the step in one piece, and the gradient of its loss."""
    leaf = logprobs.clone().requires_grad_()
    output = objective(leaf, prepare_step(batch, objective))
    (gradient,) = torch.autograd.grad(output.loss, leaf)
    return output, gradient


def positions_of(batch, members) -> torch.Tensor:
    ends = batch.position_offsets
    return torch.cat([torch.arange(ends[m], ends[m + 1]) for m in members])


def random_parts(count, seed) -> list[np.ndarray]:
    """A random partition of the trajectories, in random order within and between its parts."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, count), size=int(rng.integers(1, 6)), replace=False))
    return np.split(rng.permutation(count), cuts)


def naive_loss(batch, objective, logprobs) -> torch.Tensor:
    """The loss by a loop over trajectories and tokens, straight from the per-token columns."""
    groups: dict[str, list[float]] = {}
    for tree, reward in zip(batch.tree_ids, batch.rewards, strict=True):
        if not math.isnan(reward):
            groups.setdefault(tree, []).append(float(reward))
    trajectories = []
    start = 0
    for i, (begin, end) in enumerate(pairwise(batch.offsets)):
        terms = []
        for j, token in enumerate(range(begin + 1, end)):
            if not batch.loss_mask[token]:
                continue
            if batch.advantages is not None:
                advantage = float(batch.advantages[token])
            elif math.isnan(batch.rewards[i]):
                continue
            else:
                rewards = groups[batch.tree_ids[i]]
                advantage = float(batch.rewards[i]) - np.mean(rewards)
                if getattr(objective, "scale_by_std", True):
                    spread = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
                    advantage /= spread + getattr(objective, "epsilon", 1e-6)
            lp = logprobs[start + j]
            ratio = torch.exp(lp - float(batch.logprobs[token]))
            low, high = 1 - objective.clip_low, 1 + objective.clip_high
            bounded = torch.clip(ratio, low, high)
            pessimistic = min(ratio * advantage, bounded * advantage, key=lambda x: x.item())
            d = float(batch.ref_logprobs[token]) - lp
            terms.append(-pessimistic + objective.kl_coefficient * (torch.exp(d) - d - 1))
        start += end - begin - 1
        if terms:
            trajectories.append(terms)
    if objective.reduction == "token-mean":
        every = [term for terms in trajectories for term in terms]
        return sum(every) / len(every)
    return sum(sum(terms) / len(terms) for terms in trajectories) / len(trajectories)


# Values worked out by hand


def test_group_advantages_are_rewards_standardised_within_their_tree():
    batch = make_batch(
        [2] * 6,
        rewards=np.array([3.0, 7.0, 1.0, np.nan, 5.0, 4.0]),
        tree_ids=("a", "b", "a", "a", "a", "c"),
    )
    # tree a: 3, 1, 5 with mean 3 and sample deviation 2; b and c have one known reward each.
    expected = [0.0, 0.0, -2 / 2.5, np.nan, 2 / 2.5, 0.0]
    np.testing.assert_allclose(group_advantages(batch, epsilon=0.5), expected, rtol=1e-15)
    centred = [0.0, 0.0, -2.0, np.nan, 2.0, 0.0]
    np.testing.assert_array_equal(group_advantages(batch, scale_by_std=False), centred)


def test_clipped_surrogate_takes_the_pessimistic_branch():
    # Ratios 2, 2, 1/2, 1/2 and 1 against bounds 0.8 and 1.3, advantages of both signs.
    batch = make_batch([6], logprobs=[0, -2, -2, -1, -1, -1], advantages=[0, 1, -1, 1, -1, 3])
    step = [math.log(2), math.log(2), -math.log(2), -math.log(2), 0.0]
    logprobs = torch.tensor([-2.0, -2.0, -1.0, -1.0, -1.0]).double() + torch.tensor(step).double()
    output, gradient = whole(batch, GRPO(clip_low=0.2, clip_high=0.3), logprobs)
    terms = [-1.3, 2.0, -0.5, 0.8, -3.0]
    assert output.loss.item() == pytest.approx(sum(terms) / 5, rel=1e-7)
    np.testing.assert_allclose(gradient, np.array([0, 2, -0.5, 0, -3]) / 5, rtol=1e-7)
    assert output.metrics["clip_fraction"].item() == pytest.approx(2 / 5, rel=1e-15)
    assert output.metrics["ratio"].item() == pytest.approx(6 / 5, rel=1e-7)


def test_reference_kl_is_the_k3_estimator():
    batch = make_batch([2], logprobs=[0, -1], ref_logprobs=[0, -0.5], advantages=[0, 0])
    output, gradient = whole(batch, PPO(kl_coefficient=0.1), torch.tensor([-1.0]).double())
    kl = math.exp(0.5) - 0.5 - 1
    assert output.metrics["kl"].item() == pytest.approx(kl, rel=1e-15)
    assert output.loss.item() == pytest.approx(0.1 * kl, rel=1e-15)
    assert gradient.item() == pytest.approx(0.1 * (1 - math.exp(0.5)), rel=1e-15)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token-mean", [1 / 3, 1 / 3, 0, 0, 0, 1 / 3]),
        ("sequence-mean", [1 / 4, 1 / 4, 0, 0, 0, 1 / 2]),
    ],
)
def test_reduction_weights_count_only_unmasked_tokens_and_trajectories(reduction, expected):
    # Masked, beside the first tokens: the last of trajectory 0, both of trajectory 2.
    mask = np.array([0, 1, 1, 0, 0, 0, 0, 0, 0, 1], dtype=np.bool_)
    batch = make_batch([4, 1, 3, 2], advantages=np.ones(10), loss_mask=mask)
    targets = prepare_step(batch, GRPO(reduction=reduction))
    np.testing.assert_array_equal(targets.mask, np.array(expected) > 0)
    np.testing.assert_allclose(targets.weights, expected, rtol=1e-15)


def test_without_behaviour_logprobs_the_gradient_is_on_policy():
    batch = make_batch([3, 2], rewards=np.array([1.0, 0.0]))
    output, gradient = whole(batch, GRPO(scale_by_std=False), torch.tensor([-1.0, -2.0, -3.0]))
    assert output.metrics["ratio"].item() == pytest.approx(1.0, rel=1e-15)
    np.testing.assert_allclose(gradient, [-0.5 / 3, -0.5 / 3, 0.5 / 3], rtol=1e-6)


def test_an_advantages_column_replaces_rewards_known_or_not():
    batch = make_batch([2, 2], rewards=np.array([np.nan, 9.0]), advantages=[8, 2, 8, -4])
    for objective in (GRPO(), PPO()):
        np.testing.assert_array_equal(objective.advantages(batch), [2, -4])
    targets = prepare_step(batch, GRPO())
    assert targets.mask.all()
    assert targets.unknown_rewards == 0


def test_trajectories_of_unknown_reward_leave_loss_and_denominator():
    batch = make_batch([3, 3, 4], rewards=np.array([1.0, 0.0, np.nan]), logprobs=-np.ones(10))
    logprobs = -torch.ones(7, dtype=torch.float64)
    targets = prepare_step(batch, GRPO())
    _, gradient = whole(batch, GRPO(), logprobs)
    _, alone = whole(batch.select(np.array([0, 1])), GRPO(), logprobs[:4])
    assert targets.unknown_rewards == 1
    assert torch.equal(gradient, torch.cat([alone, torch.zeros(3)]))


# The same step, whatever the microbatches


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("advantages", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_a_loop_over_trajectories(objective, advantages, seed):
    batch, logprobs = random_batch(seed, advantages=advantages)
    output, gradient = whole(batch, objective, logprobs)
    leaf = logprobs.clone().requires_grad_()
    loss = naive_loss(batch, objective, leaf)
    (expected,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert 0 < output.metrics["clip_fraction"] < 1


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_any_microbatches_give_the_step_s_loss_gradient_and_metrics(objective, seed):
    batch, logprobs = random_batch(seed)
    output, gradient = whole(batch, objective, logprobs)
    targets = prepare_step(batch, objective)
    leaf = logprobs.clone().requires_grad_()
    shares = []
    for members in random_parts(len(batch), seed):
        shares.append(objective(leaf[positions_of(batch, members)], targets.select(members)))
        shares[-1].loss.backward()
    loss = sum(share.loss for share in shares)
    torch.testing.assert_close(loss, output.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)
    for name, value in output.metrics.items():
        added = sum(share.metrics[name] for share in shares)
        torch.testing.assert_close(added, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_a_denominator_per_microbatch_would_be_seen(objective):
    # The mutation: targets prepared from each microbatch alone, its losses averaged.
    batch, logprobs = random_batch(0, advantages=True)
    _, gradient = whole(batch, objective, logprobs)
    leaf = logprobs.clone().requires_grad_()
    parts = [np.arange(0, 4), np.arange(4, 12)]
    for members in parts:
        alone = prepare_step(batch.select(members), objective)
        output = objective(leaf[positions_of(batch, members)], alone)
        (output.loss / len(parts)).backward()
    assert (leaf.grad - gradient).abs().max() > 1e-3 * gradient.abs().max()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_permuting_the_batch_permutes_the_gradient(objective):
    batch, logprobs = random_batch(7)
    order = np.random.default_rng(7).permutation(len(batch))
    output, gradient = whole(batch, objective, logprobs)
    index = positions_of(batch, order)
    permuted, permuted_gradient = whole(batch.select(order), objective, logprobs[index])
    torch.testing.assert_close(permuted.loss, output.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(permuted_gradient, gradient[index], rtol=1e-12, atol=1e-12)


def test_selecting_twice_selects_rows_of_the_part():
    batch, _ = random_batch(1)
    targets = prepare_step(batch, GRPO())
    part = targets.select(np.array([5, 2, 9])).select(np.array([2, 0]))
    direct = targets.select(np.array([9, 5]))
    assert torch.equal(part.advantages, direct.advantages)
    np.testing.assert_array_equal(part.position_offsets, direct.position_offsets)


# What must not reach the loss


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_values_at_masked_positions_reach_neither_loss_nor_gradient(objective, poison):
    clean, logprobs = random_batch(2, advantages=True)
    output, gradient = whole(clean, objective, logprobs)
    values = {"logprobs": poison, "ref_logprobs": poison, "advantages": 1e30}
    hidden = {c: np.where(clean.loss_mask, getattr(clean, c), v) for c, v in values.items()}
    dirty = replace(clean, **{c: v.astype(np.float32) for c, v in hidden.items()})
    current = logprobs.clone()
    current[~torch.from_numpy(clean.at_positions(clean.loss_mask))] = poison
    poisoned, poisoned_gradient = whole(dirty, objective, current)
    assert torch.equal(poisoned.loss, output.loss)
    assert torch.equal(poisoned_gradient, gradient)
    assert all(torch.equal(poisoned.metrics[k], v) for k, v in output.metrics.items())


def test_a_kl_without_reference_logprobs_says_what_to_do():
    batch = make_batch([3], rewards=np.ones(1))
    with pytest.raises(InputError, match=r"ref_logprobs.* or set kl_coefficient=0"):
        prepare_step(batch, PPO())
    prepare_step(batch, PPO(kl_coefficient=0))


@pytest.mark.parametrize(
    "batch",
    [
        make_batch([2, 3], rewards=np.array([np.nan, np.nan])),
        make_batch([2, 3], loss_mask=np.zeros(5, dtype=np.bool_)),
        make_batch([1, 1]),
    ],
    ids=["no known reward", "all masked", "one-token trajectories"],
)
def test_a_step_with_nothing_to_train_on_is_refused(batch):
    with pytest.raises(InputError, match="at least one position to train on"):
        prepare_step(batch, GRPO())


def test_a_logprob_for_the_last_token_is_refused():
    # One entry a token, the last token's "next token" made up: the count gives it away.
    batch = make_batch([3, 4])
    targets = prepare_step(batch, GRPO())
    with pytest.raises(InputError, match=r"shape \(5,\).* got \(7,\)"):
        GRPO()(torch.zeros(7), targets)


def test_members_outside_the_step_are_refused():
    targets = prepare_step(make_batch([3, 4]), GRPO())
    for members in ([0, 2], [-1]):
        with pytest.raises(InputError, match=r"within 0\.\.1"):
            targets.select(np.array(members))


@pytest.mark.parametrize("kind", [GRPO, PPO])
@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": -0.1},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"clip_high": math.inf},
        {"kl_coefficient": -1.0},
        {"kl_coefficient": math.nan},
        {"reduction": "mean"},
    ],
    ids=repr,
)
def test_bad_options_are_refused_on_construction(kind, options):
    (name,) = options
    with pytest.raises(InputError, match=f"expected {name}"):
        kind(**options)


def test_a_zero_epsilon_is_refused():
    with pytest.raises(InputError, match="expected epsilon"):
        GRPO(epsilon=0.0)
