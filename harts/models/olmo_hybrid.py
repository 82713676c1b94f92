"""OLMo Hybrid (``olmo_hybrid``): Gated DeltaNet with steps up to 2, and MHA; dense FFNs.

Shapes: R physical rows · D model width.
"""

from typing import Any

from torch import Tensor
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

from harts.models.families import ModelFamily
from harts.models.linear_attention import (
    TreeLayer,
    gated_delta_net,
    normalised_output,
    side_by_side,
)
from harts.models.random_weights import GATED_DELTA_NET, drawn
from harts.ops.tree_index import TreeIndex


class TreeOlmoHybridGatedDeltaNet(TreeLayer, OlmoHybridGatedDeltaNet):  # type: ignore[misc]
    """Gated DeltaNet of OLMo Hybrid; a step of up to 2 gives the state negative eigenvalues."""

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """Run compact rows; see `TreeLayer`."""
        rows = hidden[0]
        mixed = side_by_side(rows, self.q_proj, self.k_proj, self.v_proj)
        beta = self.b_proj(rows).sigmoid() * (2.0 if self.allow_neg_eigval else 1.0)
        output = gated_delta_net(self, mixed, self.a_proj(rows), beta, tree)
        projected: Tensor = self.o_proj(normalised_output(self.o_norm, output, self.g_proj(rows)))
        return projected


def small_model(vocabulary: int) -> OlmoHybridForCausalLM:
    """Two Gated DeltaNet layers around one of attention; for checks and tests."""
    shape = {k: v for k, v in GATED_DELTA_NET.items() if k != "head_dim"}
    shape |= {"num_key_value_heads": 4, "linear_num_value_heads": 2, "linear_value_head_dim": 16}
    config = OlmoHybridConfig(vocab_size=vocabulary, pad_token_id=None, eos_token_id=None, **shape)
    return drawn(OlmoHybridForCausalLM(config))


FAMILY = ModelFamily(
    model_type="olmo_hybrid",
    tree_layers={OlmoHybridGatedDeltaNet: TreeOlmoHybridGatedDeltaNet},
    chunk_size=64,
    small_model=small_model,
)
