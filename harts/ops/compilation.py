"""What is compiled, what is not, and which sizes the compiler may rely on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


@cache
def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The function under ``torch.compile``, for any number of rows.

    Modules keep the name of the backend and not what comes of it, so that copies and pickles of a
    model hold no other model's functions.
    """
    return torch.compile(function, dynamic=True, backend=backend)


def uncompiled(operator: Callable[..., Tensor], rows_dim: int = 0) -> Callable[..., Tensor]:
    """The operator, opaque to ``torch.compile``, which fuses what lies around it.

    The sizes of its output are known but for the rows: loops over channels of unknown number are
    three times slower.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(*args: Any, **kwargs: Any) -> Tensor:
        return only_rows_vary(operator(*args, **kwargs), rows_dim)

    return cast(Callable[..., Tensor], run)


def only_rows_vary(x: Tensor, rows_dim: int = 0) -> Tensor:
    """The same tensor, which ``torch.compile`` may take to have these sizes but for the rows."""
    for dim in range(x.dim()):
        if dim != rows_dim:
            torch._dynamo.mark_static(x, dim)
    return x
