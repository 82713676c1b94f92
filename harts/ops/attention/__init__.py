"""Full attention over a compact tree of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from harts.errors import InputError
from harts.ops.attention.cascade import attend_tree_cascade
from harts.ops.attention.dispatch import Backend, choose_backend
from harts.ops.attention.flash4 import FLASH4
from harts.ops.attention.mask import attend_tree_mask
from harts.ops.attention.reference import attend_tree
from harts.ops.attention.varlen import attend_tree_varlen
from harts.ops.tree_index import TreeIndex

__all__ = ["Backend", "choose_backend", "tree_attention"]

_FORMS: dict[Backend, Callable[[Tensor, Tensor, Tensor, TreeIndex, float], Tensor]] = {
    "reference": attend_tree,
    "cascade": attend_tree_cascade,
    "varlen": attend_tree_varlen,
    "flash-attn-4": partial(attend_tree_varlen, kernel=FLASH4),
    "mask": attend_tree_mask,
}


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    index: TreeIndex,
    scale: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Causal attention of each row to its own trajectory prefix (paper Eq. 21 and 22).

    A sequence of l own rows with h ancestors attends as l queries to h + l keys, aligned bottom
    right: query i sees entry j when j <= h + i. Multi-head (H == Hkv) and grouped-query attention;
    head h reads key/value head h // (H // Hkv). Positions are the caller's: apply rotary
    embeddings before.

    On a GPU, bfloat16 and float16 run FlashAttention on packed calls of bounded memory, or
    FlexAttention under a mask; the CPU has fused kernels too. `choose_backend` decides, and
    everything else runs the PyTorch form.

    Args:
        query: [R, H, K] rows. Padding rows of all three may hold anything.
        key: [R, Hkv, K] rows.
        value: [R, Hkv, V] rows; V may differ from K.
        index: the tree of rows.
        scale: multiplies the scores; K**-0.5 by default.
        backend: overrules the choice of form.

    Returns:
        [R, H, V] in the dtype of `query`, with float32 scores and sums (float64 for float64);
        padding rows are zero and get zero gradient. On a GPU two runs are bit-identical forward,
        and backward under `torch.use_deterministic_algorithms`.

    Raises:
        InputError: shapes or dtypes do not fit, or H is not a multiple of Hkv.
        UnsupportedError: `backend` cannot run these tensors.
    """
    _check(query, key, value, index)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    form = _FORMS[choose_backend(query, key, value, index=index, backend=backend)]
    return form(query, key, value, index, scale)


def _check(query: Tensor, key: Tensor, value: Tensor, index: TreeIndex) -> None:
    rows = index.rows
    if any(t.dim() != 3 or t.shape[0] != rows for t in (query, key, value)):
        raise InputError(
            f"tree_attention: query, key and value must be [R, heads, dim] with R = {rows} rows of "
            f"the index; got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        )
    if query.shape[2] != key.shape[2] or key.shape[1] != value.shape[1]:
        raise InputError(
            f"tree_attention: query and key must share K, key and value their heads; got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}."
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise InputError(
            f"tree_attention: query heads must be a multiple of key/value heads; got "
            f"{query.shape[1]} and {key.shape[1]}."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise InputError(
            f"tree_attention: query, key and value must share a dtype; got {query.dtype}, "
            f"{key.dtype}, {value.dtype}. Cast them before the call."
        )
