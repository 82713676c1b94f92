"""Shape checks and the result record that every form of the gated delta rule shares.

Shapes: P packed rows of one call · Q sequences in a call · M requested boundary states ·
B chunk length · H query/key heads · G value heads · K key dim · V value dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from harts.errors import InputError

_INTEGERS = (torch.int32, torch.int64)


class DeltaRuleOutput(NamedTuple):
    """What one packed call returns (paper Eq. 16)."""

    output: Tensor
    """[P, G, V] in the dtype of `value`; zeros in rows after cu_seqlens[-1]."""

    final_state: Tensor
    """[Q, G, K, V] float32 (float64 for float64 inputs)."""

    boundary_states: Tensor
    """[M, G, K, V] float32 (float64 for float64 inputs), differentiable, in the order asked."""


def state_dtype(query: Tensor) -> torch.dtype:
    """Dtype of the carried state and of all arithmetic: float64 for float64, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def check_rows(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> None:
    """Refuse row tensors that are not [P,H,K], [P,H,K], [P,G,V], [P,G,K] or [P,G], [P,G].

    Raises:
        InputError: a shape does not fit, or G is not a multiple of H.
    """
    if query.dim() != 3 or key.shape != query.shape:
        raise InputError(
            f"delta rule: query and key must both be [P, H, K]; got query {tuple(query.shape)} and "
            f"key {tuple(key.shape)}. Drop the batch axis and pack the sequences along rows."
        )
    rows, heads, key_dim = query.shape
    if value.dim() != 3 or value.shape[0] != rows:
        raise InputError(
            f"delta rule: value must be [P, G, V] with P = {rows}; got {tuple(value.shape)}."
        )
    groups = value.shape[1]
    if heads == 0 or groups == 0 or groups % heads:
        raise InputError(
            f"delta rule: value heads G must be a multiple of query/key heads H; got G = {groups}, "
            f"H = {heads}."
        )
    if tuple(log_decay.shape) not in ((rows, groups), (rows, groups, key_dim)):
        raise InputError(
            f"delta rule: log_decay must be {(rows, groups, key_dim)} for KDA or {(rows, groups)} "
            f"for Gated DeltaNet; got {tuple(log_decay.shape)}."
        )
    if tuple(beta.shape) != (rows, groups):
        raise InputError(
            f"delta rule: beta must be [P, G] = {(rows, groups)}; got {tuple(beta.shape)}."
        )


def sequence_starts(cu_seqlens: Tensor, rows: int) -> list[int]:
    """Return `cu_seqlens` [Q+1] as integers; rows after the last entry are padding.

    Raises:
        InputError: not a rising integer vector from 0 to at most `rows`, or a sequence is empty.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in _INTEGERS:
        raise InputError(
            "delta rule: cu_seqlens must be an integer vector [Q+1] with Q >= 1; got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] > rows:
        raise InputError(
            f"delta rule: cu_seqlens must start at 0 and end at or before row {rows}; got "
            f"{starts[0]} and {starts[-1]}."
        )
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if end <= start:
            raise InputError(
                f"delta rule: sequence {sequence} has {end - start} rows (cu_seqlens {start} to "
                f"{end}); every sequence needs at least one. Leave empty sequences out of the call."
            )
    return starts


def check_initial_state(initial_state: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Refuse initial states that are not [Q, G, K, V].

    Raises:
        InputError: another shape came.
    """
    if tuple(initial_state.shape) != shape:
        raise InputError(
            f"delta rule: initial_state must be [Q, G, K, V] = {shape}; got "
            f"{tuple(initial_state.shape)}."
        )
