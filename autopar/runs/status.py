"""The status of a run: figures of the last steps beside the plan's prediction, and whether the run lives."""

import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from autopar.files.lock import LOCK, STALE_LOCK_S, Holder, is_alive, read_holder
from autopar.files.plain_data import plain_of
from autopar.files.strict_text import read_text
from autopar.ir.explanation import Prediction
from autopar.runs.record import CHECKPOINTS, END, START, Line, Metrics, RunInfo, read_info, read_metrics

RECENT = 20  # rates are medians of so many lines
PACED = 200  # the pace is measured over so many lines
MAX_POINTS = 240  # of a curve
_BARS = "▁▂▃▄▅▆▇█"
_STEP = re.compile(r"step-(\d{1,18})(?:\.\d{1,9})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCheckpoint:
    """The newest complete checkpoint."""

    step: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment. Rates are medians of the last lines, and None if they are not known."""

    path: str
    model: str
    state: str
    detail: str
    step: int | None
    total_steps: int | None
    loss: float | None
    losses: tuple[tuple[int, float], ...]
    learning_rate: float | None
    gradient_norm: float | None
    step_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_bytes: int | None
    peak_rank: int | None
    predicted: Prediction | None
    device_type: str
    num_ranks: int
    num_tokens: int
    num_skipped: int
    num_starts: int
    num_replaced: int
    num_damaged: int
    left_s: float | None
    age_s: float | None
    checkpoint: NewestCheckpoint | None
    extra: dict[str, float] = field(default_factory=dict, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Numbers that JSON lacks are None."""
        content: dict[str, Any] = plain_of(self, {float: lambda number: number if math.isfinite(number) else None})
        return content


def run_status(path: str | os.PathLike[str], *, now_s: float | None = None) -> RunStatus:
    """The status of a run directory. Raises `InputError` for a folder that is no run."""
    info, metrics = read_info(path), read_metrics(path)
    now = time.time() if now_s is None else now_s
    lines = metrics.lines
    last = lines[-1] if lines else None
    recent = [line for line in lines[-min(RECENT, max(1, metrics.since_start)) :] if not line.skipped]
    names = ("step_s", "samples_per_s", "tokens_per_s")
    rates: dict[str, Any] = {name: _median([getattr(line, name) for line in recent]) for name in names}
    logged = ("step", "loss", "learning_rate", "gradient_norm", "peak_bytes", "peak_rank")
    step_s = rates["step_s"]
    state, detail = _state(Path(path), metrics, now)
    ended = [event.time_s for event in metrics.events]
    latest = max([*([last.time_s] if last else []), *ended[-1:]], default=None)
    return RunStatus(
        path=str(path),
        model=info.model,
        state=state,
        detail=detail,
        **{name: getattr(last, name, None) for name in logged},
        **rates,
        total_steps=info.total_steps,
        losses=curve([(line.step, line.loss) for line in lines if not line.skipped]),
        mfu=None if info.predicted is None or not step_s else info.predicted.mfu * info.predicted.step_s / step_s,
        predicted=info.predicted,
        device_type=info.device_type,
        num_ranks=info.num_ranks,
        num_tokens=sum(line.tokens for line in lines),
        num_skipped=sum(line.skipped for line in lines),
        num_starts=sum(event.event == START for event in metrics.events),
        num_replaced=metrics.num_replaced,
        num_damaged=metrics.num_damaged,
        left_s=_left(info, metrics) if state == "running" else None,
        age_s=None if latest is None else max(0.0, now - latest),
        checkpoint=newest_checkpoint(Path(path, CHECKPOINTS), now),
        extra=dict(last.extra) if last else {},
    )


def curve(points: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> tuple[tuple[int, float], ...]:
    """At most so many points: the means of equal parts, each at the last step of its part."""
    if len(points) <= most:
        return tuple(points)
    means = []
    for part in range(most):
        some = points[part * len(points) // most : (part + 1) * len(points) // most]
        means.append((some[-1][0], sum(value for _, value in some) / len(some)))
    return tuple(means)


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of bars, high for large values. A value that is no number is ``×``."""
    shown = [value for _, value in curve(list(enumerate(values)), width)]
    finite = [value for value in shown if math.isfinite(value)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    most = len(_BARS) - 1
    return "".join(_BARS[round((v - low) / span * most)] if math.isfinite(v) else "×" for v in shown)


def newest_checkpoint(folder: Path, now_s: float) -> NewestCheckpoint | None:
    """The checkpoint that `latest` names in a folder of checkpoints."""
    text, _ = read_text(folder / "latest", max_bytes=256)
    match = _STEP.fullmatch((text or "").strip())
    if match is None:
        return None
    with suppress(OSError):
        written = (folder / "latest").stat().st_mtime
        return NewestCheckpoint(step=int(match[1]), age_s=max(0.0, now_s - written))
    return None


def _state(path: Path, metrics: Metrics, now_s: float) -> tuple[str, str]:
    """The state of the last start, and what a person may ask next."""
    last, holder = metrics.events[-1] if metrics.events else None, read_holder(path)
    alive, where = False, ""
    if holder is not None:
        alive, where = _lives(holder, path, now_s), f"process {holder.pid} on {holder.host}"
    if last is not None and last.event != END:
        has_ended = f"{where or 'its process'} has ended without closing the run"
        return ("running", where) if alive else ("killed", has_ended)
    if alive:
        return "starting", where
    if last is None:
        return "not started", "no job has logged here"
    return ("done", "") if last.outcome == "done" else ("failed", f"it ended with {last.outcome}")


def _lives(holder: Holder, path: Path, now_s: float) -> bool:
    """Whether the process of a lock runs. A process of another host renews the lock's file."""
    alive = is_alive(holder)
    with suppress(OSError):
        return now_s - (path / LOCK).stat().st_mtime <= STALE_LOCK_S if alive is None else alive
    return False


def _left(info: RunInfo, metrics: Metrics) -> float | None:
    """The time to the end at the pace of this start. Saves and evaluations between steps count."""
    some = metrics.lines[-min(PACED, metrics.since_start) :] if metrics.since_start else ()
    if info.total_steps is None or len(some) < 2:
        return None
    pace = (some[-1].time_s - some[0].time_s) / (some[-1].step - some[0].step)
    return max(0.0, pace * (info.total_steps - 1 - some[-1].step))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def steps_of(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """A metric by step, where it is known."""
    pairs = [(line.step, getattr(line, name)) for line in lines]
    return [(step, float(value)) for step, value in pairs if value is not None]
