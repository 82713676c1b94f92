"""GPU forms of the delta rule against trajectory-wise through the same kernels, and float64.

Slow gates matter: a wrong boundary state hides behind fast ones.
"""

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.errors import UnsupportedError
from harts.ops.delta_rule import chunk_delta_rule, tree_delta_rule
from harts.ops.delta_rule.dispatch import _fla_version
from harts.ops.device_copy import on_device
from harts.ops.kept_outputs import keep_outputs
from harts.ops.tree_index import TreeIndex
from tests.forests import lay_out, random_batch
from tests.ops.test_delta_rule import Branch, HandMadeTree, build_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(_fla_version() is None, reason="needs fla-core"),
]

NAMES = ("output", "query", "key", "value", "log_decay", "beta")
B = 64
# name: (by channel, query/key heads, value heads, K, V, dtype, promised bound)
CASES = {
    "KDA 128 bounded": (True, 2, 2, 128, 128, torch.bfloat16, -5.0),
    "KDA 128": (True, 2, 2, 128, 128, torch.bfloat16, None),
    "KDA 64 fp16": (True, 3, 3, 64, 64, torch.float16, -5.0),
    "KDA 256": (True, 1, 1, 256, 256, torch.bfloat16, -5.0),
    "KDA grouped": (True, 1, 2, 64, 128, torch.bfloat16, -5.0),
    "GDN 128 grouped": (False, 2, 4, 128, 128, torch.bfloat16, None),
    "GDN 64": (False, 2, 2, 64, 64, torch.bfloat16, None),
    "GDN 256 fp16": (False, 1, 2, 256, 256, torch.float16, None),
}
EVERY = pytest.mark.parametrize("case", list(CASES))
MAIN = pytest.mark.parametrize("case", ["KDA 128 bounded", "GDN 128 grouped"])
GATES = {"slow": (0.0, 0.01), "fast": (0.5, 4.5)}

# One root in five pieces, forks at B-1, B, B+1 and forks of forks inside one chunk.
PIECES = [
    Branch(None, 0, 400),
    Branch(0, 63, 90),
    Branch(0, 64, 10),
    Branch(0, 65, 200),
    Branch(0, 130, 70),
    Branch(0, 197, 64),
    Branch(0, 256, 1),
    Branch(0, 390, 128),
    Branch(3, 70, 5),
    Branch(3, 200, 150),
    Branch(None, 0, 3),
    Branch(None, 0, 64),
]


def chain(rounds: int) -> list[Branch]:
    """Each sequence forks off the one before, past one of its chunk boundaries."""
    branches, fork = [Branch(None, 0, 150)], 100
    for parent in range(rounds - 1):
        branches.append(Branch(parent, fork, 150))
        fork += 67 + parent % 3
    return branches


def on_gpu(tree: HandMadeTree) -> tuple[TreeIndex, list[Tensor]]:
    return move(tree.index), [path.cuda() for path in tree.paths]


def move(index: TreeIndex) -> TreeIndex:
    """The same index with its tensors on the GPU, and no twin on the host."""
    return on_device(index, "cuda")


def make_rows(rows: int, case: str, gate: str, seed: int = 0) -> list[Tensor]:
    channels, heads, groups, key_dim, value_dim, dtype, _ = CASES[case]
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    low, high = GATES[gate]
    decay = (rows, groups, key_dim) if channels else (rows, groups)
    key = torch.nn.functional.normalize(normal(rows, heads, key_dim), dim=-1)
    columns = [
        torch.nn.functional.normalize(normal(rows, heads, key_dim), dim=-1).to(dtype),
        key.to(dtype),
        normal(rows, groups, value_dim).to(dtype),
        -(low + (high - low) * torch.rand(decay, generator=generator, device="cuda")),
        torch.rand((rows, groups), generator=generator, device="cuda").to(dtype),
    ]
    return [x.requires_grad_() for x in columns]


def poison() -> None:
    """Leave NaN in the memory that uninitialised tensors will get."""
    # Without this the allocator would hand out smaller blocks that it kept, not this one.
    torch.cuda.empty_cache()
    filler = torch.full((1 << 28,), torch.nan, device="cuda")
    del filler


