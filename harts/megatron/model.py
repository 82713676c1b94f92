"""Megatron's GPT model over rollout trees: log-probs come out of the last stage, no logits."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from harts.megatron.head import LogprobHead
from harts.megatron.packet import TreePacket, tree_of
from harts.megatron.router import TreeRouter


class TreeTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that tells its router which tree it runs, in forward and in recomputation."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the library's, with ``packed_seq_params`` a `TreePacket`."""
        packet = kwargs.get("packed_seq_params")
        tree_of(packet)
        router = getattr(self.mlp, "router", None)
        if not isinstance(router, TreeRouter):
            return super().forward(*args, **kwargs)
        router.packet = packet
        try:
            return super().forward(*args, **kwargs)
        finally:
            router.packet = None


class TreeGPTModel(GPTModel):  # type: ignore[misc]
    """A GPT model whose last stage returns log-probs [P] of its microbatch in original order."""

    def __init__(self, *args: Any, vocabulary: int, **kwargs: Any) -> None:
        """``vocabulary`` is A without padding; all else as in ``GPTModel``."""
        super().__init__(*args, **kwargs)
        self.vocabulary = vocabulary
        if self.post_process:
            # The layer keeps its weight and name; only what it computes changes.
            self.output_layer.__class__ = LogprobHead
            self.output_layer.vocabulary = vocabulary
            self.output_layer.context_group = self.pg_collection.cp

    def _postprocess(
        self, hidden_states: Tensor, *, packed_seq_params: TreePacket, **_: Any
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        logprobs: Tensor = self.output_layer(hidden_states, packet=packed_seq_params)
        return logprobs
