"""Settings of every test, so that none depends on how the run was started or on the tests before it.

One thread, no network, known draws, a terminal of known width, time for a busy machine, long files first. It does not
import torch.
"""

import atexit
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "tiny"))  # models, comparisons and `suites` are imported by their own names
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


PATIENCE = 5  # times the seconds of an idle machine, which the marks and pyproject.toml state


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)
    if "PYTEST_XDIST_WORKER" in os.environ:  # one process runs files in the order that it was given
        items.sort(key=lambda item: _place(item.path.as_posix().removeprefix(f"{HERE.as_posix()}/")))


def _place(path: str) -> int:
    return next((i for i, name in enumerate(LONG_FIRST) if path.startswith(name)), len(LONG_FIRST))


def pytest_configure(config: pytest.Config) -> None:
    """Property tests draw from a fixed seed, unless the long tests are run too: then each run draws anew."""
    try:
        import hypothesis
    except ModuleNotFoundError:  # the bare-core run has no hypothesis
        return
    is_short = config.option.markexpr == "not long"
    hypothesis.settings.register_profile("autopar", deadline=None, derandomize=is_short, print_blob=True)
    hypothesis.settings.load_profile("autopar")


def _seed() -> None:
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if (found := sys.modules.get(name)) is not None:
            for part in seed.split("."):
                found = getattr(found, part)
            found(0)  # type: ignore[operator]


def pytest_collectstart(collector: Any) -> None:
    _seed()  # what a module draws at import does not depend on the modules before it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed()  # what a test draws does not depend on the tests before it


# Before torch or transformers are imported, here or in the processes a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# However the run was started: from a terminal, in the background, in a job, or by a service.
os.environ.update(COLUMNS="160", LINES="50", TERM="xterm")
_STARTED_BY = (
    *("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"),
    *("TTY_INTERACTIVE", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "AUTOPAR_DEBUG", "TORCH_LOGS"),
    *("TORCH_DISTRIBUTED_DEBUG", "TRANSFORMERS_VERBOSITY", "XDG_CACHE_HOME"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "SLURM_STEP_NUM_TASKS",
)
for _name in _STARTED_BY:
    os.environ.pop(_name, None)
try:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell ignores it for background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
except ValueError:  # not in the main thread
    pass

# With a handler, as pytest's log capture adds one, torch records every tensor it describes, and its stack.
if "TORCH_TRACE" not in os.environ:
    logging.getLogger("torch.__trace").addHandler = lambda hdlr: None

# Captures are not kept from one session to the next, nor in the folder of whoever runs the tests.
_captures = tempfile.mkdtemp(prefix="autopar-captures-")
os.environ["AUTOPAR_CACHE_DIR"] = _captures
atexit.register(shutil.rmtree, _captures, ignore_errors=True)

if "torch" in sys.modules:  # a plugin was earlier: the environment comes too late
    sys.modules["torch"].set_num_threads(1)
