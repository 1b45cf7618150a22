"""Writing text whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from autopar.errors import InputError


def write_text(path: str | Path, text: str) -> int:
    """Write a file in place of another or none; its bytes. Raises `InputError` where it cannot be written."""
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
