"""Without the extras (spmd_types, matplotlib ...): the bare-core run of `.ci/run` runs this file.

One package of the core is taken away too: own models need no transformers.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("transformers", "spmd_types", "matplotlib", "hypothesis")
WITHOUT_EXTRAS = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"  # importing one raises


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + program, *arguments],
        cwd=ROOT / "examples",
        env=environment,
        capture_output=True,
        text=True,
    )


def autopar(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from autopar.cli import main; main()", *arguments)


def test_every_module_imports() -> None:
    result = python(
        "import importlib, pkgutil, autopar\n"
        "for module in pkgutil.walk_packages(autopar.__path__, 'autopar.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
    )
    assert result.returncode == 0, result.stderr


def test_public_names() -> None:
    result = python("import autopar\nfor name in autopar.__all__: getattr(autopar, name)")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["models", "clusters"])
def test_listings(command: str) -> None:
    assert autopar(command).returncode == 0


@pytest.mark.skipif(find_spec("transformers") is None, reason="the environment lacks a package of the core")
def test_presets_need_no_extra() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "autopar", "plan", "gpt2", "-c", "4xcpu", "--layers", "2", "--hidden", "64"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_presets_say_what_they_need() -> None:
    result = autopar("plan", "gpt2", "--cluster", "4xcpu")
    assert result.returncode == 2
    assert "pip install 'transformers>=5.4,<6'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_chart_says_which_extra_it_needs(tmp_path: Path) -> None:
    result = autopar("capacity", "h100", "--chart", str(tmp_path / "chart.svg"))
    assert result.returncode == 2
    assert "pip install 'matplotlib>=3.11,<4'" in result.stderr


def test_own_module_is_planned() -> None:
    result = autopar("plan", "bring_your_own_model:factory", "--cluster", "4xcpu", "--tp", "2")
    assert result.returncode == 0, result.stderr
    assert "tp 2 × dp_shard 2 = 4 ranks" in result.stdout


@pytest.mark.long
def test_own_module_is_verified() -> None:
    command = ("verify", "bring_your_own_model:factory", "--world-size", "2", "--tp", "2", "--steps", "2")
    result = subprocess.run(
        [sys.executable, "-m", "autopar", *command], cwd=ROOT / "examples", capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout
