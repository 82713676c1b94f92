"""The GPU delta rule as one differentiable function of rows and initial states.

Shapes: R rows · P buffer rows (R, then copied rows) · Q sequences · L bank slots · G value heads ·
H query/key heads · K key dim · V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.delta_rule.gpu.gdn import GatedDeltaNet
from harts.ops.delta_rule.gpu.kda import KDA
from harts.ops.delta_rule.gpu.parts import (
    Columns,
    InParts,
    Part,
    Prepared,
    Sizes,
    buffer_rows,
    cast_all,
    empty,
    make_parts,
)
from harts.ops.delta_rule.gpu.row_plan import RowPlan
from harts.ops.delta_rule.gpu.state_passes import fold, pass_state_gradients, pass_states
from harts.ops.kept_outputs import kept

Rule = KDA | GatedDeltaNet
_STATE_BYTES, _OUTPUT_BYTES = 4, 2


class ChunkedDeltaRule(torch.autograd.Function):
    """(query, key, value, log_decay, beta, initial states) -> output [R, G, V], bank [L, G, K, V].

    Slots 0..Q-1 of the bank are the initial states when they are given; without them the plan
    starts every root from zero. Backward makes D and the states again, as fla does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        plan: RowPlan,
        rule: Rule,
    ) -> tuple[Tensor, Tensor]:
        """Run everything; save the inputs, the bank and what `Prepared` holds."""
        query, key, value, log_decay, beta = (
            x.contiguous() for x in (query, key, value, log_decay, beta)
        )
        parts = make_parts(plan, Columns(query, key, value, beta, log_decay))
        prepared = rule.prepare(parts, buffer_rows(plan))

        def outputs() -> tuple[Tensor, Tensor]:
            bank = _bank(plan, rule.sizes, initial, query)
            return _pass(plan, rule, parts, prepared, bank), bank

        output, bank = kept(outputs) if _worth_keeping(plan, rule.sizes) else outputs()
        ctx.save_for_backward(query, key, value, beta, bank, *prepared)
        ctx.plan, ctx.rule, ctx.decay_dtype = plan, rule, log_decay.dtype
        ctx.with_initial = initial is not None
        ctx.set_materialize_grads(False)
        return output, bank

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_bank: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the rows and of the initial states."""
        query, key, value, beta, bank, *saved = ctx.saved_tensors
        plan: RowPlan = ctx.plan
        rule: Rule = ctx.rule
        prepared = Prepared(*saved)
        parts = make_parts(plan, Columns(query, key, value, beta, None))
        grad_rows = _output_gradient(plan, grad_output, value)
        expanded = rule.expand(parts, prepared, backward=True)
        values, states = pass_states(
            plan.states,
            rule.sizes,
            expanded.key,
            expanded.w,
            expanded.u,
            prepared.decay,
            bank,
            again=True,
        )
        local, grad_scores = rule.local_gradients(parts, prepared, values, grad_rows)
        passed, initial = pass_state_gradients(
            plan.states,
            rule.sizes,
            expanded.query,
            expanded.key,
            expanded.w,
            prepared.decay,
            grad_rows,
            local,
            None if grad_bank is None else grad_bank.contiguous(),
            rule.scale,
        )
        del expanded, local
        gradients = rule.gradients(parts, prepared, values, states, grad_rows, grad_scores, passed)
        del values, states, grad_scores, grad_rows, passed
        rows = [_to_rows(plan, x) for x in gradients]
        like = (query, key, value, bank.new_empty(0, dtype=ctx.decay_dtype), beta)
        return (*cast_all(rows, like), initial if ctx.with_initial else None, None, None)


def _worth_keeping(plan: RowPlan, sizes: Sizes) -> bool:
    """Whether the states of the bank take less room than the outputs of the rows."""
    return plan.states.slots * sizes.key_dim * _STATE_BYTES <= plan.rows * _OUTPUT_BYTES


def _bank(plan: RowPlan, sizes: Sizes, initial: Tensor | None, like: Tensor) -> Tensor:
    shape = (plan.states.slots, sizes.groups, sizes.key_dim, sizes.value_dim)
    bank = empty(like, *shape, dtype=torch.float32)
    if initial is not None:
        bank[: initial.shape[0]] = initial
    return bank


def _pass(plan: RowPlan, rule: Rule, parts: list[Part], prepared: Prepared, bank: Tensor) -> Tensor:
    """Output [R, G, V]; fills the bank beyond the initial states."""
    expanded = rule.expand(parts, prepared, backward=False)
    values, states = pass_states(
        plan.states, rule.sizes, expanded.key, expanded.w, expanded.u, prepared.decay, bank
    )
    del expanded
    return _outputs(plan, rule, parts, prepared, values, states)


def _outputs(
    plan: RowPlan, rule: Rule, parts: list[Part], prepared: Prepared, values: Tensor, states: Tensor
) -> Tensor:
    """Output [R, G, V]: written in place, and from copied chunks the rows that are own."""
    output = empty(values, plan.rows, *values.shape[1:])
    for part in parts:
        if part.rows.start == 0:
            rule.output(part, prepared, values, states, output)
        else:
            copies = empty(values, plan.copied_rows, *values.shape[1:])
            rule.output(part, prepared, values, states, copies)
            own = copies.index_select(0, plan.copied.own)
            output.index_copy_(0, plan.copied.own_targets, own)
    output[plan.used_rows :].zero_()
    return output


def _output_gradient(plan: RowPlan, grad_output: Tensor | None, value: Tensor) -> InParts:
    """Output gradient [R, G, V] and [E, G, V]; replay rows have no output, so theirs is zero."""
    in_place = torch.zeros_like(value) if grad_output is None else grad_output.contiguous()
    copied = value.new_zeros((plan.copied_rows, *value.shape[1:]))
    if plan.copied_rows:
        own = in_place.index_select(0, plan.copied.own_targets)
        copied.index_copy_(0, plan.copied.own, own)
    return InParts(in_place, copied)


def _to_rows(plan: RowPlan, gradient: Tensor) -> Tensor:
    """Gradient [P, ...] to rows [R, ...]: copies folded in, padding zero."""
    rows = gradient[: plan.rows]
    fold(rows, gradient[plan.rows :], plan.copied)
    rows[plan.used_rows :].zero_()
    return rows
