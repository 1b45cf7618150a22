"""A capture as a file with two lines of JSON: a header, and the record. A program for other processes is a record.

The header has the hash of the record. The file is written completely or not at all. Reading executes nothing. It is
strict: it refuses other versions, unknown keys, and damaged or foreign content with an `InputError` that names the
problem.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from autopar.errors import InputError
from autopar.files.strict_model import StrictModel

if TYPE_CHECKING:
    from autopar.capture.record.captured import Capture
    from autopar.capture.record.schema import ProgramRecord
    from autopar.ir.program import Program

_VERSION = 3
_MAX_BYTES = 64 * 1024 * 1024


class CaptureHeader(StrictModel):
    """The header before the record. `about` describes the captured model and the used versions for a human reader."""

    format: Literal["autopar capture"]
    version: int
    sha256: str
    about: dict[str, str]
    notes: tuple[str, ...]


def digest_of(record: "ProgramRecord") -> str:
    """The hash of a record's text, as in the header of its file."""
    return _hash(record.model_dump_json())


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def capture_text(captured: "Capture", *, about: dict[str, str], notes: tuple[str, ...] = ()) -> str:
    """The content of a capture's file. Raises `InputError` if the program is not known at other sizes."""
    if captured.record is None:
        raise InputError(f"this capture cannot be written to a file, because {captured.unknown}")
    body = captured.record.model_dump_json()
    if len(body) > _MAX_BYTES // 2:
        raise InputError(f"this capture cannot be written to a file, because it has {len(body):,} bytes")
    header = CaptureHeader(format="autopar capture", version=_VERSION, sha256=_hash(body), about=about, notes=notes)
    return f"{header.model_dump_json()}\n{body}\n"


def open_capture(path: Path) -> tuple[CaptureHeader, Callable[[], "Capture"]]:
    """The header of an undamaged file, and a function that reads its capture. Only this function needs torch."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} has more than {_MAX_BYTES:,} bytes, so it is no capture; capture again")
        first, _, body = path.read_text(encoding="utf-8").partition("\n")
        body = body.removesuffix("\n")
        header = CaptureHeader.model_validate_json(first)
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        what = " ".join(str(error).split())[:200]
        raise InputError(f"{path} cannot be read as a capture: {what}; capture again") from None
    if header.version != _VERSION:
        raise InputError(f"{path} is a capture of version {header.version}, this is version {_VERSION}; capture again")
    if _hash(body) != header.sha256:
        raise InputError(f"{path} is damaged: its content does not match its header; capture again")
    return header, lambda: _read(body, path)


def to_bytes(program: "Program") -> bytes:
    """The program as bytes, for `from_bytes`. Raises `Unexplained` if a record cannot hold it."""
    from autopar.capture.record.write import record_of_program

    return record_of_program(program).model_dump_json().encode()


def from_bytes(written: bytes) -> "Program":
    """A program with the same blocks, names and annotations. Raises `BadRecord` if an operator is not known here."""
    from autopar.capture.record.read import program_of
    from autopar.capture.record.schema import ProgramRecord

    return program_of(ProgramRecord.model_validate_json(written))


def _read(body: str, path: Path) -> "Capture":
    from autopar.capture.record.captured import Capture
    from autopar.capture.record.schema import ProgramRecord

    try:
        record = ProgramRecord.model_validate_json(body)
    except ValidationError as error:
        what = " ".join(str(error).split())[:200]
        raise InputError(f"{path} has no capture that this version can read: {what}; capture again") from None
    return Capture(record=record, unknown=None, again=None, sequence=record.sizes.sequence)