def weights(shape: torch.Size, rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(7)
    drawn = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)
    drawn[rows:] = torch.nan
    return drawn


def run(rule: Callable[..., Tensor], columns: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    poison()
    output = rule(*columns)
    gradients = torch.autograd.grad(output, columns, upstream.to(output.dtype))
    return dict(zip(NAMES, (output.detach(), *gradients), strict=True))


def compact(columns: list[Tensor], index: TreeIndex, case: str, backend: str) -> dict[str, Tensor]:
    def rule(*x: Tensor) -> Tensor:
        return tree_delta_rule(*x, index=index, backend=backend, lowest_log_decay=CASES[case][-1])

    return run(rule, columns, weights(columns[2].shape, index.compact_rows))


def by_trajectory(
    columns: list[Tensor], paths: list[Tensor], owned: Tensor, case: str, backend: str
) -> dict[str, Tensor]:
    """Every path from its root in one packed call of the same kernels, folded in float64.

    The output of a row is taken, and weighted, where `owned` says: in one of its copies.
    """
    rows = torch.cat(paths)
    cu_seqlens = torch.tensor([0, *accumulate(len(path) for path in paths)])
    expanded = [x.detach()[rows].requires_grad_() for x in columns]
    upstream = weights(columns[2].shape, columns[2].shape[0])[rows] * owned[:, None, None]

    def rule(*x: Tensor) -> Tensor:
        return chunk_delta_rule(
            *x, cu_seqlens=cu_seqlens, lowest_log_decay=CASES[case][-1], backend=backend
        ).output

    got = run(rule, expanded, upstream)
    folded = {"output": torch.zeros_like(columns[2])}
    folded["output"][rows[owned]] = got["output"][owned].to(columns[2].dtype)
    for name, x in zip(NAMES[1:], columns, strict=True):
        target = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        folded[name] = target.index_add(0, rows, got[name].double())
    return folded


def last_copies(paths: list[Tensor]) -> Tensor:
    """Marks one copy of every row."""
    rows = torch.cat(paths).tolist()
    last = {row: place for place, row in enumerate(rows)}
    owned = torch.zeros(len(rows), dtype=torch.bool)
    owned[list(last.values())] = True
    return owned.cuda()


def error(got: Tensor, exact: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - exact).norm() / exact.norm())


def check(tree: HandMadeTree, case: str, gate: str, backend: str) -> None:
    index, paths = on_gpu(tree)
    columns = make_rows(index.rows, case, gate)
    owned = last_copies(paths)
    got = compact(columns, index, case, backend)
    trajectories = by_trajectory(columns, paths, owned, case, "split")
    exact = by_trajectory([x.double() for x in columns], paths, owned, case, "reference")
    used = slice(0, index.compact_rows)
    assert torch.equal(got["output"][used], trajectories["output"][used])
    for name in NAMES:
        assert torch.equal(
            got[name][index.compact_rows :], torch.zeros_like(got[name][index.compact_rows :])
        ), f"{name} of padding"
        ours, theirs = (error(x[name][used], exact[name][used]) for x in (got, trajectories))
        assert ours <= 1.2 * theirs + 1e-7, f"{name}: {ours:.2e} against {theirs:.2e}"
        assert theirs < 0.02, f"{name}: {theirs:.2e} trajectory-wise"
    again = compact(columns, index, case, backend)
    assert all(torch.equal(got[name], again[name]) for name in NAMES)


@MAIN
def test_recomputation_takes_outputs_and_repeats_every_gradient(case):
    index, _ = on_gpu(build_tree(PIECES, size=B, padding=5))
    columns = make_rows(index.rows, case, "slow")
    want = compact(columns, index, case, "split")

    def rule(*x: Tensor) -> Tensor:
        return tree_delta_rule(*x, index=index, backend="split", lowest_log_decay=CASES[case][-1])

    def region(*x: Tensor) -> Tensor:
        return checkpoint(rule, *x, use_reentrant=False, context_fn=keep_outputs)

    got = run(region, columns, weights(columns[2].shape, index.compact_rows))
    assert all(torch.equal(got[name], want[name]) for name in NAMES)


