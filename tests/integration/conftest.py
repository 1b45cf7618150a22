"""Worlds of gloo ranks, started once and again after a test ended one. They end with the last test of this folder.

The folder `ranks` beside this file has the models and the functions that run on ranks. One process captures a program,
and the others read it.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "ranks"))  # ranks inherit it

from autopar.runtime.distributed.launch import Ranks


@pytest.fixture(scope="session", autouse=True)
def captures() -> Iterator[None]:
    """A folder for captured programs, named in the environment that ranks inherit (`shared_captures`)."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_TEST_CAPTURES"] = folder
        yield
        del os.environ["AUTOPAR_TEST_CAPTURES"]


_open_worlds: dict[int, Ranks] = {}


@pytest.fixture(scope="session")
def worlds() -> Callable[[int], Ranks]:
    def of_size(size: int) -> Ranks:
        if size not in _open_worlds or not _open_worlds[size].is_open:
            _open_worlds[size] = Ranks(size, timeout_s=100)
        return _open_worlds[size]

    return of_size


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the worlds behind the last test of this folder: the process groups of idle ranks poll 100 times a second."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        while _open_worlds:
            _open_worlds.popitem()[1].close()


@pytest.fixture
def two_ranks(worlds: Callable[[int], Ranks]) -> Ranks:
    return worlds(2)


@pytest.fixture
def four_ranks(worlds: Callable[[int], Ranks]) -> Ranks:
    return worlds(4)
