"""Captures of users' models, kept by `autopar.cache.store` under the hash of all that they depend on (`reachable`).

A program whose branches the inputs decided is not kept, and neither is that of a model which its capture changes.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from autopar.cache.reachable import request_digest
from autopar.cache.store import KeptFile, capture_versions, kept_file
from autopar.capture import program as exact
from autopar.capture.any_size import capture
from autopar.capture.record.captured import Capture
from autopar.capture.record.file import capture_text, from_bytes, open_capture, to_bytes
from autopar.capture.record.write import Unexplained
from autopar.capture.request import Request
from autopar.errors import InputError
from autopar.ir.program import Program

_T = TypeVar("_T", Program, Capture)
_logger = logging.getLogger("autopar")


def kept_program(request: Request, batch: int) -> Program:
    """The program of a request at a batch, captured or read."""

    def captured() -> Program:
        return capture(request).at(batch=1) if batch == 1 else exact.capture_twice(request, batch).program

    return _kept(request, batch, "program", _read_program, _program_text, captured, lambda program: program.decisions)


def kept_capture(request: Request, batch: int | None) -> Capture:
    """The capture of a request for any batch, captured at `batch` or at that of its inputs, or read."""

    def read(path: Path) -> Capture:
        captured: Capture = open_capture(path)[1]()
        return replace(captured, again=lambda size: exact.capture_twice(request, size).program)

    def make() -> Capture:
        return capture(request, batch)

    text = partial(capture_text, about={})
    kept: Capture = _kept(request, batch, "capture", read, text, make, _decisions)
    return kept


def _kept(
    request: Request,
    batch: int | None,
    what: str,
    read: Callable[[Path], _T],
    text: Callable[[_T], str],
    make: Callable[[], _T],
    decisions: Callable[[_T], Iterable[Any]],
) -> _T:
    file = _file(request, batch, what)
    if file is None:
        return make()
    kept = file.read(read, _logger.warning)
    if kept is not None:
        return kept
    captured = make()
    if _file(request, batch, what) == file and not any(each.inputs for each in decisions(captured)):
        with suppress(Unexplained, InputError):  # no record can hold it
            file.write(text(captured), _logger.warning)
    return captured


def _file(request: Request, batch: int | None, what: str) -> KeptFile | None:
    """Where the capture of a request is kept. None if nothing is kept, or what it depends on is not known."""
    reading = request.reading
    if request.folder is None or reading.answers is not None or reading.decided:
        return None
    digest = request_digest(request)
    return None if digest is None else kept_file(request.folder / "own", what, digest, batch, capture_versions())


def _decisions(captured: Capture) -> Iterable[Any]:
    return () if captured.record is None else captured.record.decisions


def _program_text(program: Program) -> str:
    body = to_bytes(program).decode()
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def _read_program(path: Path) -> Program:
    sha256, _, body = path.read_text(encoding="utf-8").partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != sha256:
        raise InputError(f"{path} is damaged: its content does not match its header")
    return from_bytes(body.encode())
