"""What linear-attention layers of several families share: their rows through the tree operators.

Shapes: R physical rows · D model width · H query/key heads · G value heads · K key dim ·
V value dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts.ops.compilation import compiled, uncompiled
from harts.ops.convolution import tree_causal_convolution
from harts.ops.delta_rule import tree_delta_rule
from harts.ops.heads import normalised_heads
from harts.ops.tree_index import TreeIndex

_delta_rule = uncompiled(tree_delta_rule)


@uncompiled
def _convolved_heads(
    layer: Any, mixed: Tensor, tree: TreeIndex, **sizes: int
) -> tuple[Tensor, ...]:
    """[R, 2 H K + G V] projections through the layer's convolution, as query, key and value."""
    convolved = tree_causal_convolution(
        mixed,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        index=tree,
        activation=layer.activation,
    )
    return normalised_heads(convolved, **sizes)


class TreeLayer(nn.Module):
    """Put before a library's layer class: with ``tree`` the layer runs compact rows.

    Without, its forward is the library's own, so the model generates as before.
    """

    backend: str | None = None
    """Of ``torch.compile``, where the layer runs compiled; a name, so that copies run their own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, tree: TreeIndex | None = None, **kwargs: Any
    ) -> Tensor:
        """Run the layer on [1, R, D]."""
        if tree is None:
            alone: Tensor = super().forward(hidden_states, *args, **kwargs)
            return alone
        if self.backend is None:
            return self.on_tree(hidden_states, tree)
        output: Tensor = compiled(type(self).on_tree, self.backend)(self, hidden_states, tree)
        return output

    def on_tree(self: Any, hidden: Tensor, tree: TreeIndex) -> Tensor:
        """The library's layer on the rows of a tree: [1, R, D] to [1, R, D]."""
        raise NotImplementedError


def kimi_delta_attention(
    layer: Any, hidden: Tensor, tree: TreeIndex, lowest_log_decay: float | None = None
) -> Tensor:
    """KDA of a library layer on hidden [1, R, D], before its output norm: [R, H, V].

    ``layer`` names its parts q_proj, k_proj, v_proj, conv1d, forget_gate and b_proj, as the
    library's KDA layers do. ``lowest_log_decay`` is what its gate promises.
    """
    rows = hidden[0]
    mixed = side_by_side(rows, layer.q_proj, layer.k_proj, layer.v_proj)
    heads, dim = layer.num_heads, layer.head_dim
    query, key, value = _convolved_heads(
        layer, mixed, tree, heads=heads, key_dim=dim, groups=heads, value_dim=dim
    )
    return _delta_rule(
        query,
        key,
        value,
        layer.forget_gate(hidden)[0],
        torch.sigmoid(layer.b_proj(rows)),
        index=tree,
        lowest_log_decay=lowest_log_decay,
    ).to(rows.dtype)


def gated_delta_net(
    layer: Any, mixed: Tensor, decay: Tensor, beta: Tensor, tree: TreeIndex
) -> Tensor:
    """Gated DeltaNet of a library layer, before its output norm: [R, G, V].

    Args:
        layer: names its parts conv1d, A_log and dt_bias, as the library's layers do.
        mixed: [R, 2 H K + G V] query, key and value projections, before the convolution.
        decay: [R, G] projection from which the log decay is made.
        beta: [R, G] step size.
        tree: the tree whose rows these are.
    """
    query, key, value = _convolved_heads(
        layer,
        mixed,
        tree,
        heads=layer.key_dim // layer.head_k_dim,
        key_dim=layer.head_k_dim,
        groups=layer.value_dim // layer.head_v_dim,
        value_dim=layer.head_v_dim,
    )
    return _delta_rule(
        query,
        key,
        value,
        -layer.A_log.float().exp() * F.softplus(decay.float() + layer.dt_bias),
        beta,
        index=tree,
    ).to(value.dtype)


def side_by_side(rows: Tensor, *projections: nn.Module) -> Tensor:
    """[R, D] through several projections, joined over the last dim.

    Plain matrices without a bias become one product; adapted or hooked ones run on their own.
    """
    if all(type(p) is nn.Linear and p.bias is None and not _hooked(p) for p in projections):
        return F.linear(rows, torch.cat([p.weight for p in projections]))  # type: ignore[misc]
    return torch.cat([p(rows) for p in projections], dim=-1)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def normalised_output(norm: nn.Module, output: Tensor, gate: Tensor) -> Tensor:
    """The library's gated norm of [R, G, V] by a gate of as many numbers, as [1, R, G V]."""
    normalised: Tensor = norm(output.flatten(0, 1), gate.reshape(-1, output.shape[-1]))
    return normalised.view(1, output.shape[0], -1)
