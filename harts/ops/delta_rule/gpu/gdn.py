"""Gated DeltaNet inside chunks, for all chunks of all rounds: fla 0.6.0's kernels, and one of ours.

Shapes: P buffer rows · Z chunks · B chunk length · H query/key heads · G value heads · K key dim ·
V value dim.
"""

from __future__ import annotations

import torch
from fla.ops.common.chunk_o import chunk_bwd_kernel_dv_local, chunk_fwd_kernel_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd_kernel, recompute_w_u_fwd_kernel
from fla.ops.utils.constant import RCP_LN2
from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel
from torch import Tensor

from harts.ops.delta_rule.gpu.parts import (
    Config,
    Expanded,
    InParts,
    Part,
    Prepared,
    Sizes,
    StateGradients,
    empty,
    launch,
    sum_groups,
)
from harts.ops.delta_rule.gpu.triton_kernels import scalar_gate_gradients

# Fastest for H = 16, G = 32, K = V = 128 on an H200 of those that were tried; kept for all shapes.
_CUMSUM = Config(warps=1)
_SOLVE = Config(warps=1)
_EXPAND = Config(warps=4, stages=3)
_OUTPUT = Config(warps=4)
_LOCAL_GRADIENT = Config(warps=2, stages=3)
_STATE_GRADIENT = Config(warps=4)
_STATE_BLOCK = 64
_SOLVE_GRADIENT = Config(warps=4, stages=3)


