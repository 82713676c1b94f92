"""Run our Triton kernels in Triton's interpreter against a plain loop; prints errors as JSON.

A program of its own: the interpreter is chosen when the kernels are defined, and the fast form
must not be imported with it anywhere else.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton.runtime import interpreter

from harts.ops.delta_rule.gpu import state_passes
from harts.ops.delta_rule.gpu.parts import Config, Sizes
from harts.ops.delta_rule.gpu.row_plan import RowPlan, plan_tree
from tests.ops.test_delta_rule import Branch, build_tree

SIZES = Sizes(heads=1, groups=2, key_dim=16, value_dim=16, chunk_size=16)
BRANCHES = [Branch(None, 0, 38), Branch(0, 17, 5), Branch(0, 16, 20), Branch(2, 35, 18)]


_PATCH = interpreter._patch_lang_tensor


def _patch_tensor(tensor: type, scope: object) -> None:
    """NumPy 2.4 no longer turns arrays of one element into integers, which Triton 3.6 relies on."""
    _PATCH(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def sequential(plan: RowPlan, rows: dict[str, Tensor], bank: Tensor) -> tuple[Tensor, Tensor]:
    """D and the bank by a loop over pieces, chunks and heads, under autograd."""
    values = torch.zeros_like(rows["u"])
    states, pieces = list(bank), plan.states.pieces
    walks = plan.states.sequences
    for walk, slot in enumerate(walks.initial_slots.tolist()):
        state = states[slot] if slot >= 0 else torch.zeros_like(states[0])
        for piece in range(*walks.piece_offsets[walk : walk + 2].tolist()):
            first, length = int(pieces.rows[piece]), int(pieces.lengths[piece])
            for begin in range(0, length, 16):
                at = slice(first + begin, first + min(begin + 16, length))
                delta = rows["u"][at] - torch.einsum("bgk,gkv->bgv", rows["w"][at], state)
                values = torch.cat((values[: at.start], delta, values[at.stop :]))
                decay = rows["decay"][at]
                if decay.dim() == 3:
                    kept, key = decay[-1].exp2()[..., None], rows["key"][at]
                else:
                    kept = decay[-1].exp2()[:, None, None]
                    delta = delta * (decay[-1:] - decay).exp2()[..., None]
                    key = rows["key"][at].expand(-1, 2, -1)
                state = kept * state + torch.einsum("bgk,bgv->gkv", key, delta)
            if int(pieces.slots[piece]) >= 0:
                states[int(pieces.slots[piece])] = state
    return values, torch.stack(states)


def errors(by_channel: bool) -> dict[str, float]:
    """Relative errors of both passes, everything in float32."""
    plan = plan_tree(build_tree(BRANCHES, size=16, padding=2).index)
    generator = torch.Generator().manual_seed(0)
    count, heads = plan.rows + plan.copied_rows, 2 if by_channel else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    decay = -0.1 * torch.rand((count, 2, 16) if by_channel else (count, 2), generator=generator)
    rows = {
        "key": normal(count, heads, 16),
        "w": normal(count, 2, 16),
        "u": normal(count, 2, 16).requires_grad_(),
        "decay": decay,
    }
    bank = torch.full((plan.states.slots, 2, 16, 16), torch.nan)
    expected, expected_bank = sequential(plan, rows, torch.zeros_like(bank))
    arguments = (plan.states, SIZES, rows["key"], rows["w"], rows["u"].detach(), decay, bank)
    values, _ = state_passes.pass_states(*arguments)
    again, _ = state_passes.pass_states(*arguments, again=True)
    used = torch.zeros(count, dtype=torch.bool)
    pieces = plan.states.pieces
    for first, length in zip(pieces.rows.tolist(), pieces.lengths.tolist(), strict=True):
        used[first : first + length] = True
    upstream = normal(count, 2, 16) * used[:, None, None]
    (grad,) = torch.autograd.grad((expected * upstream).sum(), rows["u"])
    passed, _ = state_passes.pass_state_gradients(
        plan.states,
        SIZES,
        torch.zeros_like(rows["key"]),
        rows["key"],
        rows["w"],
        decay,
        torch.zeros_like(upstream),
        upstream,
        None,
        1.0,
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


if __name__ == "__main__":
    interpreter._patch_lang_tensor = _patch_tensor
    tile = state_passes._Tile(16, Config(4))
    for table in (state_passes._FORWARD, state_passes._AGAIN, state_passes._BACKWARD):
        table.update({True: tile, False: tile})
    print(json.dumps({"KDA": errors(True), "GDN": errors(False), "fold": {"rows": fold_error()}}))
