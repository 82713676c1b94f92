"""Library layers in the library's own PyTorch, whatever faster packages are installed.

Where ``fla`` or ``causal_conv1d`` can be imported, linear-attention layers call them, on any
device and in any precision. Neither runs on the CPU or keeps the digits of float64.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn


class OwnForms:
    """The layers of a model that may call such packages, and how they run without."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards = [
            (module, MethodType(plain, module))
            for module in model.modules()
            if (plain := _in_pytorch(type(module))) is not None
        ]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, this model's layers, and no other model's, run in PyTorch."""
        try:
            for module, forward in self._forwards:
                module.forward = forward
            yield
        finally:
            for module, _ in self._forwards:
                module.__dict__.pop("forward", None)


def _in_pytorch(layer: type[nn.Module]) -> Any:
    """The forward of a layer with the library's PyTorch functions; None where it calls no other.

    A function that may call a package wraps the one of the layer's own file that it stands for.
    """
    forward = inspect.unwrap(layer.forward)
    if not isinstance(forward, FunctionType):
        return None
    called: dict[str, Any] = {
        name: forward.__globals__.get(name) for name in forward.__code__.co_names
    }
    own = {
        name: function.__wrapped__
        for name, function in called.items()
        if hasattr(function, "__wrapped__") and function.__module__ == forward.__module__
    }
    if not own:
        return None
    plain = FunctionType(
        forward.__code__,
        {**forward.__globals__, **own},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    plain.__kwdefaults__ = forward.__kwdefaults__
    return plain
