"""Worlds of gloo ranks, started once and again after a test ended one. They end with the last test of this folder.

The folder `ranks` beside this file has the models and the functions that run on ranks.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "ranks"))  # ranks inherit it

from suites import SHORT

from autopar.runtime.distributed.launch import Ranks

MOST_THREADS = 3000  # of all open worlds
_open_worlds: dict[int, Ranks] = {}


@pytest.fixture(scope="session")
def worlds(pytestconfig: pytest.Config) -> Callable[[int], Ranks]:
    """The long tests compare collectives before they run. It takes a third of the time of ranks."""
    is_checked = pytestconfig.getoption("markexpr") != SHORT

    def of_size(size: int) -> Ranks:
        if size not in _open_worlds or not _open_worlds[size].is_open:
            _open_worlds[size] = Ranks(size, timeout_s=600, checked=is_checked)
        return _open_worlds[size]

    return of_size


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the worlds behind the last test of this folder, and behind a file that leaves them many process groups."""
    path = None if nextitem is None else nextitem.path
    is_last = path is None or Path(__file__).parent not in path.parents
    if is_last or (path != item.path and sum(map(_num_threads, _open_worlds.values())) > MOST_THREADS):
        while _open_worlds:
            _open_worlds.popitem()[1].close()


def _num_threads(world: Ranks) -> int:
    tasks = (Path(f"/proc/{process.pid}/task") for process in world._processes)
    return sum(len(list(task.iterdir())) for task in tasks if task.exists())


@pytest.fixture
def two_ranks(worlds: Callable[[int], Ranks]) -> Ranks:
    return worlds(2)


@pytest.fixture
def four_ranks(worlds: Callable[[int], Ranks]) -> Ranks:
    return worlds(4)
