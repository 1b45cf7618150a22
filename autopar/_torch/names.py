"""The error of a release of torch that lacks a private name: one line at import."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autopar.errors import InputError


@contextmanager
def private_names() -> Iterator[None]:
    """Imports of private names, which another release of torch may not have. Raises `InputError`."""
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"autopar does not work with torch {torch.__version__}: {error}; pip install 'torch>=2.13,<2.16'"
        ) from None
