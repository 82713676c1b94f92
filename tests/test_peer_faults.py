"""Faults that users met in other systems, one test a kind, through the whole model.

Kinds that belong to one part are tested beside it: a default mask that overrides (5), an extra
log-prob for the last node (7), fork rows with several labels (8), equal at step one only (9),
padding in router statistics (4, 11), routing differences (12), rerouted prefixes (13) and the
meaning of capacity (14) carry these names in test_layout, test_fidelity, test_forest,
models/test_bailing_hybrid and planning/test_step.
"""

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from harts.errors import InputError
from harts.fidelity import (
    compare_gradients,
    float64_everywhere,
    gradients,
    logprobs_alone,
    run_alone,
)
from harts.models import TreePolicy, prepare
from harts.models.bailing_hybrid import FAMILY, small_model
from harts.objectives import GRPO, prepare_step
from harts.ops.delta_rule import chunk_delta_rule
from harts.planning.step import plan_step
from harts.training.step import RouterLosses, run_step
from harts.trajectories import TrajectoryBatch
from tests.forests import batch_of, lay_out

VOCABULARY = 30


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, TreePolicy]:
    torch.manual_seed(0)
    model = small_model(VOCABULARY).double()
    return model, prepare(copy.deepcopy(model))


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def logprobs_differ(pair: tuple[PreTrainedModel, TreePolicy], batch: TrajectoryBatch) -> float:
    model, policy = pair
    _, _, layout = lay_out(batch, chunk_size=64)
    with float64_everywhere(), torch.no_grad():
        packed = policy(layout).logprobs
        return float((packed - logprobs_alone(model, FAMILY, batch)).abs().max())


def test_packed_sequences_do_not_leak_recurrent_state(
    pair: tuple[PreTrainedModel, TreePolicy],
) -> None:
    """Fault 1: packed bounds reached the convolution, but not the delta rule."""
    apart = batch_of([[0, *tokens(1, 90)], [1, *tokens(2, 70)], [2, *tokens(3, 130)]])
    assert logprobs_differ(pair, apart) < 1e-11


def test_short_convolution_does_not_read_across_a_packed_boundary(
    pair: tuple[PreTrainedModel, TreePolicy],
) -> None:
    """Fault 2: with sequences of one to three tokens every window would reach a neighbour."""
    short = batch_of([[i, *tokens(i, i % 3)] for i in range(12)])
    assert logprobs_differ(pair, short) < 1e-11


def test_branch_shorter_than_the_convolution_has_the_right_gradient(
    pair: tuple[PreTrainedModel, TreePolicy],
) -> None:
    """Fault 3: the gradient of a context that spans several tiny branches."""
    model, policy = pair
    trunk = tokens(4, 70)
    comb = [[*trunk, *([7] * i), 8 + i, *tokens(i, i % 3)] for i in range(6)]
    batch = batch_of(comb, rewards=np.linspace(-1, 1, 6), tree_ids=["t"] * 6)
    plan, targets = plan_step(batch, replicas=1, capacity=500), prepare_step(batch, GRPO())
    router = RouterLosses(z_coefficient=0.1)
    model.zero_grad()
    policy.zero_grad()
    with float64_everywhere():
        run_alone(model, FAMILY, batch, plan, targets, GRPO(), router)
        run_step(policy, batch, plan, targets, GRPO(), router)
    row = compare_gradients(
        gradients(policy.model), gradients(model), label="short branches", bound=1e-9
    )
    assert row.passed, row


def test_zero_length_and_duplicated_tail_segments_never_reach_a_kernel(
    pair: tuple[PreTrainedModel, TreePolicy],
) -> None:
    """Fault 6: duplicates and strict prefixes make no sequence; an empty one is refused."""
    trunk = tokens(5, 66)
    batch = batch_of([trunk, [*trunk, 1], trunk, trunk[:64], [*trunk, 1], trunk[:1]])
    _, calls, layout = lay_out(batch, chunk_size=64)
    assert len(calls.sequences) == 1
    assert all((np.diff(r.cu_seqlens) > 0).all() for r in layout.rounds)
    assert logprobs_differ(pair, batch) < 1e-11
    empty = torch.zeros(3, 1, 4)
    with pytest.raises(InputError, match=r"empty|zero|length"):
        chunk_delta_rule(
            empty, empty, empty, empty, torch.zeros(3, 1), cu_seqlens=torch.tensor([0, 3, 3])
        )


def test_the_truth_is_no_packed_forward_since_that_is_silently_wrong(
    pair: tuple[PreTrainedModel, TreePolicy],
) -> None:
    """Fault 10: two sequences in one row of the library's model read each other."""
    model, _ = pair
    first, second = [0, *tokens(6, 20)], [1, *tokens(7, 20)]
    batch = batch_of([first, second])
    with float64_everywhere(), torch.no_grad():
        packed = model(input_ids=torch.tensor([first + second])).logits[0].log_softmax(-1)
        targets = torch.tensor(second[1:])
        wrong = packed[len(first) : -1].gather(1, targets.unsqueeze(1)).squeeze(1)
        truth = logprobs_alone(model, FAMILY, batch)[len(first) - 1 :]
    assert float((wrong - truth).abs().max()) > 1e-2
    assert logprobs_differ(pair, batch) < 1e-11
