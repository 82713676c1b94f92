"""KDA inside chunks, for all chunks of all rounds at once, through fla 0.6.0's kernels.

fla is launched kernel by kernel: its functions allocate their own outputs, and the state pass
needs those of both parts in one buffer.

Shapes: P buffer rows · Z chunks · B chunk length · H query/key heads · G value heads · K key dim ·
V value dim.
"""

from __future__ import annotations

import torch
from fla.ops.gla.chunk import chunk_gla_fwd_kernel_o
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_kernel_dAv, chunk_kda_bwd_kernel_wy_dqkg_fused
from fla.ops.kda.chunk_intra import (
    chunk_kda_bwd_kernel_intra,
    chunk_kda_fwd_kernel_inter_solve_fused,
    chunk_kda_fwd_kernel_intra_sub_chunk,
)
from fla.ops.kda.chunk_intra_token_parallel import chunk_kda_fwd_kernel_intra_token_parallel
from fla.ops.kda.wy_fast import recompute_w_u_fwd_kda_kernel
from fla.ops.utils.constant import RCP_LN2
from fla.ops.utils.cumsum import chunk_local_cumsum_vector_kernel
from fla.utils import IS_GATHER_SUPPORTED
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

SUB_CHUNK = 16
# fla places the reference of a sub-chunk's gates for log decays near 0; see chunk_kda_fwd_intra.
GATE_SHIFT = 2.0 * RCP_LN2

# Fastest for H = G = 16, K = V = 128 on an H200, as fla's autotuner found; kept for all shapes.
_CUMSUM = Config(warps=4, stages=3)
_SUB_CHUNK = Config(warps=1, stages=4)
_TOKENS = Config(warps=1, stages=3)
_SOLVE = Config(warps=1, stages=3)
_EXPAND = Config(warps=4, stages=3)
_OUTPUT = Config(warps=4, stages=3)
_SCORE_GRADIENT = Config(warps=4, stages=2)
_FUSED_GRADIENT = Config(warps=4, stages=3)
_INTRA_GRADIENT = Config(warps=1, stages=3)


