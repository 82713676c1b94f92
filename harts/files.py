"""Text files that are written whole or not at all, and refused before work is spent on them."""

import os
from pathlib import Path

from harts.errors import InputError


def replace_text(path: Path, text: str, what: str) -> None:
    """Write `text` under a temporary name in the same folder, then rename it to `path`.

    Args:
        path: the file to make or to replace.
        text: its whole content.
        what: what it is, for the error: "the plan".

    Raises:
        InputError: the file cannot be written; an older file of this name is left as it was.
    """
    temporary = _temporary(path, what)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise _cannot_write(path, what, error) from error
    finally:
        _remove(temporary)


def check_writable(path: Path, what: str) -> None:
    """Refuse a file that `replace_text` could not write; call it before a long computation.

    Raises:
        InputError: the path is a directory, or nothing can be made in its folder.
    """
    temporary = _temporary(path, what)
    try:
        temporary.touch()
    except OSError as error:
        raise _cannot_write(path, what, error) from error
    finally:
        _remove(temporary)


def _temporary(path: Path, what: str) -> Path:
    if path.is_dir():
        raise InputError(f"cannot write {what} to {path}: it is a directory. Name a file in it.")
    return path.with_name(f".{path.name}.{os.getpid()}")


def _remove(temporary: Path) -> None:
    try:
        temporary.unlink(missing_ok=True)
    except OSError:
        return  # a folder that is none, of which the caller is told


def _cannot_write(path: Path, what: str, error: OSError) -> InputError:
    return InputError(
        f"cannot write {what} to {path}: {error.strerror}. Name a file in a folder that exists and "
        "may be written to."
    )
