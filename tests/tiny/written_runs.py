"""Run directories as `autopar.Run` leaves them, without a job."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autopar.runs.record import END, METRICS_FILE, RUN_FILE, START, Event, Line, RunInfo, run_json, to_text

NOW_S = 1_800_000_000.0


def info(**changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "model": "GPT",
        "started_at": "2026-11-25T10:00:00+00:00",
        "restarted_at": "2026-11-25T10:00:00+00:00",
        "device_type": "cpu",
        "device": "x86_64",
        "num_ranks": 4,
        "num_hosts": 1,
        "versions": {"torch": "2.13.0"},
        "total_steps": None,
        "predicted": None,
        "plan": {},
    }
    return RunInfo(**values | changes)


def start() -> Event:
    return Event(event=START, time_s=NOW_S - 1000)


def end(outcome: str = "done") -> Event:
    return Event(event=END, time_s=NOW_S - 10, outcome=outcome)


def line(step: int, loss: float = 1.0, **values: Any) -> Line:
    return Line(step=step, loss=loss, **{"time_s": NOW_S - 500 + step, **values})


def write(folder: Path, entries: Iterable[Line | Event], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / RUN_FILE).write_text(run_json(info(**changes)))
    (folder / METRICS_FILE).write_text("".join(map(to_text, entries)))
    return folder
