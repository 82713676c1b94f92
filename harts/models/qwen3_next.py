"""Qwen3-Next (``qwen3_next``): Gated DeltaNet and gated GQA layers, softmax-routed MoE.

Shapes: R physical rows · D model width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    Qwen3NextTopKRouter,
)

from harts.models.families import ModelFamily
from harts.models.linear_attention import TreeLayer, gated_delta_net, normalised_output
from harts.models.random_weights import GATED_DELTA_NET, SOFTMAX_MOE, drawn
from harts.ops.tree_index import TreeIndex


class TreeQwen3NextGatedDeltaNet(TreeLayer, Qwen3NextGatedDeltaNet):  # type: ignore[misc]
    """Gated DeltaNet of Qwen3-Next; its projections interleave the heads."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        parts = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        )
        query, key, value, gate, beta, decay = (x[0] for x in parts)
        mixed = torch.cat([x.flatten(1) for x in (query, key, value)], dim=-1)
        output = gated_delta_net(self, mixed, decay, beta.sigmoid(), tree)
        projected: Tensor = self.out_proj(normalised_output(self.norm, output, gate))
        return projected


def small_model(vocabulary: int) -> Qwen3NextForCausalLM:
    """The first layer dense, the others MoE; for checks and tests."""
    config = Qwen3NextConfig(
        vocab_size=vocabulary, mlp_only_layers=[0], **GATED_DELTA_NET, **SOFTMAX_MOE
    )
    return drawn(Qwen3NextForCausalLM(config))


FAMILY = ModelFamily(
    model_type="qwen3_next",
    tree_layers={Qwen3NextGatedDeltaNet: TreeQwen3NextGatedDeltaNet},
    router_class=Qwen3NextTopKRouter,
    router_score="softmax",
    chunk_size=64,
    small_model=small_model,
)
