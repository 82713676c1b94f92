"""Delta rule: chunks against the recurrence, states handed between sequences, and trees."""

from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.errors import InputError
from harts.ops.delta_rule import (
    Backend,
    chunk_delta_rule,
    grid_rows,
    recurrent_delta_rule,
    state_pass,
    tree_delta_rule,
)
from harts.ops.delta_rule.grid import tree_grid
from harts.ops.tree_index import RoundIndex, TreeIndex
from tests.forests import lay_out, random_batch

LENGTHS = [1, 3, 63, 64, 65, 75, 128, 200]
NAMES = ("query", "key", "value", "log_decay", "beta", "initial_state")
HEADS = {"KDA": (True, 2, 2), "KDA grouped": (True, 1, 2), "GDN": (False, 2, 2)}
HEADS["GDN grouped"] = (False, 2, 4)
FORMS = pytest.mark.parametrize("form", list(HEADS))
BACKENDS = pytest.mark.parametrize("backend", ["reference", "rounds"])


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def gates(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log decays: `slow` at most 0.01 a step, `strong` 5 to 1000, `mixed` of every size."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "slow":
        return -0.01 * uniform
    if kind == "strong":
        return -5.0 * 200.0**uniform
    return -(10.0 ** (7.0 * uniform - 4.0))


def make_inputs(
    lengths: list[int],
    form: str,
    *,
    kind: str = "slow",
    seed: int = 0,
    dims: tuple[int, int] = (8, 6),
) -> list[Tensor]:
    """query, key, value, log_decay, beta and initial_state in float64, all requiring gradients."""
    channels, heads, groups = HEADS[form]
    rows, (key_dim, value_dim) = sum(lengths), dims
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    decay_shape = (rows, groups, key_dim) if channels else (rows, groups)
    inputs = [
        normal(rows, heads, key_dim),
        torch.nn.functional.normalize(normal(rows, heads, key_dim), dim=-1),
        normal(rows, groups, value_dim),
        gates(kind, decay_shape, generator),
        torch.rand(rows, groups, generator=generator, dtype=torch.float64),
        normal(len(lengths), groups, key_dim, value_dim),
    ]
    return [x.requires_grad_() for x in inputs]


def with_gradients(outputs: list[Tensor], inputs: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, and the gradient of every input under fixed random weights on all outputs."""
    generator = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    loss = sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True))
    gradients = torch.autograd.grad(loss, inputs)
    named = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return named | dict(zip(NAMES, gradients, strict=False))


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative error (norm of the difference over norm) and whose it is."""
    assert got.keys() == expected.keys()
    errors = []
    for name, reference in expected.items():
        assert got[name].isfinite().all(), name
        difference = (got[name].double() - reference.double()).norm()
        errors.append((float(difference / reference.double().norm().clamp_min(1e-30)), name))
    return max(errors)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    error, name = worst(got, expected)
    assert error < bound, f"{name}: {error:.1e}"


def recurrent_states(
    inputs: list[Tensor], lengths: list[int], cuts: list[tuple[int, int]]
) -> Tensor:
    """State of sequence s after n rows, for (s, n) in cuts, by running the recurrence that far."""
    *columns, initial = inputs
    starts = offsets(lengths).tolist()
    states = []
    for sequence, stop in cuts:
        state = initial[sequence]
        if stop:
            rows = slice(starts[sequence], starts[sequence] + stop)
            cut = [x[rows] for x in columns]
            cu_seqlens = torch.tensor([0, stop])
            state = recurrent_delta_rule(
                *cut, cu_seqlens=cu_seqlens, initial_state=initial[sequence : sequence + 1]
            )[1][0]
        states.append(state)
    return torch.stack(states)


# --- the recurrence itself ---------------------------------------------------------------------


@FORMS
def test_recurrence_is_the_matrix_form_of_the_delta_rule(form: str) -> None:
    query, key, value, log_decay, beta, initial = make_inputs([7], form)
    output, final = recurrent_delta_rule(
        query,
        key,
        value,
        log_decay,
        beta,
        cu_seqlens=offsets([7]),
        initial_state=initial,
        scale=0.5,
    )
    share = value.shape[1] // query.shape[1]
    for head in range(value.shape[1]):
        state = initial[0, head]
        for t in range(7):
            k, q = key[t, head // share], query[t, head // share]
            erase = torch.eye(len(k)) - beta[t, head] * torch.outer(k, k)
            decay = torch.diag(log_decay[t, head].exp().expand(len(k)))
            state = erase @ decay @ state + beta[t, head] * torch.outer(k, value[t, head])
            torch.testing.assert_close(output[t, head], 0.5 * (state.T @ q))
        torch.testing.assert_close(final[0, head], state)


# --- chunks against the recurrence -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["slow", "mixed", "strong"])
@FORMS
def test_chunks_agree_with_the_recurrence_in_every_output_and_gradient(
    form: str, kind: str
) -> None:
    inputs = make_inputs(LENGTHS, form, kind=kind)
    cu_seqlens = offsets(LENGTHS)
    boundaries = [(7, 1), (3, 1), (6, 2), (0, 0), (7, 3), (6, 1), (5, 1), (7, 3)]
    result = chunk_delta_rule(
        *inputs[:5],
        cu_seqlens=cu_seqlens,
        initial_state=inputs[5],
        boundaries=torch.tensor(boundaries),
    )
    output, final = recurrent_delta_rule(
        *inputs[:5], cu_seqlens=cu_seqlens, initial_state=inputs[5]
    )
    states = recurrent_states(inputs, LENGTHS, [(s, 64 * c) for s, c in boundaries])
    assert_close(
        with_gradients(list(result), inputs), with_gradients([output, final, states], inputs), 1e-12
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_a_sequence_alone_from_the_zero_state_agrees_with_the_recurrence(
    form: str, length: int
) -> None:
    inputs = make_inputs([length], form, seed=length)[:5]
    results = [
        with_gradients(list(rule(*inputs, cu_seqlens=offsets([length]))[:2]), inputs)
        for rule in (chunk_delta_rule, recurrent_delta_rule)
    ]
    assert_close(*results, 1e-12)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 128])
@pytest.mark.parametrize("form", ["KDA", "GDN grouped"])
def test_chunk_size_does_not_change_the_result(form: str, chunk_size: int) -> None:
    lengths = [5, 33, 130]
    inputs = make_inputs(lengths, form)
    results = []
    for size in (chunk_size, 64):
        result = chunk_delta_rule(
            *inputs[:5], cu_seqlens=offsets(lengths), initial_state=inputs[5], chunk_size=size
        )
        results.append(with_gradients([result.output, result.final_state], inputs))
    assert_close(*results, 1e-12)


@pytest.mark.parametrize("kind", ["slow", "mixed"])
@FORMS
def test_gradients_pass_gradcheck(form: str, kind: str) -> None:
    lengths = [1, 5, 4]
    inputs = make_inputs(lengths, form, kind=kind, dims=(3, 2))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return chunk_delta_rule(
            *tensors[:5],
            cu_seqlens=offsets(lengths),
            initial_state=tensors[5],
            boundaries=torch.tensor([[1, 1], [2, 1]]),
            chunk_size=4,
        )

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_a_gate_that_forgets_everything_gives_finite_gradients(form: str) -> None:
    inputs = make_inputs([70], form)
    with torch.no_grad():
        inputs[3][::7] = -torch.inf
    results = [
        with_gradients(
            list(rule(*inputs[:5], cu_seqlens=offsets([70]), initial_state=inputs[5])[:2]), inputs
        )
        for rule in (chunk_delta_rule, recurrent_delta_rule)
    ]
    assert_close(*results, 1e-12)


# --- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["slow", "mixed", "strong"])
@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_float32_stays_within_rounding_of_float64(form: str, kind: str) -> None:
    lengths = [75, 600]
    exact = make_inputs(lengths, form, kind=kind, dims=(32, 32))
    single = [x.detach().float().requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in single]
    results = []
    for inputs in (single, exact):
        result = chunk_delta_rule(*inputs[:5], cu_seqlens=offsets(lengths), initial_state=inputs[5])
        results.append(with_gradients([result.output, result.final_state], inputs))
    assert results[0]["query"].dtype == torch.float32
    assert_close(*results, 3e-6)


@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_a_strong_decay_costs_no_digits_of_the_slow_steps_after_it(form: str) -> None:
    inputs = make_inputs([64], form)[:5]
    with torch.no_grad():
        inputs[3][3] = -1e4
    single = [x.detach().float().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in single]
    results = [
        with_gradients(list(chunk_delta_rule(*x, cu_seqlens=offsets([64]))[:2]), x)
        for x in (single, exact)
    ]
    assert_close(*results, 1e-6)


@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_bfloat16_inputs_give_bfloat16_outputs_and_float32_states(form: str) -> None:
    lengths = [70, 20]
    inputs = [x.detach().bfloat16().requires_grad_() for x in make_inputs(lengths, form)[:5]]
    arguments = {"cu_seqlens": offsets(lengths), "boundaries": torch.tensor([[0, 1]])}
    result = chunk_delta_rule(*inputs, **arguments)
    assert [x.dtype for x in result] == [torch.bfloat16, torch.float32, torch.float32]
    upcast = chunk_delta_rule(*(x.detach().float() for x in inputs), **arguments)
    assert torch.equal(result.output, upcast.output.bfloat16())
    assert torch.equal(result.final_state, upcast.final_state)
    output, final = recurrent_delta_rule(*inputs, cu_seqlens=arguments["cu_seqlens"])
    assert (output.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    (result.output.float().sum() + result.boundary_states.sum()).backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in inputs)


# --- packed sequences --------------------------------------------------------------------------


@FORMS
def test_state_never_leaks_across_packed_sequences(form: str) -> None:
    lengths = [70, 1, 130, 64]
    inputs = make_inputs(lengths, form)[:5]
    starts = offsets(lengths).tolist()
    output = chunk_delta_rule(*inputs, cu_seqlens=offsets(lengths)).output
    for start, end in pairwise(starts):
        alone = chunk_delta_rule(
            *(x[start:end] for x in inputs), cu_seqlens=torch.tensor([0, end - start])
        ).output
        torch.testing.assert_close(output[start:end], alone, rtol=0, atol=1e-14)
        for gradient in torch.autograd.grad(output[start:end].sum(), inputs, retain_graph=True):
            outside = torch.cat((gradient[:start], gradient[end:]))
            assert torch.equal(outside, torch.zeros_like(outside))


def test_a_lost_sequence_boundary_is_detected() -> None:
    inputs = make_inputs([70, 60], "KDA")[:5]
    right, leaked = (
        chunk_delta_rule(*inputs, cu_seqlens=offsets(lengths)).output
        for lengths in ([70, 60], [130])
    )
    expected, _ = recurrent_delta_rule(*inputs, cu_seqlens=offsets([70, 60]))
    assert (right - expected).norm() / expected.norm() < 1e-12
    assert (leaked - expected).norm() / expected.norm() > 1e-2


@pytest.mark.parametrize("rule", [chunk_delta_rule, recurrent_delta_rule])
@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_rows_after_the_last_sequence_are_neither_read_nor_left_unwritten(rule, form: str) -> None:
    lengths = [5, 66]
    clean = make_inputs(lengths, form)[:5]
    poisoned = [
        torch.cat((x.detach(), x.new_full((9, *x.shape[1:]), torch.nan))).requires_grad_()
        for x in clean
    ]
    expected = rule(*clean, cu_seqlens=offsets(lengths))[0]
    got = rule(*poisoned, cu_seqlens=offsets(lengths))[0]
    assert torch.equal(got[:71], expected)
    assert torch.equal(got[71:], torch.zeros_like(got[71:]))
    upstream = torch.ones_like(got)
    upstream[71:] = torch.nan
    gradients = torch.autograd.grad(got, poisoned, upstream)
    for gradient, reference in zip(
        gradients, torch.autograd.grad(expected.sum(), clean), strict=True
    ):
        torch.testing.assert_close(gradient[:71], reference, rtol=0, atol=1e-13)
        assert torch.equal(gradient[71:], torch.zeros_like(gradient[71:]))


def test_the_same_call_gives_the_same_bits() -> None:
    inputs = make_inputs(LENGTHS, "KDA")
    runs = []
    for _ in range(2):
        result = chunk_delta_rule(*inputs[:5], cu_seqlens=offsets(LENGTHS), initial_state=inputs[5])
        runs.append(with_gradients([result.output, result.final_state], inputs))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_recomputation_under_checkpoint_gives_the_same_gradients(form: str) -> None:
    lengths = [70, 130]
    inputs = make_inputs(lengths, form)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return chunk_delta_rule(
            *tensors[:5],
            cu_seqlens=offsets(lengths),
            initial_state=tensors[5],
            boundaries=torch.tensor([[1, 2]]),
        )

    plain = with_gradients(list(run(*inputs)), inputs)
    again = with_gradients(list(checkpoint(run, *inputs, use_reentrant=False)), inputs)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


# --- boundary states handed to other sequences -------------------------------------------------


def two_consumers(
    inputs: list[Tensor], *, chunk: int = 2, detach: int | None = None
) -> list[Tensor]:
    """A trunk of 150 rows whose state after 128 starts two branches of 40 and 90 rows.

    `chunk` moves the anchor, `detach` drops the state gradient of one consumer: both are faults.
    """
    trunk, branches = [x[:150] for x in inputs], [x[150:] for x in inputs]
    first = chunk_delta_rule(
        *trunk, cu_seqlens=torch.tensor([0, 150]), boundaries=torch.tensor([[0, chunk]])
    )
    states = [
        first.boundary_states[0].detach() if i == detach else first.boundary_states[0]
        for i in (0, 1)
    ]
    second = chunk_delta_rule(
        *branches, cu_seqlens=torch.tensor([0, 40, 130]), initial_state=torch.stack(states)
    )
    return [first.output, second.output]


def two_concatenated(inputs: list[Tensor]) -> list[Tensor]:
    """The same three pieces as whole sequences, each from its own zero state."""
    trunk = recurrent_delta_rule(*(x[:150] for x in inputs), cu_seqlens=torch.tensor([0, 150]))[0]
    branches = []
    for start, end in ((150, 190), (190, 280)):
        whole = [torch.cat((x[:128], x[start:end])) for x in inputs]
        branches.append(
            recurrent_delta_rule(*whole, cu_seqlens=torch.tensor([0, 128 + end - start]))[0][128:]
        )
    return [trunk, torch.cat(branches)]


@FORMS
def test_two_consumers_of_one_boundary_equal_the_concatenated_sequences(form: str) -> None:
    inputs = make_inputs([280], form)[:5]
    assert_close(
        with_gradients(two_consumers(inputs), inputs),
        with_gradients(two_concatenated(inputs), inputs),
        1e-12,
    )


@pytest.mark.parametrize("form", ["KDA", "GDN"])
@pytest.mark.parametrize("consumer", [0, 1])
def test_a_dropped_state_gradient_of_one_consumer_is_detected(form: str, consumer: int) -> None:
    inputs = make_inputs([280], form)[:5]
    expected = with_gradients(two_concatenated(inputs), inputs)
    faulty = with_gradients(two_consumers(inputs, detach=consumer), inputs)
    for name in ("output 0", "output 1", "query"):
        assert worst({name: faulty[name]}, {name: expected[name]})[0] < 1e-12
    for name in ("key", "value", "log_decay", "beta"):
        assert worst({name: faulty[name]}, {name: expected[name]})[0] > 1e-2, name


@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_an_anchor_shifted_by_one_chunk_is_detected(form: str) -> None:
    inputs = make_inputs([280], form)[:5]
    expected = with_gradients(two_concatenated(inputs), inputs)
    faulty = with_gradients(two_consumers(inputs, chunk=1), inputs)
    for name in ("output 1", *NAMES[:5]):
        assert worst({name: faulty[name]}, {name: expected[name]})[0] > 1e-2, name


@FORMS
def test_the_state_after_the_last_chunk_is_the_final_state(form: str) -> None:
    lengths = [70, 128, 5]
    *inputs, initial = make_inputs(lengths, form)
    result = chunk_delta_rule(
        *inputs,
        cu_seqlens=offsets(lengths),
        initial_state=initial,
        boundaries=torch.tensor([[2, 1], [0, 2], [1, 2]]),
    )
    assert torch.equal(result.boundary_states, result.final_state[[2, 0, 1]])


# --- trees -------------------------------------------------------------------------------------


@dataclass
class Branch:
    """Own rows after the first `fork` rows of the path of sequence `parent` (None: a root)."""

    parent: int | None
    fork: int
    length: int


# B = 4: forks at B-1, B, B+1, in-chunk forks of forks, a fork at 0, and a chain of seven handoffs.
FOREST = [
    Branch(None, 0, 9),
    Branch(0, 3, 6),
    Branch(0, 4, 2),
    Branch(0, 5, 8),
    Branch(3, 6, 1),
    Branch(4, 7, 7),
    Branch(3, 8, 12),
    Branch(6, 12, 9),
    Branch(7, 17, 10),
    Branch(8, 23, 9),
    Branch(9, 28, 11),
    Branch(10, 35, 7),
    Branch(11, 41, 5),
    Branch(None, 0, 1),
    Branch(7, 15, 2),
]


@dataclass
class HandMadeTree:
    index: TreeIndex
    paths: list[Tensor]
    """Physical rows of every sequence's whole path, root first."""
    own: list[Tensor]
    """Physical rows that each sequence owns."""
    handoffs: int
    """Most boundary states passed along one path."""


def state_source(branches: list[Branch], starts: list[int], index: int) -> tuple[int, int] | None:
    """(sequence, absolute row) that produces the state at this sequence's start; None for zero."""
    start = starts[index]
    ancestor = branches[index].parent
    while start > 0:
        assert ancestor is not None
        if starts[ancestor] < start:
            return ancestor, start
        ancestor = branches[ancestor].parent
    return None


def build_tree(
    branches: list[Branch], *, padding: int = 3, size: int = 4, shift: int = 0, replay: bool = True
) -> HandMadeTree:
    """Rounds by hand.

    Faults: `shift` moves every requested anchor; replay=False reads padding instead of ancestors.
    """
    starts = [branch.fork // size * size for branch in branches]
    sources = [state_source(branches, starts, i) for i in range(len(branches))]
    rounds: list[int] = []
    depth: list[int] = []
    for source in sources:
        rounds.append(0 if source is None else rounds[source[0]] + 1)
        depth.append(0 if source is None else depth[source[0]] + 1)
    order = sorted(range(len(branches)), key=lambda i: rounds[i])
    first = dict(
        zip(order, accumulate((branches[i].length for i in order), initial=0), strict=False)
    )
    own = [torch.arange(first[i], first[i] + b.length) for i, b in enumerate(branches)]
    paths: list[Tensor] = []
    for branch, rows in zip(branches, own, strict=True):
        before = rows[:0] if branch.parent is None else paths[branch.parent][: branch.fork]
        paths.append(torch.cat((before, rows)))
    bank: dict[tuple[int, int], int] = {}
    packed = []
    for number in range(max(rounds) + 1):
        members = [i for i in order if rounds[i] == number]
        replays = [branches[i].fork - starts[i] for i in members]
        lengths = [n + branches[i].length for n, i in zip(replays, members, strict=True)]
        begins = offsets(lengths).tolist()
        initial = [-1 if sources[i] is None else bank[sources[i]] for i in members]
        wanted = sorted({s for s in sources if s is not None and s[0] in members})
        for source in wanted:
            bank[source] = len(bank)
        chunks = [(row - starts[i]) // size + shift for i, row in wanted]
        pairs = [[members.index(i), c] for (i, _), c in zip(wanted, chunks, strict=True)]
        rows = [
            paths[i][branches[i].fork - n :].clone() for n, i in zip(replays, members, strict=True)
        ]
        if not replay:
            for n, replayed in zip(replays, rows, strict=True):
                replayed[:n] = sum(branch.length for branch in branches)
        kept = [
            torch.arange(begin + n, end)
            for (begin, end), n in zip(pairwise(begins), replays, strict=True)
        ]
        packed.append(
            RoundIndex(
                packed_rows=torch.cat(rows),
                cu_seqlens=torch.tensor(begins),
                initial_state=torch.tensor(initial),
                boundaries=torch.tensor(pairs, dtype=torch.int64).view(-1, 2),
                own_positions=torch.cat(kept),
            )
        )
    compact = sum(branch.length for branch in branches)
    unused = torch.zeros(0, dtype=torch.int64)
    index = TreeIndex(
        rows=compact + padding,
        compact_rows=compact,
        chunk_size=size,
        rounds=tuple(packed),
        sequence_offsets=unused,
        ancestor_rows=unused,
        ancestor_offsets=unused,
        tokens=unused,
        positions=unused,
        multiplicity=unused,
        target_rows=unused,
        targets=unused,
        trajectory_offsets=unused,
    )
    return HandMadeTree(index=index, paths=paths, own=own, handoffs=max(depth))


def path_by_path(inputs: list[Tensor], tree: HandMadeTree) -> Tensor:
    """Every sequence's whole path through the recurrence alone; its own rows kept."""
    output = inputs[2].new_zeros(inputs[2].shape)
    for path, own in zip(tree.paths, tree.own, strict=True):
        columns = [x.index_select(0, path) for x in inputs]
        whole, _ = recurrent_delta_rule(*columns, cu_seqlens=torch.tensor([0, len(path)]))
        output = output.index_copy(0, own, whole[-len(own) :])
    return output


@FORMS
@BACKENDS
def test_a_tree_equals_running_every_path_alone(form: str, backend: Backend) -> None:
    tree = build_tree(FOREST)
    assert len(tree.index.rounds) >= 4
    assert tree.handoffs >= 6
    inputs = make_inputs([tree.index.rows], form)[:5]
    expected = with_gradients([path_by_path(inputs, tree)], inputs)
    got = with_gradients([tree_delta_rule(*inputs, index=tree.index, backend=backend)], inputs)
    assert_close(got, expected, 1e-12)


def test_chunks_of_a_tree_go_in_as_few_levels_as_the_longest_path_has_chunks() -> None:
    tree = build_tree(FOREST)
    grid = tree_grid(tree.index)
    assert len(grid.levels) == max(-(-len(path) // tree.index.chunk_size) for path in tree.paths)
    done = 1  # the zero state
    for level in grid.levels:
        parents = torch.arange(1 + grid.chunks)[level.parents]
        assert torch.equal(parents, grid.parents[level.chunks])
        assert int(parents.max()) < done
        done += len(parents)
    assert done == 1 + grid.chunks
    assert any(isinstance(level.parents, slice) for level in grid.levels)
    assert any(isinstance(level.parents, Tensor) for level in grid.levels)


@BACKENDS
@pytest.mark.parametrize("seed", range(8))
def test_random_planned_trees_equal_running_every_trajectory_alone(
    seed: int, backend: Backend
) -> None:
    size = (2, 4, 8)[seed % 3]
    batch = random_batch(np.random.default_rng(seed), max_length=30, chunk_size=size)
    index = TreeIndex.from_layout(lay_out(batch, chunk_size=size, row_multiple=8)[2])
    inputs = make_inputs([index.rows], list(HEADS)[seed % 4], seed=seed, dims=(4, 3))[:5]
    compact = tree_delta_rule(*inputs, index=index, backend=backend)
    got, expected = [], []
    for start, end in pairwise(index.trajectory_offsets.tolist()):
        if start == end:
            continue
        rows = index.target_rows[start:end]
        columns = [x.index_select(0, rows) for x in inputs]
        got.append(compact.index_select(0, rows))
        expected.append(recurrent_delta_rule(*columns, cu_seqlens=offsets([end - start]))[0])
    assert_close(
        with_gradients([torch.cat(got)], inputs),
        with_gradients([torch.cat(expected)], inputs),
        1e-12,
    )


@BACKENDS
@pytest.mark.parametrize("form", ["KDA", "GDN"])
@pytest.mark.parametrize("fault", [{"shift": -1}, {"replay": False}], ids=["anchor", "replay"])
def test_a_wrong_anchor_or_missing_replay_in_a_tree_is_detected(
    form: str, fault: dict, backend: Backend
) -> None:
    tree, faulty = build_tree(FOREST), build_tree(FOREST, **fault)
    inputs = make_inputs([tree.index.rows], form)[:5]
    with torch.no_grad():
        for x in inputs:
            # Rows of zeros leave the state alone, so replaying padding is no replay at all.
            x[tree.index.compact_rows :] = 0
    expected = with_gradients([path_by_path(inputs, tree)], inputs)
    output = tree_delta_rule(*inputs, index=faulty.index, backend=backend)
    got = with_gradients([output], inputs)
    for name in expected:
        assert worst({name: got[name]}, {name: expected[name]})[0] > 1e-2, name


@pytest.mark.parametrize("module", [state_pass, grid_rows], ids=["state", "replayed row"])
@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_a_dropped_gradient_of_one_consumer_in_a_tree_is_detected(
    form: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = build_tree(FOREST)
    inputs = make_inputs([tree.index.rows], form)[:5]
    expected = with_gradients([path_by_path(inputs, tree)], inputs)
    add_rows = module.add_rows
    monkeypatch.setattr(module, "add_rows", lambda total, at, x: add_rows(total, at[:-1], x[:-1]))
    got = with_gradients([tree_delta_rule(*inputs, index=tree.index)], inputs)
    for name in ("key", "value", "log_decay", "beta"):
        assert worst({name: got[name]}, {name: expected[name]})[0] > 1e-3, name


@BACKENDS
@pytest.mark.parametrize("form", ["KDA", "GDN"])
def test_padding_rows_of_a_tree_reach_neither_outputs_nor_gradients(
    form: str, backend: Backend
) -> None:
    tree = build_tree(FOREST, padding=5)
    clean = make_inputs([tree.index.rows], form)[:5]
    poisoned = [x.detach().clone() for x in clean]
    for x in poisoned:
        x[tree.index.compact_rows :] = torch.nan
    poisoned = [x.requires_grad_() for x in poisoned]
    upstream = torch.ones_like(clean[2])
    upstream[tree.index.compact_rows :] = torch.nan
    expected, got = (
        tree_delta_rule(*x, index=tree.index, backend=backend) for x in (clean, poisoned)
    )
    assert torch.equal(got, expected)
    assert torch.equal(got[-5:], torch.zeros_like(got[-5:]))
    for gradient, reference in zip(
        torch.autograd.grad(got, poisoned, upstream),
        torch.autograd.grad(expected, clean, torch.ones_like(expected)),
        strict=True,
    ):
        assert torch.equal(gradient, reference)
        assert torch.equal(gradient[-5:], torch.zeros_like(gradient[-5:]))


def test_a_tree_under_checkpoint_gives_the_same_gradients() -> None:
    tree = build_tree(FOREST)
    inputs = make_inputs([tree.index.rows], "KDA")[:5]

    def run(*tensors: Tensor) -> Tensor:
        return tree_delta_rule(*tensors, index=tree.index)

    plain = with_gradients([run(*inputs)], inputs)
    again = with_gradients([checkpoint(run, *inputs, use_reentrant=False)], inputs)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_bfloat16_trees_hand_states_over_in_float32() -> None:
    tree = build_tree(FOREST)
    inputs = [x.detach().bfloat16() for x in make_inputs([tree.index.rows], "KDA")[:5]]
    output = tree_delta_rule(*inputs, index=tree.index)
    single = tree_delta_rule(*(x.float() for x in inputs), index=tree.index)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, single.bfloat16())


def test_a_layout_of_padding_only_makes_no_call_and_gives_zeros() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = RoundIndex(
        packed_rows=empty,
        cu_seqlens=torch.tensor([0]),
        initial_state=empty,
        boundaries=empty.view(0, 2),
        own_positions=empty,
    )
    arguments = {f.name: empty for f in fields(TreeIndex) if f.init}
    index = TreeIndex(
        **arguments | {"rows": 3, "compact_rows": 0, "chunk_size": 4, "rounds": (nothing,)}
    )
    inputs = make_inputs([3], "KDA")[:5]
    output = tree_delta_rule(*inputs, index=index)
    assert torch.equal(output, torch.zeros_like(inputs[2]))


# --- refused arguments -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [chunk_delta_rule, recurrent_delta_rule])
def test_an_empty_sequence_is_refused_by_number(rule) -> None:
    inputs = make_inputs([8], "KDA")[:5]
    with pytest.raises(InputError, match="sequence 1 has 0 rows"):
        rule(*inputs, cu_seqlens=torch.tensor([0, 5, 5, 8]))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 9]), "before row 8"),
        (torch.tensor([1, 8]), "must start at 0"),
        (torch.tensor([0, 6, 4, 8]), "sequence 1 has -2 rows"),
        (torch.tensor([0]), "Q >= 1"),
        (torch.tensor([0.0, 8.0]), "integer vector"),
    ],
)
def test_sequence_offsets_that_do_not_fit_are_refused(cu_seqlens: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        chunk_delta_rule(*make_inputs([8], "KDA")[:5], cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (1, 8, 2, 8), "query and key"),
        (1, (8, 2, 7), "query and key"),
        (2, (7, 2, 6), r"value must be \[P, G, V\]"),
        (2, (8, 3, 6), "multiple of query/key heads"),
        (3, (8, 2, 7), "log_decay must be"),
        (4, (8, 1), "beta must be"),
    ],
)
@pytest.mark.parametrize("rule", [chunk_delta_rule, recurrent_delta_rule])
def test_row_tensors_that_do_not_fit_are_refused(rule, position, shape, message) -> None:
    inputs = make_inputs([8], "KDA")[:5]
    inputs[position] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(InputError, match=message):
        rule(*inputs, cu_seqlens=torch.tensor([0, 8]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 48}, "power of two"),
        ({"initial_state": torch.zeros(2, 2, 8, 6)}, r"\[Q, G, K, V\]"),
        ({"boundaries": torch.tensor([[0, 3]])}, "before chunk 3"),
        ({"boundaries": torch.tensor([[0, -1]])}, "before chunk -1"),
        ({"boundaries": torch.tensor([[1, 0]])}, "sequence 1 of 1"),
        ({"boundaries": torch.tensor([0, 1])}, r"integers \[M, 2\]"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    inputs = make_inputs([70], "KDA")[:5]
    with pytest.raises(InputError, match=message):
        chunk_delta_rule(*inputs, cu_seqlens=offsets([70]), **options)


def test_a_tree_refuses_tensors_without_its_padding_rows() -> None:
    tree = build_tree(FOREST, padding=2)
    inputs = make_inputs([tree.index.compact_rows], "KDA")[:5]
    with pytest.raises(InputError, match="padding included"):
        tree_delta_rule(*inputs, index=tree.index)