@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize("backend", ["split", "rounds"])
@EVERY
def test_a_tree_equals_trajectories_bit_for_bit_and_in_every_gradient(
    case: str, backend: str, gate: str
) -> None:
    check(build_tree(PIECES, size=B, padding=5), case, gate, backend)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 7, 12])
@MAIN
def test_any_number_of_rounds(case: str, rounds: int) -> None:
    tree = build_tree(chain(rounds), size=B, padding=0)
    assert len(tree.index.rounds) == rounds
    check(tree, case, "slow", "split")


@pytest.mark.parametrize("seed", range(4))
@MAIN
def test_planned_trees(case: str, seed: int) -> None:
    batch = random_batch(np.random.default_rng(seed), trajectories=14, max_length=500, chunk_size=B)
    index = move(TreeIndex.from_layout(lay_out(batch, chunk_size=B, row_multiple=8)[2]))
    columns = make_rows(index.rows, case, "slow", seed)
    split, rounds = (compact(columns, index, case, name) for name in ("split", "rounds"))
    assert torch.equal(split["output"], rounds["output"])
    exact = compact([x.double() for x in columns], index, case, "reference")
    for name in NAMES:
        used = slice(0, index.compact_rows)
        pair = [error(x[name][used], exact[name][used]) for x in (split, rounds)]
        assert max(pair) <= 1.2 * min(pair) + 1e-7, name


@MAIN
def test_a_dropped_state_gradient_is_detected(case: str, monkeypatch) -> None:
    from harts.ops.delta_rule.gpu import row_plan
    from harts.ops.delta_rule.gpu.chunk_lists import _consumers

    def one_lost(*arguments: object) -> list[list[int]]:
        return [numbers[1:] for numbers in _consumers(*arguments)]

    monkeypatch.setattr("harts.ops.delta_rule.gpu.chunk_lists._consumers", one_lost)
    row_plan.plan_tree.cache_clear()
    with pytest.raises(AssertionError, match="against"):
        check(build_tree(PIECES, size=B), case, "slow", "split")
    row_plan.plan_tree.cache_clear()


@MAIN
def test_states_of_a_packed_call_are_float32_exact_and_differentiable(case: str) -> None:
    lengths = [200, 64, 1, 130]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)])
    boundaries = torch.tensor([[0, 2], [0, 0], [3, 1], [1, 1], [0, 2], [0, 3]])
    columns = make_rows(sum(lengths) + 3, case, "slow")
    shape = (4, columns[2].shape[1], columns[0].shape[2], columns[2].shape[2])
    initial = torch.randn(shape, device="cuda", requires_grad=True)
    results = []
    for backend, cast in (("split", False), ("split", False), ("reference", True)):
        inputs = [x.double() for x in (*columns, initial)] if cast else [*columns, initial]
        poison()
        result = chunk_delta_rule(
            *inputs[:5],
            cu_seqlens=cu_seqlens,
            initial_state=inputs[5],
            boundaries=boundaries,
            lowest_log_decay=CASES[case][-1],
            backend=backend,
        )
        upstream = [torch.ones_like(x) for x in result]
        results.append([*result, *torch.autograd.grad(result, [*columns, initial], upstream)])
    assert [x.dtype for x in results[0][1:3]] == [torch.float32] * 2
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    for got, exact in zip(results[0], results[2], strict=True):
        assert error(got, exact.double()) < 0.02
    assert torch.equal(results[0][2][1], initial[0])
    assert torch.equal(results[0][2][3], results[0][1][1])


def test_gpu_forms_refuse_float32_by_name_and_leave_it_to_the_reference() -> None:
    columns = [x.detach().float() for x in make_rows(10, "KDA 64 fp16", "slow")]
    cu_seqlens = torch.tensor([0, 10])
    with pytest.raises(UnsupportedError, match="bfloat16 or float16"):
        chunk_delta_rule(*columns, cu_seqlens=cu_seqlens, backend="split")
    assert chunk_delta_rule(*columns, cu_seqlens=cu_seqlens).output.dtype == torch.float32
