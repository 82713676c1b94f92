"""Compiled log-probs against float64 on the CPU."""

import pytest
import torch
from torch import Tensor

from harts.ops.logprobs import mapped_logprobs
from harts.ops.logprobs.records import Projection
from harts.ops.logprobs.reference import map_logprobs
from harts.ops.logprobs.shards import combine_partials, vocabulary_partial
from harts.ops.logprobs.streamed import why_not_streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double().cpu() - want.detach()).norm() / want.detach().norm())


def inputs(rows: int, vocabulary: int, width: int, biased: bool, dtype=torch.bfloat16):
    torch.manual_seed(rows)
    hidden = torch.randn(rows + 5, width, dtype=dtype)
    hidden[rows:] = torch.nan
    weight = torch.randn(vocabulary, width) / width**0.5
    leaves = [hidden, weight.to(dtype)]
    if biased:
        leaves.append(torch.randn(vocabulary, dtype=dtype))
    positions = 3 * rows
    target_rows = torch.randint(rows, (positions,))
    targets = torch.randint(vocabulary, (positions,))
    targets[: positions // 2] %= 3  # many positions share row and target
    return leaves, target_rows, targets


def exact(leaves, target_rows, targets, entropy, cotangents):
    leaves = [t.double().requires_grad_() for t in leaves]
    bias = leaves[2] if len(leaves) > 2 else None
    out = map_logprobs(leaves[0], leaves[1], target_rows, targets, bias, 0.8, None, entropy)
    out = out if entropy else out[:1]
    grads = torch.autograd.grad(out, leaves, [c.double() for c in cotangents[: len(out)]])
    return out, grads


def compiled(leaves, target_rows, targets, entropy, cotangents):
    leaves = [t.cuda().requires_grad_() for t in leaves]
    bias = leaves[2] if len(leaves) > 2 else None
    out = mapped_logprobs(
        leaves[0],
        leaves[1],
        target_rows.cuda(),
        targets.cuda(),
        bias=bias,
        temperature=0.8,
        return_entropy=entropy,
    )
    out = out if entropy else (out,)
    return out, torch.autograd.grad(out, leaves, [c.cuda() for c in cotangents[: len(out)]])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"), [(1, 3, 8), (130, 1000, 64), (300, 257, 200), (70, 5000, 320)]
)
def test_values_and_gradients_against_float64(rows, vocabulary, width, biased, entropy):
    leaves, target_rows, targets = inputs(rows, vocabulary, width, biased)
    assert why_not_streamed(leaves[0].cuda(), leaves[1].cuda()) is None
    cotangents = [torch.randn(len(targets)) for _ in range(2)]
    want, wanted = exact(leaves, target_rows, targets, entropy, cotangents)
    got, grads = compiled(leaves, target_rows, targets, entropy, cotangents)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 2e-6
    assert (grads[0][rows:] == 0).all()
    for a, b in zip(grads, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        # One rounding of the logits' gradient and one of the result, 1.7e-3 each.
        assert relative(a, b) < 3.5e-3


def test_gradients_are_no_worse_than_those_of_plain_bfloat16():
    leaves, target_rows, targets = inputs(400, 3000, 256, False)
    leaves[0] = leaves[0][:400]
    cotangents = [torch.randn(len(targets))]
    _, wanted = exact(leaves, target_rows, targets, False, cotangents)
    _, ours = compiled(leaves, target_rows, targets, False, cotangents)
    plain = [t.cuda().requires_grad_() for t in leaves]
    logits = (plain[0] @ plain[1].t()).float() / 0.8
    out = logits.log_softmax(-1)[target_rows.cuda(), targets.cuda()]
    theirs = torch.autograd.grad(out, plain, cotangents[0].cuda())
    for a, b, w in zip(ours, theirs, wanted, strict=True):
        assert relative(a, w) <= 1.2 * relative(b, w)


def test_sure_targets_keep_relative_precision():
    # p of the target is nearly 1, so that its gradient is a difference of nearly equal numbers.
    hidden = torch.zeros(4, 16, dtype=torch.bfloat16)
    hidden[:, 0] = 1.0
    weight = torch.zeros(300, 16, dtype=torch.bfloat16)
    weight[7, 0] = 8.0
    at, targets = torch.arange(4), torch.full((4,), 7)
    ones = [torch.ones(4)]
    want, wanted = exact([hidden, weight], at, targets, False, ones)
    got, grads = compiled([hidden, weight], at, targets, False, ones)
    assert relative(got[0], want[0]) < 1e-2
    assert relative(grads[0], wanted[0]) < 1e-2


def test_two_runs_are_bit_identical():
    leaves, target_rows, targets = inputs(500, 2000, 128, True)
    cotangents = [torch.randn(len(targets)) for _ in range(2)]
    first, again = (compiled(leaves, target_rows, targets, True, cotangents) for _ in range(2))
    for a, b in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
        assert torch.equal(a, b)


def test_shards_combine_to_the_whole():
    leaves, target_rows, targets = inputs(200, 900, 64, False)
    hidden, weight, rows, tokens = (t.cuda() for t in (*leaves, target_rows, targets))
    every = torch.arange(200, device="cuda")
    parts = [
        vocabulary_partial(hidden, Projection(weight[a:b], None, 1.0, a), every, rows, tokens)
        for a, b in ((0, 300), (300, 301), (301, 900))
    ]
    whole = combine_partials(parts)
    got = whole.target_logits - whole.log_partition()[rows]
    assert relative(got, mapped_logprobs(hidden, weight, rows, tokens).double().cpu()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_run_the_plain_form_in_float32(dtype):
    leaves, target_rows, targets = inputs(50, 100, 32, False, dtype)
    assert str(dtype) in why_not_streamed(leaves[0].cuda(), leaves[1].cuda())
    cotangents = [torch.randn(len(targets))]
    want, wanted = exact(leaves, target_rows, targets, False, cotangents)
    got, grads = compiled(leaves, target_rows, targets, False, cotangents)
    assert relative(got[0], want[0]) < 2e-6
    assert relative(grads[1], wanted[1]) < (1e-5 if dtype == torch.float32 else 1e-3)