class GatedDeltaNet:
    """The steps of one call; decays are one a value head."""

    def __init__(self, sizes: Sizes, scale: float) -> None:
        self.sizes, self.scale = sizes, scale

    def prepare(self, parts: list[Part], rows: int) -> Prepared:
        """Summed decays and inverses of every chunk."""
        _, groups, key_dim, _, chunk = self.sizes
        like = parts[0].columns.key
        decay = empty(like, rows, groups, dtype=torch.float32)
        # The kernel writes lower triangles only.
        solve = like.new_zeros((rows, groups, chunk))
        for part in parts:
            self._cumulate(part, part.columns.log_decay, decay[part.rows], RCP_LN2, reverse=False)
            launch(
                chunk_gated_delta_rule_fwd_kkt_solve_kernel,
                (part.count, groups),
                _SOLVE,
                k=part.columns.key,
                g=decay[part.rows],
                beta=part.columns.beta,
                A=solve[part.rows],
                BC=16,
                BK=min(64, key_dim),
                USE_G=True,
                **part.arguments(self.sizes, value=False),
            )
        return Prepared(decay, solve, None)

    def expand(self, parts: list[Part], kept: Prepared, *, backward: bool) -> Expanded:
        """The paper's W and U; the state pass decays plain keys and queries by itself."""
        del backward
        _, groups, key_dim, value_dim, _ = self.sizes
        like, rows = parts[0].columns.key, kept.decay.shape[0]
        w = empty(like, rows, groups, key_dim)
        u = empty(like, rows, groups, value_dim)
        for part in parts:
            at = part.rows
            launch(
                recompute_w_u_fwd_kernel,
                (part.count, groups),
                _EXPAND,
                k=part.columns.key,
                v=part.columns.value,
                beta=part.columns.beta,
                w=w[at],
                u=u[at],
                A=kept.solve[at],
                g=kept.decay[at],
                BK=64,
                BV=64,
                USE_G=True,
                **part.arguments(self.sizes),
            )
        first, last = parts[0].columns, parts[-1].columns
        return Expanded(w, u, InParts(first.key, last.key), InParts(first.query, last.query))

    def output(
        self, part: Part, kept: Prepared, values: Tensor, states: Tensor, output: Tensor
    ) -> None:
        """Write output [rows of the part, G, V]."""
        at, value_dim = part.rows, self.sizes.value_dim
        launch(
            chunk_fwd_kernel_o,
            (value_dim // 64 * part.count, self.sizes.groups),
            _OUTPUT,
            q=part.columns.query,
            k=part.columns.key,
            v=values[at],
            h=states[part.chunks],
            g=kept.decay[at],
            g_gamma=None,
            o=output,
            scale=self.scale,
            BK=64,
            BV=64,
            USE_G=True,
            USE_G_GAMMA=False,
            STATE_V_FIRST=False,
            **part.arguments(self.sizes),
        )

    def local_gradients(
        self, parts: list[Part], kept: Prepared, values: Tensor, grad_output: InParts
    ) -> tuple[Tensor, None]:
        """Gradients [P, G, V] of D without the state's part."""
        _, groups, key_dim, value_dim, _ = self.sizes
        grad_values = torch.empty_like(values)
        for part in parts:
            at = part.rows
            launch(
                chunk_bwd_kernel_dv_local,
                (part.count, groups),
                _LOCAL_GRADIENT,
                q=part.columns.query,
                k=part.columns.key,
                g=kept.decay[at],
                g_gamma=None,
                A=None,
                do=part.of(grad_output),
                dv=grad_values[at],
                scale=self.scale,
                BK=min(128, key_dim),
                BV=min(128, value_dim),
                USE_G=True,
                USE_G_GAMMA=False,
                USE_A=False,
                **part.arguments(self.sizes),
            )
        return grad_values, None

    def gradients(
        self,
        parts: list[Part],
        kept: Prepared,
        values: Tensor,
        states: Tensor,
        grad_output: InParts,
        grad_scores: Tensor | None,
        passed: StateGradients,
    ) -> list[Tensor]:
        """Gradients of query, key, value, log decay and beta, each [P, ...]."""
        heads, groups, key_dim, _, _ = self.sizes
        del grad_scores
        rows = values.shape[0]
        grad_query, grad_w = (empty(values, rows, groups, key_dim) for _ in range(2))
        # Two gradients of the key side by side, so that one sum adds them and the value heads.
        grad_keys = empty(values, 2, rows, groups, key_dim)
        grad_value = torch.empty_like(values)
        grad_decay, decay_again, grad_beta = (
            empty(values, rows, groups, dtype=torch.float32) for _ in range(3)
        )
        for part in parts:
            at = part.rows
            self._state_gradients(
                part,
                kept,
                values,
                states,
                grad_output,
                passed,
                (grad_query[at], grad_keys[0][at], grad_w[at], grad_decay[at]),
            )
            self._solve_gradients(
                part,
                kept,
                grad_w[at],
                passed.values[at],
                (grad_keys[1][at], grad_value[at], grad_beta[at], decay_again[at]),
            )
        decay_again += grad_decay
        for part in parts:
            self._cumulate(part, decay_again[part.rows], grad_decay[part.rows], None, reverse=True)
        return [
            sum_groups(grad_query[None], heads),
            sum_groups(grad_keys, heads),
            grad_value,
            grad_decay,
            grad_beta,
        ]

    def _state_gradients(
        self,
        part: Part,
        kept: Prepared,
        values: Tensor,
        states: Tensor,
        grad_output: InParts,
        passed: StateGradients,
        targets: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """Gradients of query, key, W and summed decay through outputs and states."""
        heads, groups, key_dim, value_dim, chunk = self.sizes
        at, rows = part.rows, part.chunk_list.rows
        blocks = key_dim // _STATE_BLOCK
        decay_blocks = empty(targets[3], blocks, rows, groups)
        # Not fla's kernel, whose gradient of W does not repeat on Hopper: see ours.
        scalar_gate_gradients[blocks * part.count, groups](
            part.columns.query,
            part.columns.key,
            values[at],
            kept.decay[at],
            states[part.chunks],
            part.of(grad_output),
            passed.values[at],
            passed.states[part.chunks],
            *targets[:3],
            decay_blocks,
            part.chunk_list.cu_seqlens,
            part.chunk_list.chunks,
            self.scale,
            rows,
            heads=heads,
            groups=groups,
            key_dim=key_dim,
            value_dim=value_dim,
            chunk_size=chunk,
            block=_STATE_BLOCK,
            value_block=_STATE_BLOCK,
            num_warps=_STATE_GRADIENT.warps,
            num_stages=_STATE_GRADIENT.stages,
        )
        torch.sum(decay_blocks, 0, out=targets[3][:rows])

    def _solve_gradients(
        self,
        part: Part,
        kept: Prepared,
        grad_w: Tensor,
        grad_u: Tensor,
        targets: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """Gradients of key, value, beta and summed decay through W and U."""
        launch(
            prepare_wy_repr_bwd_kernel,
            (part.count, self.sizes.groups),
            _SOLVE_GRADIENT,
            k=part.columns.key,
            v=part.columns.value,
            beta=part.columns.beta,
            g=kept.decay[part.rows],
            A=kept.solve[part.rows],
            dw=grad_w,
            du=grad_u,
            dk=targets[0],
            dv=targets[1],
            db=targets[2],
            dg=targets[3],
            BK=min(64, self.sizes.key_dim),
            BV=min(64, self.sizes.value_dim),
            USE_G=True,
            **part.arguments(self.sizes),
        )

    def _cumulate(
        self,
        part: Part,
        source: Tensor | None,
        target: Tensor,
        scale: float | None,
        *,
        reverse: bool,
    ) -> None:
        groups = self.sizes.groups
        launch(
            chunk_local_cumsum_scalar_kernel,
            (part.count * groups,),
            _CUMSUM,
            s=source,
            o=target,
            scale=scale,
            cu_seqlens=part.chunk_list.cu_seqlens,
            chunk_indices=part.chunk_list.chunks,
            T=part.chunk_list.rows,
            B=1,
            H=groups,
            BT=self.sizes.chunk_size,
            REVERSE=reverse,
            HAS_SCALE=scale is not None,
            IS_VARLEN=True,
        )
