"""Log-probs of a vocabulary that is cut over tensor parallelism: no logits, scalars on the wire.

Shapes: r rows of this rank · D model width · A vocabulary, a of it on this rank · P positions of
the microbatch, P' of them on rows of this rank of context parallelism · T rows that some position
reads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.errors import UnsupportedError
from harts.megatron.packet import TreePacket, tree_of
from harts.ops.logprobs import mapped_logprobs
from harts.ops.logprobs.records import Projection, RowSums
from harts.ops.logprobs.shards import (
    VocabularyPartial,
    active_rows,
    vocabulary_gradients,
    vocabulary_partial,
)
from harts.ops.logprobs.streamed import why_not_streamed


class LogprobHead(ColumnParallelLinear):  # type: ignore[misc]
    """The output layer, whose result is log-probs in original order instead of logits."""

    vocabulary: int
    """A without the rows that only pad the weight."""
    context_group: Any

    def forward(self, hidden: Tensor, *, packet: TreePacket) -> Tensor:
        """[r, 1, D] to the log-probs [P] of the whole microbatch, in float32."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        own = self._own(hidden[:, 0], packet.target_rows(), packet.targets())
        count = len(tree_of(packet).targets)
        return _join(own, packet, count, self.context_group)

    def _own(self, hidden: Tensor, target_rows: Tensor, targets: Tensor) -> Tensor:
        """[P'] of hidden rows that every tensor-parallel rank has."""
        if self.tp_group.size() == 1:
            return mapped_logprobs(hidden, self.weight[: self.vocabulary], target_rows, targets)
        reason = why_not_streamed(hidden, self.weight)
        if hidden.is_cuda and reason is not None:
            raise UnsupportedError(
                f"log-probs of a vocabulary cut over {self.tp_group.size()} GPUs need the compiled "
                f"form, and {reason}. Use bfloat16 on a Hopper GPU, or tensor parallel size 1"
            )
        first = self.tp_group.rank() * self.weight.shape[0]
        held = min(max(self.vocabulary - first, 0), self.weight.shape[0])
        own: Tensor = _ShardedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, target_rows, targets, first, held, self.tp_group
        )
        return own


def _join(own: Tensor, packet: TreePacket, count: int, group: Any) -> Tensor:
    """Every rank of context parallelism gets all P log-probs, and the gradient of its own."""
    assert packet.own_positions is not None
    whole = own.new_zeros(count).index_copy(0, packet.own_positions, own)
    if group.size() == 1:
        return whole
    joined: Tensor = _SumOfOthers.apply(whole, group)  # type: ignore[no-untyped-call]
    return joined


class _SumOfOthers(torch.autograd.Function):
    """Sum over ranks; every rank computes the same loss, so the gradient is each one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # noqa: ARG004
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _ShardedLogprobs(torch.autograd.Function):
    """hidden [r, D], weight [a, D] -> log-probs [P'] under the whole vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_rows: Tensor,
        targets: Tensor,
        first: int,
        held: int,
        group: Any,
    ) -> Tensor:
        rows, number = torch.unique(target_rows, return_inverse=True)
        projection = Projection(weight[:held], None, 1.0, first)
        partial = _over_ranks(
            vocabulary_partial(hidden, projection, rows, target_rows, targets), group
        )
        log_partition = partial.log_partition()
        logprobs = partial.target_logits - log_partition[number]
        ctx.save_for_backward(hidden, weight, target_rows, targets, logprobs, rows, log_partition)
        ctx.first, ctx.held = first, held
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target_rows, targets, logprobs, rows, log_partition = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        if grad.any():
            active = active_rows(
                target_rows, targets, logprobs, grad.contiguous(), rows, log_partition, 1.0
            )
            projection = Projection(weight[: ctx.held], None, 1.0, ctx.first)
            by_row, by_token, _ = vocabulary_gradients(hidden, projection, active)
            assert by_row is not None
            assert by_token is not None
            grad_hidden.index_copy_(0, active.rows, by_row.to(hidden.dtype))
            grad_weight[: ctx.held] = by_token
        return grad_hidden, grad_weight, *(None,) * 5


def _over_ranks(partial: VocabularyPartial, group: Any) -> VocabularyPartial:
    """What `combine_partials` does, for shards on different ranks: T + P' + T numbers travel."""
    maximum = partial.sums.maximum.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    scaled = partial.sums.sum_exp * (partial.sums.maximum - maximum).exp()
    together = torch.cat([scaled, partial.target_logits])
    dist.all_reduce(together, group=group)
    sums, logits = torch.split(together, [len(scaled), len(partial.target_logits)])
    return VocabularyPartial(RowSums(maximum, sums, None), logits)
