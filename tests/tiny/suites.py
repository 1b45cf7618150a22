"""Which cases of a parametrised test the short suite runs.

`make test` leaves out every case with the marker `long`, `make test-all` runs all cases. CONTRIBUTING.md says which
cases are long, and why.
"""

from collections.abc import Iterable
from typing import Any

import pytest

SHORT = "not long"  # the tests of `make test`, as pyproject.toml has it


def long(*arguments: Any) -> Any:
    """One case of `pytest.mark.parametrize` that only `make test-all` runs."""
    return pytest.param(*arguments, marks=pytest.mark.long)


def thinned(values: Iterable[Any], *, keep: Iterable[Any]) -> list[Any]:
    """All `values` for `pytest.mark.parametrize`; the values that are not in `keep` are long.

    A tuple stands for several arguments.
    """
    every, kept = list(values), list(keep)
    unknown = [value for value in kept if value not in every]
    assert not unknown, f"not among the values: {unknown}"
    return [v if v in kept else long(*(v if isinstance(v, tuple) else (v,))) for v in every]