class KDA:
    """The steps of one call; `bounded` promises log decays of at least -5."""

    def __init__(self, sizes: Sizes, scale: float, bounded: bool) -> None:
        self.sizes, self.scale, self.bounded = sizes, scale, bounded

    def prepare(self, parts: list[Part], rows: int) -> Prepared:
        """Summed decays, scores and inverses of every chunk."""
        _, groups, key_dim, _, chunk = self.sizes
        like = parts[0].columns.key
        decay = empty(like, rows, groups, key_dim, dtype=torch.float32)
        query_key = empty(like, rows, groups, chunk)
        # The kernel writes lower triangles only.
        solve = torch.zeros_like(query_key)
        for part in parts:
            self._cumulate(part, part.columns.log_decay, decay[part.rows], RCP_LN2, reverse=False)
            self._scores(part, decay, query_key, solve)
        return Prepared(decay, solve, query_key)

    def expand(self, parts: list[Part], kept: Prepared, *, backward: bool) -> Expanded:
        """The paper's W and U, and keys (and queries) decayed to the chunk's ends."""
        _, groups, key_dim, value_dim, _ = self.sizes
        like, rows = parts[0].columns.key, kept.decay.shape[0]
        w, key = (empty(like, rows, groups, key_dim) for _ in range(2))
        query = empty(like, rows if backward else 0, groups, key_dim)
        u = empty(like, rows, groups, value_dim)
        for part in parts:
            columns, at = part.columns, part.rows
            launch(
                recompute_w_u_fwd_kda_kernel,
                (part.count, groups),
                _EXPAND,
                q=columns.query if backward else None,
                k=columns.key,
                qg=query[at] if backward else None,
                kg=key[at],
                v=columns.value,
                beta=columns.beta,
                w=w[at],
                u=u[at],
                A=kept.solve[at],
                gk=kept.decay[at],
                BK=64,
                BV=64,
                STORE_QG=backward,
                STORE_KG=True,
                **part.arguments(self.sizes),
            )
        last = parts[-1].rows
        return Expanded(w, u, InParts(key, key[last]), InParts(query, query[last]))

    def output(
        self, part: Part, kept: Prepared, values: Tensor, states: Tensor, output: Tensor
    ) -> None:
        """Write output [rows of the part, G, V]."""
        at, value_dim = part.rows, self.sizes.value_dim
        block = min(128, value_dim)
        launch(
            chunk_gla_fwd_kernel_o,
            (-(-value_dim // block) * part.count, self.sizes.groups),
            _OUTPUT,
            q=part.columns.query,
            v=values[at],
            g=kept.decay[at],
            h=states[part.chunks],
            o=output,
            A=_scores_of(kept)[at],
            scale=self.scale,
            BK=64,
            BV=block,
            STATE_V_FIRST=False,
            **part.arguments(self.sizes),
        )

    def local_gradients(
        self, parts: list[Part], kept: Prepared, values: Tensor, grad_output: InParts
    ) -> tuple[Tensor, Tensor]:
        """Gradients [P, G, V] of D without the state's part, and [P, G, B] of the scores."""
        _, groups, key_dim, value_dim, chunk = self.sizes
        grad_values = torch.empty_like(values)
        grad_scores = empty(values, values.shape[0], groups, chunk, dtype=torch.float32)
        for part in parts:
            at = part.rows
            launch(
                chunk_kda_bwd_kernel_dAv,
                (part.count, groups),
                _SCORE_GRADIENT,
                q=part.columns.query,
                k=part.columns.key,
                v=values[at],
                A=_scores_of(kept)[at],
                do=part.of(grad_output),
                dv=grad_values[at],
                dA=grad_scores[at],
                scale=self.scale,
                BK=min(128, key_dim),
                BV=min(128, value_dim),
                **part.arguments(self.sizes),
            )
        return grad_values, grad_scores

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
        assert grad_scores is not None
        heads, groups, key_dim, _, _ = self.sizes
        like, rows = parts[0].columns, values.shape[0]
        grad_query, grad_key, grad_decay = (
            empty(values, rows, groups, key_dim, dtype=torch.float32) for _ in range(3)
        )
        grad_value, grad_solve = torch.empty_like(values), torch.empty_like(grad_scores)
        grad_beta = empty(values, rows, groups, dtype=torch.float32)
        sofar = (grad_query, grad_key, grad_decay, grad_beta)
        for part in parts:
            targets = tuple(x[part.rows] for x in (*sofar, grad_value, grad_solve))
            self._state_gradients(part, kept, values, states, grad_output, passed, targets)
        # One value head a query head: the kernel can round to the input's dtype itself.
        dtype = like.query.dtype if heads == groups else torch.float32
        final = (
            empty(values, rows, groups, key_dim, dtype=dtype),
            empty(values, rows, groups, key_dim, dtype=dtype),
            torch.empty_like(grad_decay),
        )
        for part in parts:
            self._intra_gradients(part, kept, sofar, (grad_scores, grad_solve), final)
            self._cumulate(part, final[2][part.rows], grad_decay[part.rows], None, reverse=True)
        return [
            sum_groups(final[0][None], heads),
            sum_groups(final[1][None], heads),
            grad_value,
            grad_decay,
            grad_beta,
        ]

    def _cumulate(
        self,
        part: Part,
        source: Tensor | None,
        target: Tensor,
        scale: float | None,
        *,
        reverse: bool,
    ) -> None:
        _, groups, key_dim, _, chunk = self.sizes
        launch(
            chunk_local_cumsum_vector_kernel,
            (-(-key_dim // 64) * part.count, groups),
            _CUMSUM,
            s=source,
            o=target,
            scale=scale,
            cu_seqlens=part.chunk_list.cu_seqlens,
            chunk_indices=part.chunk_list.chunks,
            T=part.chunk_list.rows,
            B=1,
            H=groups,
            S=key_dim,
            BT=chunk,
            BS=64,
            REVERSE=reverse,
            HAS_SCALE=scale is not None,
            IS_VARLEN=True,
        )

    def _scores(self, part: Part, decay: Tensor, query_key: Tensor, solve: Tensor) -> None:
        _, groups, key_dim, _, chunk = self.sizes
        at, columns = part.rows, part.columns
        rows = at.stop - at.start
        diagonal = empty(decay, rows, groups, SUB_CHUNK, dtype=torch.float32)
        shared = {
            "q": columns.query,
            "k": columns.key,
            "g": decay[at],
            "beta": columns.beta,
            "Aqk": query_key[at],
            "scale": self.scale,
            "BC": SUB_CHUNK,
            **part.arguments(self.sizes, value=False),
        }
        sub_chunks = -(-chunk // SUB_CHUNK)
        if self.bounded:
            launch(
                chunk_kda_fwd_kernel_intra_sub_chunk,
                (part.count, sub_chunks, groups),
                _SUB_CHUNK,
                Akk=diagonal,
                BK=key_dim,
                GATE_SHIFT=GATE_SHIFT,
                USE_GATHER=IS_GATHER_SUPPORTED,
                **shared,
            )
        else:
            tokens = {name: x for name, x in shared.items() if name != "chunk_indices"}
            launch(
                chunk_kda_fwd_kernel_intra_token_parallel,
                (part.chunk_list.rows, groups),
                _TOKENS,
                Akk=diagonal,
                N=part.chunk_list.cu_seqlens.numel() - 1,
                BK=key_dim,
                BH=1,
                **tokens,
            )
        launch(
            chunk_kda_fwd_kernel_inter_solve_fused,
            (part.count, groups),
            _SOLVE,
            Akkd=diagonal,
            Akk=solve[at],
            NC=sub_chunks,
            BK=32,
            USE_SAFE_GATE=self.bounded,
            **shared,
        )

    def _state_gradients(
        self,
        part: Part,
        kept: Prepared,
        values: Tensor,
        states: Tensor,
        grad_output: InParts,
        passed: StateGradients,
        targets: tuple[Tensor, ...],
    ) -> None:
        """Gradients of this part through states, outputs and the solve, into `targets`."""
        at, count = part.rows, part.chunks
        grad_query, grad_key, grad_decay, grad_beta, grad_value, grad_solve = targets
        launch(
            chunk_kda_bwd_kernel_wy_dqkg_fused,
            (part.count, self.sizes.groups),
            _FUSED_GRADIENT,
            q=part.columns.query,
            k=part.columns.key,
            v=part.columns.value,
            v_new=values[at],
            g=kept.decay[at],
            beta=part.columns.beta,
            A=kept.solve[at],
            h=states[count],
            do=part.of(grad_output),
            dh=passed.states[count],
            dq=grad_query,
            dk=grad_key,
            dv=passed.values[at],
            dv2=grad_value,
            dg=grad_decay,
            db=grad_beta,
            dA=grad_solve,
            scale=self.scale,
            BK=64,
            BV=64,
            STATE_V_FIRST=False,
            **part.arguments(self.sizes),
        )

    def _intra_gradients(
        self,
        part: Part,
        kept: Prepared,
        sofar: tuple[Tensor, Tensor, Tensor, Tensor],
        grad_scores: tuple[Tensor, Tensor],
        final: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the gradients through the scores; beta's, one a block of channels, added in order."""
        _, groups, key_dim, _, chunk = self.sizes
        at, block = part.rows, min(32, key_dim)
        rows, blocks, sub_chunks = part.chunk_list.rows, key_dim // block, -(-chunk // SUB_CHUNK)
        grad_query, grad_key, grad_decay, grad_beta = sofar
        beta_blocks = empty(grad_beta, blocks, rows, groups)
        launch(
            chunk_kda_bwd_kernel_intra,
            (blocks * sub_chunks * part.count, groups),
            _INTRA_GRADIENT,
            q=part.columns.query,
            k=part.columns.key,
            g=kept.decay[at],
            beta=part.columns.beta,
            dAqk=grad_scores[0][at],
            dAkk=grad_scores[1][at],
            dq=grad_query[at],
            dq2=final[0][at],
            dk=grad_key[at],
            dk2=final[1][at],
            dg=grad_decay[at],
            dg2=final[2][at],
            db=beta_blocks,
            B=1,
            BC=SUB_CHUNK,
            BK=block,
            NC=sub_chunks,
            SAFE_GATE=self.bounded,
            GATE_SHIFT=GATE_SHIFT,
            USE_GATHER=IS_GATHER_SUPPORTED,
            **part.arguments(self.sizes, value=False),
        )
        grad_beta[at][:rows] += beta_blocks.sum(0)


def _scores_of(kept: Prepared) -> Tensor:
    assert kept.query_key is not None
    return kept.query_key
