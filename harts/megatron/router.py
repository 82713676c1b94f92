"""Megatron's top-k router, with losses and loads weighted by the tokens that a row stands for.

Shapes: r rows of this rank · E experts · k experts a row.

Routing, dispatch and experts see compact rows once. What counts tokens is weighted by the
multiplicity q (paper section 3.5), which is 0 in padding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from harts.errors import UnsupportedError
from harts.megatron.layers import Float32Parameters, at_least_float32
from harts.megatron.packet import RouterTask, TreePacket
from harts.ops.router import RouterStatistics, router_statistics, z_loss


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RouterTotals:
    """What the rows of this rank added over the microbatches of a step."""

    z_loss: Tensor
    """[] float64, this rank's part of the step's loss, without coefficient."""
    load_balancing_loss: Tensor
    counts: Tensor
    """[E] float64 assignments weighted by multiplicity."""

    @classmethod
    def zero(cls, experts: int, device: torch.device | str) -> RouterTotals:
        """Totals of no microbatch."""
        zeros = torch.zeros(experts + 2, dtype=torch.float64, device=device)
        return cls(z_loss=zeros[0], load_balancing_loss=zeros[1], counts=zeros[2:])


class TreeRouter(Float32Parameters, TopKRouter):  # type: ignore[misc]
    """Routes rows as Megatron does; weighs statistics by the packet of its layer.

    Counts are of the assignments made, groups and bias included, as with Hugging Face models;
    Megatron's own auxiliary loss counts what the bare scores would choose.
    """

    def __init__(
        self, config: Any, pg_collection: Any = None, *, float32: bool = False, **kwargs: Any
    ) -> None:
        """``float32`` keeps the weight so, whatever the dtype of the model."""
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        if float32:
            self.weight.data = self.weight.data.to(at_least_float32(config.params_dtype))
        self.packet: TreePacket | None = None
        self._totals: RouterTotals | None = None

    def take_totals(self) -> RouterTotals:
        """What was added since the last call."""
        taken, self._totals = self._totals, None
        return RouterTotals.zero(self.config.num_moe_experts, "cpu") if taken is None else taken

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Logits [r, 1, E] to weights [r, E] and chosen experts [r, E]; attaches the losses."""
        probs, chosen = super().routing(logits, *args, **kwargs)
        task = self._task()
        if task is None:
            return probs, chosen
        packet = self._packet()
        own = router_statistics(
            logits.view(chosen.shape),
            chosen.to(torch.int32).topk(self.topk, dim=-1).indices,
            packet.multiplicity,
            self.score_function,
            trajectories=task.trajectories,
            over_ranks=self._over_ranks,
        )
        totals = self._totals or RouterTotals.zero(self.config.num_moe_experts, logits.device)
        self._totals = totals
        totals.counts += own.counts
        if task.only_counts:
            return probs, chosen
        if self.enable_expert_bias:
            self.local_tokens_per_expert += own.counts.to(self.local_tokens_per_expert.dtype)
        statistics = self._of_the_microbatch(own)
        z = z_loss(statistics) / task.scale.microbatches
        balance = task.scale.balancing(
            task.losses.load_balancing, statistics, self.topk, self.layer_number
        )
        totals.z_loss += z.detach()
        totals.load_balancing_loss += balance.detach()
        weighted = task.losses.z_coefficient * z + task.losses.load_balancing_coefficient * balance
        return MoEAuxLossAutoScaler.apply(probs, weighted), chosen

    def _task(self) -> RouterTask | None:
        """What this forward adds up; None for a filler, and where it would count twice."""
        if self.packet is not None and self.packet.router and self.packet.router.only_counts:
            return self.packet.router
        # Recomputed layers run without gradients first.
        if not torch.is_grad_enabled() or not self.training:
            return None
        return self._packet().router

    def _of_the_microbatch(self, own: RouterStatistics) -> RouterStatistics:
        """Mass and z of this rank's rows; counts and tokens of the whole microbatch.

        All losses are linear in what probabilities add up to, so each rank's are its part of the
        microbatch's.
        """
        shared = self._over_ranks(torch.cat([own.counts, own.tokens[None]]))
        return dataclasses.replace(own, counts=shared[:-1], tokens=shared[-1])

    def _over_ranks(self, counts: Tensor) -> Tensor:
        """Sum over the ranks that hold rows of the microbatch."""
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        return counts

    def _apply_expert_bias(self, *_args: Any, **_kwargs: Any) -> None:
        """Megatron counts rows here; `routing` counts tokens instead."""

    def _packet(self) -> TreePacket:
        if self.packet is None:
            raise UnsupportedError(
                "the router was called outside a layer of harts.megatron, so it does not know how "
                "many tokens its rows stand for; build the model with harts.megatron, and "
                "recompute whole layers (recompute_granularity='full') or nothing"
            )
        return self.packet
