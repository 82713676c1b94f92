"""The routed experts of one rank: one product over all of them where the hardware has it.

Shapes: M rows that were sent to this rank's experts, sorted by expert · E experts of this rank ·
I expert width on this rank · D model width.

Megatron's own form of this needs Transformer Engine or the grouped_gemm package.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from harts.megatron.layers import device_of, drawn_apart, mark_split
from harts.ops.experts import grouped_product
from harts.ops.swiglu import weighted_swiglu


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """Gated MLPs in the layout of Hugging Face, each matrix of all experts one parameter.

    Experts may be cut over expert tensor parallelism: the dispatcher gathers rows before and sums
    the parts after.
    """

    def __init__(
        self, num_local_experts: int, config: Any, *, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config)
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        # Experts with a grid of their own are reduced over its replicas, not the model's.
        own_grid = pg_collection.ep.size() > 1 or pg_collection.expt_tp.size() < (
            config.tensor_model_parallel_size
        )
        shapes = {"gate_up": (2 * width, config.hidden_size), "down": (config.hidden_size, width)}
        for (name, shape), dim in zip(shapes.items(), (1, 2), strict=True):
            parameter = nn.Parameter(
                torch.empty(
                    num_local_experts,
                    *shape,
                    dtype=config.params_dtype,
                    device=device_of(config),
                )
            )
            mark_split(parameter, dim)
            setattr(parameter, "allreduce", not own_grid)  # noqa: B010
            self.register_parameter(name, parameter)
        if config.perform_initialization:
            with drawn_apart(config, expert=True):
                config.init_method(self.gate_up)
                config.output_layer_init_method(self.down)

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Rows [M, D], rows of each expert [E] and routing weights [M] to [M, D], and no bias.

        The counts are on the host already: the dispatcher needed them to exchange rows.
        """
        if not len(rows):
            # The parameters still take part, or nobody would reduce their gradients.
            return rows * (self.gate_up.sum() + self.down.sum()), None
        ends = counts.cumsum(0).to(rows.device, torch.int32, non_blocking=True)
        hidden = weighted_swiglu(grouped_product(rows, self.gate_up, ends), weights[:, None])
        return grouped_product(hidden, self.down, ends), None
