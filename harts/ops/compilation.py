"""What is compiled, what is not, and which sizes the compiler may rely on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Output = TypeVar("_Output", Tensor, tuple[Tensor, ...])
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_no_kernel(*rows: Tensor) -> str | None:
    """Why a kernel of ours cannot run on these, as a clause; None when it can."""
    for x in rows:
        if not x.is_cuda:
            return f"rows are on {x.device}, not on a GPU"
        if x.dtype not in _KERNEL_DTYPES:
            return f"rows are {x.dtype}, not bfloat16, float16 or float32"
    return "triton is not installed" if find_spec("triton") is None else None


@cache
def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The function under ``torch.compile``, for any number of rows.

    Modules keep the name of the backend and not what comes of it, so that copies and pickles of a
    model hold no other model's functions.
    """
    return torch.compile(function, dynamic=True, backend=backend)


def uncompiled(operator: Callable[..., _Output], rows_dim: int = 0) -> Callable[..., _Output]:
    """The operator, opaque to ``torch.compile``, which fuses what lies around it.

    The sizes of its one or several outputs are known but for the rows: loops over channels of
    unknown number are three times slower.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(*args: Any, **kwargs: Any) -> _Output:
        output = operator(*args, **kwargs)
        for x in (output,) if isinstance(output, Tensor) else output:
            only_rows_vary(x, rows_dim)
        return output

    return cast(Callable[..., _Output], run)


def only_rows_vary(x: Tensor, rows_dim: int = 0) -> Tensor:
    """The same tensor, which ``torch.compile`` may take to have these sizes but for the rows."""
    for dim in range(x.dim()):
        if dim != rows_dim:
            torch._dynamo.mark_static(x, dim)
    return x
