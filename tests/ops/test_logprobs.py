"""Mapped log-probs against one trajectory at a time, every gradient included."""

import functools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.bench.measure import peak_extra_bytes
from harts.errors import InputError
from harts.ops.logprobs import mapped_logprobs

from .small_trees import TREES, SmallTree, poisoned, relative_error, small_tree

WIDTH, VOCABULARY = 4, 11


def trajectories(tree: SmallTree) -> list[Tensor]:
    """Physical rows of each trajectory: all paths, a strict prefix, a duplicate, a single token."""
    return [tree.paths[-1][:1], *reversed(tree.paths), tree.paths[-1][:3], tree.paths[-1]]


def targets_of(tree: SmallTree) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    tokens = torch.randint(VOCABULARY, (tree.index.rows,))
    paths = trajectories(tree)
    return torch.cat([p[:-1] for p in paths]), torch.cat([tokens[p[1:]] for p in paths])


def inputs(tree: SmallTree, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """hidden with NaN padding, weight, bias."""
    torch.manual_seed(3)
    hidden = torch.randn(tree.index.rows, WIDTH, dtype=dtype)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    return [poisoned(hidden, tree.index.compact_rows), weight, bias]


def oracle(
    tree: SmallTree, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Every trajectory alone: log-probs and entropies, len - 1 of each."""
    _, targets = targets_of(tree)
    logprobs, entropies, done = [], [], 0
    for path in trajectories(tree):
        logits = hidden[path[:-1]] @ weight.t()
        logits = (logits if bias is None else logits + bias) / temperature
        logp = logits.log_softmax(-1)
        logprobs.append(logp.gather(1, targets[done : done + len(path) - 1, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
        done += len(path) - 1
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("block_rows", [None, 1, 3])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("temperature", "biased"), [(1.0, False), (0.7, True)])
def test_logprobs_and_every_gradient_equal_one_trajectory_at_a_time(
    name, block_rows, entropy, temperature, biased
):
    tree = small_tree(name)
    hidden, weight, bias = inputs(tree)
    leaves = [hidden, weight, bias] if biased else [hidden, weight]
    bias = bias if biased else None
    rows, targets = targets_of(tree)
    got = mapped_logprobs(
        hidden,
        weight,
        rows,
        targets,
        bias=bias,
        temperature=temperature,
        block_rows=block_rows,
        return_entropy=entropy,
    )
    want = oracle(tree, hidden, weight, bias, temperature)
    got, want = (got, want) if entropy else ((got,), want[:1])
    torch.manual_seed(1)
    g = [torch.randn(len(rows), dtype=torch.float64) for _ in got]
    for a, b in zip(got, want, strict=True):
        assert a.shape == rows.shape
        assert relative_error(a, b) < 1e-12
    mine, theirs = torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g)
    compact = tree.index.compact_rows
    assert (mine[0][compact:] == 0).all()
    assert relative_error(mine[0][:compact], theirs[0][:compact]) < 1e-12
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        assert relative_error(a, b) < 1e-12


def test_the_last_node_of_a_trajectory_has_no_logprob():
    tree = small_tree("nested forks")
    hidden, weight, _ = inputs(tree)
    rows, targets = targets_of(tree)
    got = mapped_logprobs(hidden, weight, rows, targets)
    want, _ = oracle(tree, hidden, weight, None, 1.0)
    assert len(got) == sum(len(p) - 1 for p in trajectories(tree))
    # The mutation: an extra position per trajectory whose target defaults to the root's token.
    last = torch.stack([p[-1] for p in trajectories(tree)])
    extra = mapped_logprobs(
        hidden, weight, torch.cat([rows, last]), torch.cat([targets, targets[:1].expand(len(last))])
    )
    assert relative_error(got.sum(), want.sum()) < 1e-12
    assert relative_error(extra.sum(), want.sum()) > 1e-2


def test_fork_row_gives_each_label_its_own_logprob_and_gradient():
    torch.manual_seed(2)
    hidden = torch.randn(1, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    rows, targets = torch.zeros(4, dtype=torch.int64), torch.tensor([7, 2, 7, 0])
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    got = mapped_logprobs(hidden, weight, rows, targets)
    logp = (hidden[0] @ weight.t()).log_softmax(-1)
    assert relative_error(got, logp[targets]) < 1e-12
    (mine,) = torch.autograd.grad(got @ advantages, hidden, retain_graph=True)
    (want,) = torch.autograd.grad(logp[targets] @ advantages, hidden, retain_graph=True)
    assert relative_error(mine, want) < 1e-12
    # A single gradient times a reuse count is not the sum over labels.
    (wrong,) = torch.autograd.grad(logp[targets[0]] * advantages.sum(), hidden)
    assert relative_error(wrong, want) > 1e-2


def test_rows_that_no_position_reads_are_skipped():
    hidden = torch.full((4, WIDTH), torch.nan, dtype=torch.float64)
    hidden[2] = 1.0
    hidden.requires_grad_()
    weight = torch.ones(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    got = mapped_logprobs(hidden, weight, torch.tensor([2]), torch.tensor([3]))
    assert got.tolist() == pytest.approx([-math.log(VOCABULARY)])
    grads = torch.autograd.grad(got.sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][[0, 1, 3]] == 0).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_positions_with_zero_gradient_leave_the_rest_right(entropy):
    tree = small_tree("nested forks")
    hidden, weight, bias = leaves = inputs(tree)
    rows, targets = targets_of(tree)
    mask = (torch.arange(len(rows)) % 3 == 0).double()
    got = mapped_logprobs(
        hidden, weight, rows, targets, bias=bias, block_rows=2, return_entropy=entropy
    )
    want = oracle(tree, hidden, weight, bias, 1.0)
    got, want = (got[1], want[1]) if entropy else (got, want[0])
    for a, b in zip(
        torch.autograd.grad(got @ mask, leaves),
        torch.autograd.grad(want @ mask, leaves),
        strict=True,
    ):
        assert relative_error(a[: tree.index.compact_rows], b[: tree.index.compact_rows]) < 1e-12


def test_no_positions_give_no_logprobs_and_zero_gradients():
    hidden = torch.randn(2, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    got, entropy = mapped_logprobs(hidden, weight, none, none, return_entropy=True)
    assert got.shape == entropy.shape == (0,)
    assert all((g == 0).all() for g in torch.autograd.grad(got.sum(), (hidden, weight)))


def test_checkpoint_recomputes_the_same_gradients():
    tree = small_tree("nested forks")
    hidden, weight, bias = leaves = inputs(tree)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return mapped_logprobs(hidden, weight, *targets_of(tree), bias=bias)

    plain = torch.autograd.grad(run(hidden, weight, bias).sum(), leaves)
    again = torch.autograd.grad(
        checkpoint(run, hidden, weight, bias, use_reentrant=False).sum(), leaves
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_gradcheck():
    tree = small_tree("fan-out in a short trunk", padding=1)
    hidden, weight, bias = inputs(tree)
    hidden = hidden.detach().nan_to_num(0.5).requires_grad_()
    rows, targets = targets_of(tree)
    assert torch.autograd.gradcheck(
        lambda h, w, b: mapped_logprobs(
            h, w, rows, targets, bias=b, temperature=1.3, block_rows=2, return_entropy=True
        ),
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_accumulate_in_float32(dtype):
    tree = small_tree("nested forks")
    hidden, weight, bias = inputs(tree, dtype)
    rows, targets = targets_of(tree)
    got = mapped_logprobs(hidden, weight, rows, targets, bias=bias)
    want, _ = oracle(tree, hidden.double(), weight.double(), bias.double(), 1.0)
    assert got.dtype == torch.float32
    assert relative_error(got.double(), want) < 1e-6
    assert torch.autograd.grad(got.sum(), weight)[0].dtype == dtype


@pytest.mark.parametrize(
    ("rows", "targets", "said"),
    [
        ([0, 5], [1, 1], r"target_rows must lie in \[0, 5\); got 5 at position 1"),
        ([-1, 0], [1, 1], "target_rows .* got -1 at position 0"),
        ([0, 1], [1, VOCABULARY], "targets must lie .* got 11 at position 1"),
        ([0, 1], [-100, 1], "targets must lie .* got -100 at position 0"),
        ([0], [1, 1], r"both be \[P\]"),
    ],
)
def test_targets_out_of_range_are_refused_in_a_sentence(rows, targets, said):
    with pytest.raises(InputError, match=said):
        mapped_logprobs(
            torch.zeros(5, WIDTH),
            torch.zeros(VOCABULARY, WIDTH),
            torch.tensor(rows),
            torch.tensor(targets),
        )


@pytest.mark.parametrize("option", [{"temperature": 0.0}, {"block_rows": 0}])
def test_options_out_of_range_are_refused(option):
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(InputError, match=next(iter(option))):
        mapped_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), one, one, **option)


def _prepare_large_step(entropy):
    rows, vocabulary, width = 8192, 157184, 64
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) * 0.1).requires_grad_()
    targets = torch.randint(vocabulary, (2 * rows,))
    target_rows = torch.randint(rows, (2 * rows,))

    def step():
        got = mapped_logprobs(hidden, weight, target_rows, targets, return_entropy=entropy)
        (got[0].sum() + got[1].sum() if entropy else got.sum()).backward()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
def test_peak_memory_stays_far_below_the_full_logits(entropy):
    """C x A logits would be 5.2 GB; forward and backward together take under 600 MB."""
    peak = peak_extra_bytes(functools.partial(_prepare_large_step, entropy))
    weight_gradient = 157184 * 64 * 4
    assert weight_gradient < peak < 600e6
