"""A trace of `autopar trace` in the terms of a prediction: seconds by name that add up to the step of one rank.

    compute          blocks run, without the collectives inside them (a block waits for tp, cp and ep)
    <mesh dimension> its collectives: all inside blocks, and the exposed ones outside
    point-to-point   exposed sends
    idle             the rest of the step: the bubble, and waiting

A receive lasts from its posting until the data is there. The other stage decides this time, so it counts as idle. On
gloo a pass of a pipeline stage begins when the schedule enters it. Time in a pass outside its blocks is waiting too.
docs/trace.md describes the format.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.errors import InputError, Problem
from autopar.files.strict_text import read_json

WRITTEN_BY = "write it again with `autopar trace`"
_MAX_BYTES = 512 * 2**20
COMPUTE, HOST, MESSAGES, IDLE = "compute", "host", "point-to-point", "idle"
_IN_BLOCKS = ("tp", "cp", "ep")
Span = tuple[float, float]


def read_trace(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The content of a file of `autopar trace`. Raises InputError for another file."""
    content, problems = read_json(path, max_bytes=_MAX_BYTES)
    if not problems and not isinstance(content, dict):
        problems = [Problem(path="", rule="must be an object with traceEvents")]
    if problems:
        raise InputError(f"trace {os.fspath(path)!r} cannot be used", problems)
    trace: Mapping[str, Any] = content
    return trace


def measured_parts(trace: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by term of the rank that computes longest; their sum is the step."""
    ranks = _slices(trace)
    spans = [span for tracks in ranks.values() for track in tracks.values() for span, _ in track]
    step = (min(start for start, _ in spans), max(end for _, end in spans))
    rank = max(sorted(ranks), key=lambda pid: _parts(ranks[pid], step).get(COMPUTE, 0.0))
    return {name: us * 1e-6 for name, us in _parts(ranks[rank], step).items()}


def _slices(trace: Mapping[str, Any]) -> dict[int, dict[str, list[tuple[Span, bool]]]]:
    """Spans in microseconds by rank and track. The flag of each span tells whether it is the call of a block."""
    events = trace.get("traceEvents")
    problems: list[Problem] = []
    slices: dict[int, dict[str, list[tuple[Span, bool]]]] = {}
    for index, event in enumerate(events if isinstance(events, list) else []):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        pid, track, start, duration = (event.get(key) for key in ("pid", "cat", "ts", "dur"))
        if not (
            isinstance(pid, int)
            and isinstance(track, str)
            and isinstance(start, (int, float))
            and isinstance(duration, (int, float))
            and duration >= 0
        ):
            rule = "must have pid, cat, ts and dur"
            problems.append(Problem(path=f"traceEvents[{index}]", rule=rule, value=event))
        elif track != HOST and not (track == MESSAGES and "RECV" in str(event.get("name"))):
            is_block = "call" in (event.get("args") or {})
            slices.setdefault(pid, {}).setdefault(track, []).append(((start, start + duration), is_block))
    if not problems and not slices:
        problems.append(Problem(path="traceEvents", rule="must have slices, as `autopar trace` writes them"))
    if problems:
        raise InputError("the trace cannot be used", problems)
    return slices


def _parts(tracks: Mapping[str, Sequence[tuple[Span, bool]]], step: Span) -> dict[str, float]:
    every = tracks.get(COMPUTE, [])
    blocks = [span for span, is_block in every if is_block] or [span for span, _ in every]
    names = [name for name in tracks if name != COMPUTE]
    inside = sorted(name for name in names if name.rstrip("0123456789") in _IN_BLOCKS)
    parts: dict[str, float] = {}
    taken: list[Span] = []
    for name in inside:
        taken = _take(parts, name, [span for span, _ in tracks[name]], taken)
    taken = _take(parts, COMPUTE, blocks, taken)
    for name in sorted(set(names) - set(inside)):
        taken = _take(parts, name, [span for span, _ in tracks[name]], taken)
    parts[IDLE] = step[1] - step[0] - _length(taken)
    return parts


def _take(parts: dict[str, float], name: str, spans: Iterable[Span], taken: list[Span]) -> list[Span]:
    """Count the time that `spans` add to the spans `taken`."""
    together = _union([*taken, *spans])
    parts[name] = _length(together) - _length(taken)
    return together


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
