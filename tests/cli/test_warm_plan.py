"""`autopar plan` from a kept capture imports nothing that it does not need."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from suites import long

DISTRIBUTED = ("torch.distributed.pipelining", "torch.distributed.tensor")
OWN = (
    *("capture.program", "capture.export.export", "capture.record.write", "search.labels.solve", "search.labels.costs"),
    *("cost_model.work.export", "cost_model.work.autograd_probe", "report.block_graph", "cli.calibrate", "cli.verify"),
)
SLOW = (
    *("transformers", "sympy", "highspy", "torch._dynamo", "torch._inductor"),
    *DISTRIBUTED,
    *(f"autopar.{name}" for name in OWN),
)
MODEL = ["plan", "gpt2", "--layers", "4", "--hidden", "64", "--seq-len", "64", "--global-batch", "64", "-c", "16xh100"]
PROGRAM = """
import sys
from autopar.cli import main
unwanted = set(sys.argv.pop(1).split())
try:
    main()
finally:
    print("imported", *sorted(unwanted & set(sys.modules)), file=sys.stderr)
"""


def imported(folder: Path, unwanted: tuple[str, ...], *options: str) -> str:
    """Which of some modules a plan in a process of its own imports."""
    command = [sys.executable, "-c", PROGRAM, " ".join(unwanted), *MODEL, *options]
    environment = os.environ | {"AUTOPAR_CACHE_DIR": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with what a first plan keeps. The names of the modules that it imports are known to be right."""

    @cache
    def of(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("kept")
        wanted = ("autopar.capture.program", "autopar.search.labels.solve", "torch", "transformers")
        assert imported(folder, wanted, *options).split() == ["imported", *wanted]
        return folder

    return of


@pytest.mark.parametrize(
    "options, unwanted",
    [
        long(("--fix", "pp=2", "--fix", "schedule=interleaved-zero-bubble,zbv-zero-bubble"), SLOW),
        long(("--fix", "pp=2", "--trials", "0"), (*SLOW, "optuna", "sqlalchemy")),
        (("--fix", "pp=1"), (*SLOW, "optuna", "sqlalchemy")),
    ],
    ids=["zero-bubble", "no-trials", "no-pipeline"],
)
def test_from_a_kept_capture(
    kept: Callable[..., Path], tmp_path: Path, options: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    shutil.copytree(kept(*options), tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "plans")
    assert imported(tmp_path, unwanted, *options) == "imported"


def test_from_a_kept_search(kept: Callable[..., Path]) -> None:
    options = ("--fix", "pp=1")
    unwanted = (
        *SLOW,
        "torch",
        "scipy",
        "optuna",
        "autopar.planning.search",
        "autopar.planning.fixed",
        "autopar.capture.record.captured",
    )
    assert imported(kept(*options), unwanted, *options) == "imported"
