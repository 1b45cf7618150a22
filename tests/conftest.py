"""Settings of every test: one thread, no network, reproducible draws, long files first. It does not import torch."""

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "tiny"))  # models, comparisons and `suites` are imported by their own names
# Files of minutes, and folders of such, the longest first: one that a worker takes last keeps the others waiting.
SHORT = "not long"  # the tests of `make test`, as pyproject.toml has it
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # one process runs files in the order that it was given
        items.sort(key=lambda item: _place(item.path.as_posix().removeprefix(f"{HERE.as_posix()}/")))


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

# With a handler, as pytest's log capture adds one, torch records every tensor it describes, and its stack.
if "TORCH_TRACE" not in os.environ:
    logging.getLogger("torch.__trace").addHandler = lambda hdlr: None

# Captures are not kept from one session to the next, nor in the folder of whoever runs the tests.
_captures = tempfile.mkdtemp(prefix="autopar-captures-")
os.environ["AUTOPAR_CACHE_DIR"] = _captures
atexit.register(shutil.rmtree, _captures, ignore_errors=True)

if "AUTOPAR_TEST_CAPTURES" not in os.environ:  # else this is a worker
    os.environ["AUTOPAR_TEST_CAPTURES"] = tempfile.mkdtemp(prefix="autopar-test-captures-")
    atexit.register(shutil.rmtree, os.environ["AUTOPAR_TEST_CAPTURES"], ignore_errors=True)

if "torch" in sys.modules:  # a plugin was earlier: the environment comes too late
    sys.modules["torch"].set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """The short suite draws the same examples every time. The long tests draw others, unless CI runs them."""
    try:
        import hypothesis
    except ModuleNotFoundError:  # the bare-core run has no hypothesis
        return
    is_fixed = config.getoption("markexpr") == SHORT or bool(os.environ.get("CI"))
    hypothesis.settings.register_profile("autopar", deadline=None, derandomize=is_fixed, print_blob=is_fixed)
    hypothesis.settings.load_profile("autopar")
