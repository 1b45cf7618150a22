"""Distributions of `torch.distributions` in a trace: their checks of arguments read values that a trace has not."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """A context in which distributions do not check their arguments, as with ``validate_args=False``."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
