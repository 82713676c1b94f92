"""Ways to get it wrong, each put in for one case, which must then differ from the truth."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def _multiplicity(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    from harts.megatron.packet import TreePacket

    right: Any = TreePacket.multiplicity
    wrong = property(lambda packet: change(right.fget(packet)))
    with mock.patch.object(TreePacket, "multiplicity", wrong):
        yield


@contextlib.contextmanager
def _neighbours_context(layer: str) -> Iterator[None]:
    """One rank of context parallelism reads the rows before each sequence in the pack."""
    from megatron.core import parallel_state

    module = importlib.import_module(f"harts.megatron.{layer}")
    right = module.tree_causal_convolution

    def wrong(x: torch.Tensor, weight: torch.Tensor, *, index: Any, **kwargs: Any) -> Any:
        if parallel_state.get_context_parallel_rank() == 1:
            rows = index.ancestor_rows.clone()
            for i, start in enumerate(index.sequence_offsets[:-1].tolist()):
                a, b = index.ancestor_offsets[i : i + 2].tolist()
                width = min(3, b - a, start)
                rows[b - width : b] = torch.arange(start - width, start)
            index = dataclasses.replace(index, ancestor_rows=rows)
        return right(x, weight, index=index, **kwargs)

    with mock.patch.object(module, "tree_causal_convolution", wrong):
        yield


@contextlib.contextmanager
def _others_plan() -> Iterator[None]:
    """The last stage gets the tree of the next slot, padded to as many rows."""
    import harts.megatron.engine as engine

    lay_out, build_layout = engine.MegatronEngine._lay_out, engine.build_layout

    def padded(*args: Any, row_multiple: int) -> Any:
        assert row_multiple == 1
        return build_layout(*args, row_multiple=512)

    def wrong(self: Any, step: Any, microbatch: Any, **kwargs: Any) -> Any:
        slot = lay_out(self, step, microbatch, **kwargs)
        if self.ranks.pp_rank == 1:
            own = step.plan.microbatches
            other = lay_out(self, step, own[(microbatch.slot + 1) % len(own)], **kwargs)
            right = slot.packet.tree
            # What reaches the loss stays its own: only the layers of this stage are misled.
            tree = dataclasses.replace(
                other.packet.tree, target_rows=right.target_rows, targets=right.targets
            )
            slot = dataclasses.replace(slot, packet=dataclasses.replace(slot.packet, tree=tree))
        return slot

    with (
        mock.patch.object(engine, "build_layout", padded),
        mock.patch.object(engine.MegatronEngine, "_lay_out", wrong),
    ):
        yield


@contextlib.contextmanager
def _others_keys() -> Iterator[None]:
    """Context parallelism hands every group of query heads the keys of the group before."""
    from harts.megatron.grouped_attention import TreeGroupedAttention

    right = TreeGroupedAttention._whole_rows

    def wrong(self: Any, query: Any, key: Any, value: Any) -> Any:
        return right(self, query, *(x.roll(1, 1) for x in (key, value)))

    with mock.patch.object(TreeGroupedAttention, "_whole_rows", wrong):
        yield


@contextlib.contextmanager
def _own_counts() -> Iterator[None]:
    """Each rank balances trajectories by the assignments of its own rows."""
    from harts.megatron.router import TreeRouter

    with mock.patch.object(TreeRouter, "_over_ranks", lambda _router, counts: counts):
        yield


MUTATIONS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "q ignored": lambda: _multiplicity(lambda q: q.clamp(max=1)),
    "padding counted": lambda: _multiplicity(lambda q: q.clamp(min=1)),
    "convolution context of a neighbour": lambda: _neighbours_context("kimi_delta_attention"),
    "Gated DeltaNet: convolution context of a neighbour": lambda: _neighbours_context(
        "gated_delta_net"
    ),
    "keys and values of another group": _others_keys,
    "trajectories balanced on each rank alone": _own_counts,
    "another microbatch's plan on a stage": _others_plan,
}
