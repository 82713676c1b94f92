"""Compiled forms of functions, one for each, however many modules and copies of them use it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The function under ``torch.compile``, for any number of rows.

    Modules keep the name of the backend and not what comes of it, so that copies and pickles of a
    model hold no other model's functions.
    """
    return torch.compile(function, dynamic=True, backend=backend)
