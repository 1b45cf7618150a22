"""The files of a run directory.

run.json        what runs: model, plan, devices, versions and predictions. Written anew at every start
metrics.jsonl   one JSON object a line, appended: metrics of a step, and the start and the end of each job
checkpoints     the folder of checkpoints, if the run saves them there
lock            the job that writes here

A line of a step replaces all earlier lines of this step and of later ones: a run that was loaded from step 40 logs step
41 again. Nothing is deleted. Numbers that JSON lacks are the texts nan, inf and -inf.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import InputError, Problem
from autopar.files.plain_data import plain_of, read_plain
from autopar.files.strict_text import read_json
from autopar.ir.explanation import Prediction

RUN_FILE, METRICS_FILE, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"
KIND, VERSION = "autopar run", 2
_MAX_RUN_BYTES = 256 * 1024 * 1024
_MAX_LINE_BYTES = 64 * 1024
_NOT_FINITE = ("nan", "inf", "-inf")
START, END = "start", "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What runs. `started_at` and `restarted_at` are the times of the first and the last start, in UTC."""

    kind: str = KIND
    version: int = VERSION
    model: str
    started_at: str
    restarted_at: str
    device_type: str
    device: str
    num_ranks: int
    num_hosts: int
    versions: Mapping[str, str] = field(hash=False)
    total_steps: int | None
    predicted: Prediction | None
    plan: Any = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The metrics of one step of all ranks. Rates are those since the line before; the first line has none."""

    step: int
    time_s: float  # since 1970
    loss: float
    skipped: bool = False
    samples: int = 0
    tokens: int = 0
    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int = 0
    peak_rank: int = 0
    learning_rate: float | None = None
    gradient_norm: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The start or the end of a job. The outcome of an end is ``done``, or the name of the exception."""

    event: str
    time_s: float
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The lines that count, and how many others the file has. `since_start` lines are of the last start."""

    lines: tuple[Line, ...] = ()
    events: tuple[Event, ...] = ()
    since_start: int = 0
    num_replaced: int = 0
    num_damaged: int = 0


def to_text(entry: Line | Event) -> str:
    """A line of the file, with its end."""
    plain = plain_of(entry, {float: lambda number: number if math.isfinite(number) else str(number)})
    content = {name: value for name, value in plain.items() if value is not None and value != {}}
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def run_json(info: RunInfo) -> str:
    """The text of the run's file."""
    return json.dumps(asdict(info), indent=1, sort_keys=True) + "\n"


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has the file of a run."""
    return Path(path, RUN_FILE).is_file()


def read_info(path: str | os.PathLike[str]) -> RunInfo:
    """What runs in a folder. Raises `InputError` for a folder that is no run, with every problem."""
    folder, file = Path(path), Path(path, RUN_FILE)
    if not file.exists():
        what = "is no run directory" if folder.is_dir() else "does not exist"
        raise InputError(f"{folder} {what}; name the folder of autopar.Run(folder, parallel), which has a {RUN_FILE}")
    content, problems = read_json(file, max_bytes=_MAX_RUN_BYTES)
    if not problems and (not isinstance(content, dict) or content.get("kind") != KIND):
        problems = [Problem(path="kind", rule=f"must be {KIND!r}")]
    if not problems and content.get("version") != VERSION:
        problems = [Problem(path="version", value=content.get("version"), rule=f"must be {VERSION} for this autopar")]
    info: RunInfo | None = None if problems else read_plain(RunInfo, content, problems)
    if info is None or problems:
        raise InputError(f"{file} is not the file of a run", problems)
    return info


def read_metrics(path: str | os.PathLike[str]) -> Metrics:
    """The metrics of a run. A line that cannot be read is counted and left out; so is one that is being written."""
    kept: list[Line] = []
    events: list[Event] = []
    since_start = replaced = damaged = 0
    for text in _whole_lines(Path(path, METRICS_FILE)):
        entry = _entry(text)
        if entry is None:
            damaged += 1
        elif isinstance(entry, Event):
            events.append(entry)
            since_start = 0 if entry.event == START else since_start
        else:
            while kept and kept[-1].step >= entry.step:
                kept.pop()
                replaced += 1
            kept.append(entry)
            since_start += 1
    return Metrics(
        lines=tuple(kept),
        events=tuple(events),
        since_start=since_start,
        num_replaced=replaced,
        num_damaged=damaged,
    )


def cut_partial_line(path: Path) -> None:
    """Remove what a killed job left of its last line."""
    with open(path, "r+b") as file:
        if file.seek(0, os.SEEK_END):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            file.truncate(end)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines that have an end."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; the error is of opening alone
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        while text := file.readline(_MAX_LINE_BYTES):
            if text.endswith(b"\n"):
                yield text
            elif len(text) == _MAX_LINE_BYTES:  # a line that autopar did not write
                yield b""
                while text and not text.endswith(b"\n"):
                    text = file.readline(_MAX_LINE_BYTES)


def _entry(text: bytes) -> Line | Event | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    problems: list[Problem] = []
    if "event" in content:
        event: Event | None = read_plain(Event, content, problems)
        return event if event is not None and event.event in (START, END) else None
    line: Line | None = read_plain(Line, content, problems, readers={float: _number})
    return None if line is None or problems or line.step < 0 else line


def _number(value: Any) -> float | None:
    if value in _NOT_FINITE:
        return float(value)
    problems: list[Problem] = []
    number: float | None = read_plain(float, value, problems)
    if problems:
        raise ValueError(problems[0].rule)
    return number
