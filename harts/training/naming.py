"""The nearest valid name, for messages about unknown ones."""

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name most like ``name``; the first in order where several are."""
    return max(sorted(valid), key=lambda v: difflib.SequenceMatcher(None, name, v).ratio())
