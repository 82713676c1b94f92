"""flash-attn-4 (CuTe DSL) as a kernel of packed attention.

Shapes: n packed queries · m packed keys · H query heads · Hkv key/value heads · K key dim ·
V value dim.

Its backward is called with the output and log-sum-exp over all keys of a query, which its public
functions do not take; hence the pinned version. Compiles a kernel a shape of heads, on first use.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from harts.ops.attention.packed import Kernel, attend_plainly, backward_plainly
from harts.ops.attention.pieces import PackedKeys, Speeds

VERSION = "4.0.0b36"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""(K, V) that are tested."""
CAPABILITY = 9
"""Major compute capability that is tested."""
_SEVERAL_BLOCKS = 256
"""A bound on lengths from which no kernel is specialized to a single block of rows."""


@cache
def why_not_installed() -> str | None:
    """Why it cannot be imported, as a clause; None when it can."""
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return "flash-attn-4 is not installed"
    if found != VERSION:
        return f"flash-attn-4 must be {VERSION}, whose internals are known, and is {found}"
    return None


def attend(
    query: Tensor, key: Tensor, value: Tensor, call: PackedKeys, scale: float, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[n, H, K], [m, Hkv, K], [m, Hkv, V] -> output [n, H, V], log-sum-exp [H, n] float32.

    Writes the output into the last argument, where there is one.
    """
    if not query.is_cuda:
        return attend_plainly(query, key, value, call, scale)
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=call.cu_queries,
        cu_seqlens_k=call.cu_keys,
        max_seqlen_q=max(call.max_queries, _SEVERAL_BLOCKS),
        max_seqlen_k=max(call.max_keys, _SEVERAL_BLOCKS),
        softmax_scale=scale,
        causal=call.causal,
        return_lse=True,
        out=into,
    )
    return out, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: PackedKeys,
    scale: float,
    into: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, the first in the last argument, where there is one.

    See `packed.attend_backward`.
    """
    if not query.is_cuda:
        return backward_plainly(grad, query, key, value, out, lse, call, scale)
    from flash_attn.cute.interface import _flash_attn_bwd

    found: tuple[Tensor, Tensor, Tensor] = _flash_attn_bwd(
        query,
        key,
        value,
        out,
        grad,
        lse,
        softmax_scale=scale,
        causal=call.causal,
        cu_seqlens_q=call.cu_queries,
        cu_seqlens_k=call.cu_keys,
        max_seqlen_q=max(call.max_queries, _SEVERAL_BLOCKS),
        max_seqlen_k=max(call.max_keys, _SEVERAL_BLOCKS),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=into,
    )
    return found


FLASH4 = Kernel(
    name="flash-attn-4",
    attend=attend,
    attend_backward=attend_backward,
    one_width=False,
    speeds=Speeds(score=4.5e-12),
    deterministic_speeds=Speeds(score=6e-12),
)
