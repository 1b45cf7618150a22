"""The command line as a process: its status and all of its output arrive, though the process ends in a hurry."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from suites import long

FINISHES = """
import atexit, sys
from autopar.cli import run
def outside():
    try:
        run()
    finally:
        atexit.register(print, "what was registered later ran")
sys.argv = ["autopar", *sys.argv[1:]]
outside()
"""


def started(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "status"), [(["models", "--json"], 0), (["plan", "lama3-8b", "-c", "4xcpu"], 2), (["models", "-x"], 2)]
)
def test_status_and_output(words: list[str], status: int) -> None:
    found = started("-m", "autopar", *words)
    assert found.returncode == status
    assert json.loads(found.stdout) if status == 0 else "autopar" in found.stderr


def test_what_others_left_for_the_end_runs() -> None:
    found = started("-c", FINISHES, "clusters")
    assert found.returncode == 0
    assert found.stderr.endswith("what was registered later ran\n")  # stdout is the command's own


def test_an_error_outside_of_a_command_is_shown() -> None:
    broken = "import autopar.cli.app as app; from autopar.cli import run; del app.COMMANDS; run()"
    found = started("-c", broken)
    assert found.returncode == 1
    assert "NameError" in found.stderr


def test_a_reader_that_leaves() -> None:
    command = f"{sys.executable} -m autopar models --json | head -c 10"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert len(found.stdout) == 10
    assert "Traceback" not in found.stderr


def test_an_interrupt_while_modules_are_imported() -> None:
    found = started("-c", "import autopar.cli as cli\ndef main(): raise KeyboardInterrupt\ncli.main = main\ncli.run()")
    assert (found.returncode, found.stderr) == (130, "autopar: interrupted\n")


ENDED = """
import os, signal, autopar.cli as cli
def main():
    from autopar.runtime.distributed import launch
    launch.PRELOADED = ()
    with launch.Ranks(1):
        os.kill(os.getpid(), signal.{signal})
        signal.pause()
cli.main = main
cli.run()
"""


@pytest.mark.parametrize("name", ["SIGTERM", long("SIGHUP")])
def test_a_command_that_is_ended_leaves_no_ranks_and_no_folders(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # shorter than tmp_path: names of sockets have a limit
        environment = os.environ | {"TMPDIR": folder}
        found = subprocess.run([sys.executable, "-c", ENDED.format(signal=name)], env=environment, capture_output=True)
        assert found.returncode == 128 + signal.Signals[name], found.stderr
        assert not list(Path(folder).glob("autopar-ranks-*")) + list(Path(folder).glob("pymp-*"))
        marks = [file for file in Path("/proc").glob("[0-9]*/environ") if f"TMPDIR={folder}".encode() in _content(file)]
        assert not marks


SENT = """
from autopar.runtime.distributed import launch
launch.PRELOADED = ()
with launch.Ranks(1) as world:
    print(world.run("torch:arange", 5))
"""


def test_a_rank_that_sends_a_tensor_leaves_no_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TMPDIR": folder}
        found = subprocess.run(
            [sys.executable, "-c", SENT], env=environment, capture_output=True, text=True, check=True
        )
        assert "[0, 1, 2, 3, 4]" in found.stdout
        assert not [*Path(folder).glob("autopar-ranks-*"), *Path(folder).glob("pymp-*")]


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
