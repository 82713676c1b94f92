"""The delta rule's Triton kernels in Triton's interpreter against a plain loop; prints errors."""

import json
import math
from dataclasses import replace

import torch
from torch import Tensor

from harts.ops.delta_rule.gpu import state_passes, triton_kernels
from harts.ops.delta_rule.gpu.parts import Config, InParts, Sizes
from harts.ops.delta_rule.gpu.row_plan import RowPlan, plan_tree
from tests.ops import interpreter
from tests.ops.test_delta_rule import Branch, build_tree

SIZES = Sizes(heads=1, groups=2, key_dim=16, value_dim=16, chunk_size=16)
BRANCHES = [Branch(None, 0, 38), Branch(0, 17, 25), Branch(0, 16, 20), Branch(1, 35, 18)]
TREES = {"three rounds": BRANCHES, "no replay": [Branch(None, 0, 38), Branch(0, 16, 20)]}
SCALE = 0.3


def sequential(
    plan: RowPlan, rows: dict[str, Tensor], bank: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """D, what queries read of the states, and the bank, by a loop under autograd."""
    found: list[tuple[slice, Tensor, Tensor]] = []
    states, pieces = list(bank), plan.states.pieces
    walks = plan.states.sequences
    for walk, slot in enumerate(walks.initial_slots.tolist()):
        state = states[slot] if slot >= 0 else torch.zeros_like(states[0])
        for piece in range(*walks.piece_offsets[walk : walk + 2].tolist()):
            first, length = int(pieces.rows[piece]), int(pieces.lengths[piece])
            for begin in range(0, length, 16):
                at = slice(first + begin, first + min(begin + 16, length))
                delta = rows["u"][at] - torch.einsum("bgk,gkv->bgv", rows["w"][at], state)
                query, key = (rows[name][at].expand(-1, 2, -1) for name in ("query", "key"))
                read = torch.einsum("bgk,gkv->bgv", query, state)
                decay, decayed = rows["decay"][at], delta
                if decay.dim() == 3:
                    kept = decay[-1].exp2()[..., None]
                else:
                    kept = decay[-1].exp2()[:, None, None]
                    decayed = delta * (decay[-1:] - decay).exp2()[..., None]
                    read = read * decay.exp2()[..., None]
                found.append((at, delta, read))
                state = kept * state + torch.einsum("bgk,bgv->gkv", key, decayed)
            if int(pieces.slots[piece]) >= 0:
                states[int(pieces.slots[piece])] = state
    places = torch.cat([torch.arange(at.start, at.stop) for at, _, _ in found])
    values, reads = (
        torch.zeros_like(rows["u"]).index_copy(0, places, torch.cat(rows_found))
        for rows_found in ([d for _, d, _ in found], [r for *_, r in found])
    )
    return values, reads, torch.stack(states)


def in_parts(plan: RowPlan, rows: Tensor) -> InParts:
    """Each part between NaN, which a program reads that takes a row to be of the other part."""
    poison, count = torch.full_like(rows, torch.nan), len(rows)
    parts = rows[: plan.rows], rows[plan.rows :]
    return InParts(*(torch.cat((poison, x, poison))[count : count + len(x)] for x in parts))


def errors(by_channel: bool, tree: str, copied_from: int | None = None) -> dict[str, float]:
    """Relative errors of both passes, all in float32; `copied_from` replaces the plan's."""
    plan = plan_tree(build_tree(TREES[tree], size=16, padding=2).index)
    states = plan.states
    rounds = {"three rounds": 3, "no replay": 2}[tree]
    assert (len(states.round_offsets) - 1, plan.copied_rows > 0) == (rounds, rounds == 3)
    if copied_from is not None:
        states = replace(states, copied_from=copied_from)
    generator = torch.Generator().manual_seed(0)
    count, heads = plan.rows + plan.copied_rows, 2 if by_channel else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    decay = -0.1 * torch.rand((count, 2, 16) if by_channel else (count, 2), generator=generator)
    rows = {
        "query": normal(count, heads, 16),
        "key": normal(count, heads, 16),
        "w": normal(count, 2, 16),
        "u": normal(count, 2, 16).requires_grad_(),
        "decay": decay,
    }
    query, key = (in_parts(plan, rows[name]) for name in ("query", "key"))
    bank = torch.full((states.slots, 2, 16, 16), torch.nan)
    expected, reads, expected_bank = sequential(plan, rows, torch.zeros_like(bank))
    arguments = (states, SIZES, key, rows["w"], rows["u"].detach(), decay, bank)
    values, _ = state_passes.pass_states(*arguments)
    again, _ = state_passes.pass_states(*arguments, again=True)
    used = torch.zeros(count, dtype=torch.bool)
    for first, length in zip(states.pieces.rows, states.pieces.lengths, strict=True):
        used[first : first + length] = True
    to_values, to_reads = (normal(count, 2, 16) * used[:, None, None] for _ in range(2))
    loss = (expected * to_values).sum() + SCALE * (reads * to_reads).sum()
    (grad,) = torch.autograd.grad(loss, rows["u"])
    passed, _ = state_passes.pass_state_gradients(
        states,
        SIZES,
        query,
        key,
        rows["w"],
        decay,
        in_parts(plan, to_reads),
        to_values,
        None,
        SCALE,
    )
    pairs = {
        "values": (values[used], expected[used]),
        "again": (again[used], expected[used]),
        "bank": (bank, expected_bank),
        "gradient": (passed.values[used], grad[used]),
    }
    return {
        name: float((got - exact.detach()).norm() / exact.detach().norm())
        for name, (got, exact) in pairs.items()
    }


def fold_error() -> float:
    """Fold of copied rows against index_add."""
    plan = plan_tree(build_tree(BRANCHES, size=16, padding=2).index)
    rows, copies = torch.randn(plan.rows, 2, 3), torch.randn(plan.copied_rows, 2, 3)
    expected = rows.clone()
    expected[plan.copied.targets[plan.copied.fresh == 1].long()] = 0
    expected.index_add_(0, plan.copied.rows, copies)
    state_passes.fold(rows, copies, plan.copied)
    return float((rows - expected).abs().max())


def scalar_gate_errors() -> dict[str, float]:
    """Gradients through outputs and states of three chunks against autograd, in float64."""
    rows, heads, groups, dim, chunk = 38, 1, 2, 32, 16
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = (normal(rows, heads, dim).requires_grad_() for _ in range(2))
    w = normal(rows, groups, dim).requires_grad_()
    delta, upstream = normal(rows, groups, dim), normal(rows, groups, dim)
    states, after, to_delta = (
        normal(3, groups, dim, dim),
        normal(3, groups, dim, dim),
        normal(rows, groups, dim),
    )
    decay = (-torch.rand(rows, groups, generator=generator, dtype=torch.float64)).requires_grad_()
    loss, scale = torch.zeros((), dtype=torch.float64), 0.3
    for number, first in enumerate(range(0, rows, chunk)):
        at = slice(first, min(first + chunk, rows))
        q, k = (x[at].expand(-1, groups, -1) for x in (query, key))
        g, d = decay[at], delta[at]
        causal = torch.ones(len(g), len(g)).tril()[..., None] > 0
        scores = torch.einsum("igk,jgk->ijg", q, k) * (g[:, None] - g[None, :]).exp2()
        inside = torch.einsum("ijg,jgv->igv", scores.masked_fill(~causal, 0.0), d)
        across = torch.einsum("igk,gkv->igv", q * g.exp2()[..., None], states[number])
        decayed = k * (g[-1:] - g).exp2()[..., None]
        end = states[number] * g[-1].exp2()[:, None, None]
        end = end + torch.einsum("igk,igv->gkv", decayed, d)
        read = torch.einsum("igk,gkv->igv", w[at], states[number])
        loss = loss + (scale * (inside + across) * upstream[at]).sum() + (end * after[number]).sum()
        loss = loss - (read * to_delta[at]).sum()
    # A query head's gradient is that of both of its value heads; the kernel keeps them apart.
    exact = torch.autograd.grad(loss, (query, key, w, decay))
    got = [torch.full((rows, groups, dim), torch.nan) for _ in range(3)]
    to_decay = torch.full((2, rows, groups), torch.nan)
    columns = (query, key, delta, decay, states, upstream, to_delta, after)
    triton_kernels.scalar_gate_gradients[(2 * 3, groups)](
        *(x.detach().float() for x in columns),
        *got,
        to_decay,
        torch.tensor([0, rows], dtype=torch.int32),
        torch.tensor([[0, 0], [0, 1], [0, 2]], dtype=torch.int32),
        scale,
        rows,
        heads=heads,
        groups=groups,
        key_dim=dim,
        value_dim=dim,
        chunk_size=chunk,
        block=16,
        value_block=16,
    )
    # The kernel differentiates by the natural logarithm of decays, which come in that to base 2.
    to_decay = to_decay.sum(0) * math.log(2)
    found = (got[0].sum(1, keepdim=True), got[1].sum(1, keepdim=True), got[2], to_decay)
    return {
        name: float((a - b).norm() / b.norm())
        for name, a, b in zip(("query", "key", "w", "decay"), found, exact, strict=True)
    }


if __name__ == "__main__":
    interpreter.accept_new_numpy()
    tile = state_passes._Tile(16, Config(4))
    for table in (state_passes._FORWARD, state_passes._AGAIN, state_passes._BACKWARD):
        table.update({True: tile, False: tile})
    found = {"fold": {"rows": fold_error()}, "GDN gradients": scalar_gate_errors()}
    for rule, by_channel in (("KDA", True), ("GDN", False)):
        found |= {f"{rule}, {tree}": errors(by_channel, tree) for tree in TREES}
        # Every row is taken for one of the other part.
        found |= {
            f"fault: {rule}, all {part}": errors(by_channel, "three rounds", copied_from)
            for part, copied_from in (("copied", 0), ("in place", 1 << 20))
        }
    print(json.dumps(found))
