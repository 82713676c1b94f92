"""Qwen3.5 (``qwen3_5_text``): Gated DeltaNet and gated GQA layers, dense FFNs.

Shapes: R physical rows · D model width.
"""

from typing import Any

from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from harts.models.families import ModelFamily
from harts.models.linear_attention import TreeLayer, gated_delta_net, normalised_output
from harts.models.random_weights import GATED_DELTA_NET, drawn
from harts.ops.tree_index import TreeIndex


class TreeQwen35Layer(TreeLayer):
    """Gated DeltaNet of Qwen3.5, dense and MoE: one projection a part."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        rows = hidden[0]
        beta = self.in_proj_b(rows).sigmoid()
        output = gated_delta_net(self, self.in_proj_qkv(rows), self.in_proj_a(rows), beta, tree)
        gate = self.in_proj_z(rows)
        projected: Tensor = self.out_proj(normalised_output(self.norm, output, gate))
        return projected


class TreeQwen35GatedDeltaNet(TreeQwen35Layer, Qwen3_5GatedDeltaNet):  # type: ignore[misc]
    """The dense model's."""


def small_model(vocabulary: int) -> Qwen3_5ForCausalLM:
    """For checks and tests."""
    return drawn(Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=vocabulary, **GATED_DELTA_NET)))


FAMILY = ModelFamily(
    model_type="qwen3_5_text",
    tree_layers={Qwen3_5GatedDeltaNet: TreeQwen35GatedDeltaNet},
    chunk_size=64,
    small_model=small_model,
)
