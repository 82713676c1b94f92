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
from harts.megatron.packet import TreePacket
from harts.ops.router import (
    RouterStatistics,
    load_balancing_loss,
    router_statistics,
    z_loss,
)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RouterTotals:
    """What the rows of this rank added over the microbatches of a step."""

    z_loss: Tensor
    """[] float64 sum of the microbatches' mean z-losses, this rank's part."""
    load_balancing_loss: Tensor
    counts: Tensor
    """[E] float64 assignments weighted by multiplicity."""

    @classmethod
    def zero(cls, experts: int, device: torch.device | str) -> RouterTotals:
        """Totals of no microbatch."""
        zeros = torch.zeros(experts + 2, dtype=torch.float64, device=device)
        return cls(z_loss=zeros[0], load_balancing_loss=zeros[1], counts=zeros[2:])


class TreeRouter(TopKRouter):  # type: ignore[misc]
    """Routes rows as Megatron does; weighs statistics by the packet of its layer.

    Counts are of the assignments made, groups and bias included, as with Hugging Face models;
    Megatron's own auxiliary loss counts what the bare scores would choose.
    """

    def __init__(self, config: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.packet: TreePacket | None = None
        self._totals: RouterTotals | None = None

    def take_totals(self) -> RouterTotals:
        """What was added since the last call."""
        taken, self._totals = self._totals, None
        return RouterTotals.zero(self.config.num_moe_experts, "cpu") if taken is None else taken

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Logits [r, 1, E] to weights [r, E] and chosen experts [r, E]; attaches the losses."""
        probs, chosen = super().routing(logits, *args, **kwargs)
        # Recomputed layers run without gradients first: what counts, counts once.
        if not torch.is_grad_enabled() or not self.training:
            return probs, chosen
        packet = self._packet()
        if not packet.counted:
            return probs, chosen
        selected = chosen.to(torch.int32).topk(self.topk, dim=-1).indices
        own = router_statistics(
            logits.view(chosen.shape), selected, packet.multiplicity, self.score_function
        )
        if self.enable_expert_bias:
            self.local_tokens_per_expert += own.counts.to(self.local_tokens_per_expert.dtype)
        statistics = self._of_the_microbatch(own)
        z, balance = z_loss(statistics), load_balancing_loss(statistics, self.topk)
        totals = self._totals or RouterTotals.zero(self.config.num_moe_experts, logits.device)
        totals.z_loss += z.detach()
        totals.load_balancing_loss += balance.detach()
        totals.counts += own.counts
        self._totals = totals
        weighted = packet.router.z * z + packet.router.load_balancing * balance
        return MoEAuxLossAutoScaler.apply(probs, weighted), chosen

    def _of_the_microbatch(self, own: RouterStatistics) -> RouterStatistics:
        """Mass and z of this rank's rows; counts and tokens of the whole microbatch.

        The losses are linear in mass and z, so each rank's are its part of the microbatch's.
        """
        shared = torch.cat([own.counts, own.tokens[None]])
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(shared, group=self.tp_cp_group)
        return dataclasses.replace(own, counts=shared[:-1], tokens=shared[-1])

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
