"""Outputs that recomputation takes from forward, where making them again would cost most."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

Outputs = tuple[Tensor, ...]
Context = AbstractContextManager[Any]


class _Call(NamedTuple):
    outputs: Outputs
    versions: tuple[int, ...]
    """Of the outputs, as they were given."""

    def taken(self) -> Outputs | None:
        """The outputs; None where somebody has written over one of them since."""
        if any(x._version != v for x, v in zip(self.outputs, self.versions, strict=True)):
            return None
        return tuple(x.detach() for x in self.outputs)


class _Scope:
    """A context that can be entered again, since backward may run twice through one graph."""

    def __init__(self, calls: list[_Call], inner: Context, *, recomputes: bool) -> None:
        self.calls = calls
        self.recomputes = recomputes
        self.position = 0
        """The next call, in recomputation."""
        self._inner = inner
        self._outside: _Scope | None = None

    def __enter__(self) -> None:
        self.position = 0
        self._outside = _current.get()
        _current.set(self)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _current.set(self._outside)
        self._outside = None


_current: ContextVar[_Scope | None] = ContextVar("kept_outputs", default=None)


def keep_outputs(scope: Context | None = None) -> tuple[Context, Context]:
    """Contexts of one checkpointed region, for `torch.utils.checkpoint`: forward, recomputation.

    What `kept` calls give inside the first is taken inside the second. ``scope`` is entered around
    recomputations as well.
    """
    # The list is all that they share: it holds neither, so it goes when their graph goes.
    calls: list[_Call] = []
    return (
        _Scope(calls, nullcontext(), recomputes=False),
        _Scope(calls, scope or nullcontext(), recomputes=True),
    )


def kept(compute: Callable[[], Outputs]) -> Outputs:
    """``compute()``, or in recomputation what this call gave in forward.

    Call it inside the forward of an ``autograd.Function``, with a ``compute`` that gives the same
    numbers each time. Outside the contexts of `keep_outputs` it only calls ``compute``.
    """
    scope = _current.get()
    if scope is None:
        return compute()
    if scope.recomputes:
        call = scope.calls[scope.position]
        scope.position += 1
        found = call.taken()
        return compute() if found is None else found
    outputs = compute()
    # Detached: an output that autograd knows would hold its own graph.
    detached = tuple(x.detach() for x in outputs)
    scope.calls.append(_Call(detached, tuple(x._version for x in detached)))
    return outputs
