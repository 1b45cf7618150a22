"""Writes a text file whole or not at all: a reader never meets half a file."""

import os
from contextlib import suppress
from pathlib import Path

from autopar.errors import InputError

NOT_WRITABLE = "cannot be written: name a file in a folder that exists and that you may write to"


def is_writable(path: str | os.PathLike[str]) -> bool:
    """Whether a file can be written as far as its folder shows, to know it before any work."""
    target = Path(path)
    return not target.is_dir() and os.access(target.parent, os.W_OK | os.X_OK)


def write_text(path: str | os.PathLike[str], text: str) -> int:
    """Write a file as UTF-8, in place of the file that stands there."""
    target, content = Path(path), text.encode("utf-8")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written: {error.strerror or error}; name a file in a folder that exists"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return len(content)
