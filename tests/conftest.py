"""Settings of every test: one thread, no network, reproducible draws, long files first. It does not import torch."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

# Models, comparisons and `suites` are imported by their own names.
sys.path.insert(0, str(Path(__file__).parent / "tiny"))
sys.path.append(str(Path(__file__).parents[1] / "tools"))

from cpu_seconds import CpuSeconds
from fifths import is_in_fifth
from kept_captures import COLD, FOLDER, keeping
from suites import SHORT

HERE = Path(__file__).parent

# Files of minutes, and folders of such, the longest first: one that a worker takes last keeps the others waiting.
LONG_FIRST = (
    "integration/test_pipelines.py",
    "families/test_gloo.py",
    "examples",
    "random_programs",
    "cost_model/work/test_export.py",
    "integration",
    "families",
    "runtime",
    "testing",
    "search",
    "cli",
    "cost_model",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fifth", metavar="COMMIT", help="run the fifth of the tests that a commit's hash chooses")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if commit := config.getoption("fifth"):
        items[:] = [item for item in items if is_in_fifth(item.nodeid, commit)]
    if "PYTEST_XDIST_WORKER" in os.environ:  # one process runs files in the order that it was given
        items.sort(key=lambda item: _place(_relative(item.path)))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # else each collection walks all modules
    gc.set_threshold(10_000, 10, 50)  # full collections were a twelfth of the time


def _relative(path: Path) -> str:
    return path.as_posix().removeprefix(f"{HERE.as_posix()}/")


def _place(path: str) -> int:
    return next((i for i, name in enumerate(LONG_FIRST) if path.startswith(name)), len(LONG_FIRST))


# A job in the background ignores Ctrl-C, and one of `nohup` its terminal's end. So would the processes that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Before torch or transformers are imported, here or in the processes a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Captures are kept for the next run of the tests, and not in the folder of whoever runs them.
os.environ.setdefault(FOLDER, str(Path.home() / ".cache" / "autopar-tests"))
os.environ["AUTOPAR_CACHE_DIR"] = os.environ[FOLDER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with nullcontext() if _relative(item.path).startswith(COLD) else keeping():
        return (yield)


if "torch" in sys.modules:  # a plugin was earlier: the environment comes too late
    sys.modules["torch"].set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """The short suite draws the same examples every time. The long tests draw others; CI, those of the commit."""
    commit = config.getoption("fifth")
    is_whole = config.args_source is config.ArgsSource.TESTPATHS and not config.getoption("keyword")
    config.pluginmanager.register(CpuSeconds(is_whole and config.getoption("markexpr") == SHORT))
    try:
        import hypothesis
    except ModuleNotFoundError:  # the bare-core run has no hypothesis
        return
    is_fixed = config.getoption("markexpr") == SHORT or (bool(os.environ.get("CI")) and not commit)
    if commit:
        config.option.hypothesis_seed = commit
    hypothesis.settings.register_profile("autopar", deadline=None, derandomize=is_fixed, print_blob=is_fixed)
    hypothesis.settings.load_profile("autopar")
