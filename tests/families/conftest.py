"""The zoo is imported by its own name. Worlds of ranks stay open for all tests of a file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from script import script

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return script("tools/equivalence.py")


@pytest.fixture(scope="module")
def open_worlds(tool: ModuleType) -> Iterator[object]:
    with tool.worlds() as found:
        yield found
