"""Captures that the tests keep from one run to the next, for all processes: `make clean` removes them.

The ranks of a world, and the scripts of `tests/tiny/forked.py`, read and keep them too.

A file is named by the hash that autopar keeps captures of users under (`autopar.cache.reachable`), without the files
that happen to be loaded: the code of all functions that a model reaches is in the hash. So are the sources of autopar
that capture. Files of packages count by version and not by time, because every clone has an environment of its own.
The tests in `COLD` capture anew.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

FOLDER = "AUTOPAR_TEST_CAPTURES"
MODULES = (
    "capture.program",
    "capture.any_size",
    "cache.programs",
    "cache.reachable",
    "planning.estimate",
    "runtime.distributed.launch",
)
COLD = ("cache", "families/test_one_process.py", "test_core_only.py")

_until_it_ends = ExitStack()  # a context that nobody holds would be left at once


@contextmanager
def keeping() -> Iterator[None]:
    """Read what is captured, and keep it."""
    program, any_size, programs, reachable, estimate, launch = (
        importlib.import_module(f"autopar.{name}") for name in MODULES
    )
    folder, twice, whole = Path(os.environ[FOLDER]), program.capture_twice, any_size.capture
    begin = launch.Ranks.__init__

    def kept_twice(request: Any, batch: int | None = None) -> Any:
        """In place of `capture_twice`. Its callers outside of `any_size` take the program alone."""
        kept = programs._kept(
            replace(request, folder=folder), batch, "twice", programs._read_program, programs._program_text,
            lambda: twice(request, batch).program, lambda found: found.decisions,
        )  # fmt: skip
        return SimpleNamespace(program=kept)

    @wraps(whole)
    def kept_whole(request: Any, batch: int | None = None) -> Any:
        with mock.patch.object(programs, "capture", lambda _, batch: whole(request, batch)):
            return programs.kept_capture(replace(request, folder=folder), batch)

    def begin_keeping(world: Any, *arguments: Any, **options: Any) -> None:
        begin(world, *arguments, **options)
        world.run("kept_captures:keep", str(folder))

    with ExitStack() as patches:
        for module, name, function in (
            (program, "capture_twice", kept_twice),
            (programs, "capture", kept_whole),
            (estimate, "capture", kept_whole),
            (any_size, "capture", kept_whole),
            (reachable, "own_files", tuple),
            (reachable, "_stamp", lambda file: ""),
            (launch.Ranks, "__init__", begin_keeping),
        ):
            patches.enter_context(mock.patch.object(module, name, function))
        yield


@contextmanager
def capturing() -> Iterator[None]:
    """Capture anew inside of `keeping`."""
    program, any_size = (importlib.import_module(f"autopar.capture.{name}") for name in ("program", "any_size"))
    programs, whole = importlib.import_module("autopar.cache.programs"), any_size.capture.__wrapped__
    with (
        mock.patch.object(program, "capture_twice", any_size.capture_twice),
        mock.patch.object(programs, "capture", whole),
        mock.patch.object(any_size, "capture", whole),
    ):
        yield


def keep(rank: int, folder: str) -> None:
    """Read and keep captures in a process, until it ends."""
    os.environ[FOLDER] = folder
    _until_it_ends.enter_context(keeping())
