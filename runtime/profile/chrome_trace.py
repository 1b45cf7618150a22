"""Slices of all ranks as one document in the Trace Event Format, which ui.perfetto.dev and chrome://tracing read.

A rank is a process, a track a thread. Slices of one thread must nest. Slices that only overlap, such as concurrent
collectives, get a second thread of the same name. Arrows lead from a message's send to its receive.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InputError
from autopar.files.atomic import NOT_WRITABLE, is_writable, write_text
from autopar.runtime.profile.timeline import COMPUTE, HOST, MESSAGES, Slice

_Json = dict[str, Any]
_SLACK_US = 0.01  # rounding may move an end by this much


def chrome_trace(ranks: Sequence[tuple[str, Sequence[Slice]]], about: Mapping[str, Any]) -> _Json:
    """The document of all ranks, each with its name. Times begin with the first slice of any rank."""
    start = min((s.start_us for _, slices in ranks for s in slices), default=0.0)
    events: list[_Json] = []
    ends: dict[tuple[Any, ...], list[_Json]] = {}
    for rank, (name, slices) in enumerate(ranks):
        events += [_meta("process_name", rank, name=name), _meta("process_sort_index", rank, sort_index=rank)]
        for thread, (track, lane) in enumerate(nested_tracks(slices)):
            events.append(_meta("thread_name", rank, thread, name=track))
            events.append(_meta("thread_sort_index", rank, thread, sort_index=thread))
            for one in lane:
                at, duration = round(one.start_us - start, 3), round(one.duration_us, 3)
                where = {"pid": rank, "tid": thread, "ts": at}
                events.append(
                    {"ph": "X", "name": one.name, "cat": one.track, "dur": duration, "args": dict(one.details), **where}
                )
                if one.track == MESSAGES:
                    ends.setdefault(_message(name, one), []).append(where | {"sends": "SEND" in one.name})
    events += _arrows(ends)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def nested_tracks(slices: Iterable[Slice]) -> list[tuple[str, list[Slice]]]:
    """Slices by track, in the order of display. A track is cut into parts whose slices nest."""
    tracks: list[tuple[str, list[Slice], list[float]]] = []  # track, slices, ends of open slices
    order = {COMPUTE: 0, HOST: 3, MESSAGES: 2}
    for event in sorted(slices, key=lambda s: (order.get(s.track, 1), s.track, s.start_us, -s.duration_us)):
        for lane in tracks:
            open_ends = lane[2]
            while open_ends and open_ends[-1] <= event.start_us + _SLACK_US:
                open_ends.pop()
            if lane[0] == event.track and (not open_ends or event.end_us <= open_ends[-1] + _SLACK_US):
                break
        else:
            lane = (event.track, [], [])
            tracks.append(lane)
        end = min([event.end_us, *lane[2][-1:]])
        lane[1].append(replace(event, duration_us=end - event.start_us))
        lane[2].append(end)
    return [(track, spans) for track, spans, _ in tracks]


def _message(rank_label: str, span: Slice) -> tuple[Any, ...]:
    """The common key of a send and its receive: both stages, pass, micro-batch, and all coordinates except pp."""
    words = rank_label.partition(": ")[2].split()
    others = tuple(part for part in zip(words[::2], words[1::2], strict=True) if part[0] != "pp")
    details = span.details
    return (details["from_stage"], details["to_stage"], details["micro_batch"], others)


def _arrows(ends: Mapping[tuple[Any, ...], Sequence[_Json]]) -> list[_Json]:
    arrows: list[_Json] = []
    for number, both in enumerate(ends.values()):
        sends = [e for e in both if e["sends"]]
        receives = [e for e in both if not e["sends"]]
        if len(sends) == len(receives) == 1:
            for phase, end in (("s", sends[0]), ("f", receives[0])):
                where = {key: end[key] for key in ("pid", "tid", "ts")}
                arrows.append({"ph": phase, "id": number, "name": "message", "cat": MESSAGES, "bp": "e", **where})
    return arrows


def _meta(kind: str, pid: int, tid: int = 0, **arguments: Any) -> _Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackTime:
    """The number of slices on a track of a rank, the time during which one runs, and the first start and last end."""

    rank: str
    track: str
    num_slices: int
    busy_us: float
    start_us: float
    end_us: float


def track_times(document: Mapping[str, Any]) -> list[TrackTime]:
    """The times of the tracks of a trace."""
    names: dict[tuple[str, int], str] = {}
    slices: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            names["process", event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            slices.setdefault((event["pid"], event["cat"]), []).append(span)
    times = []
    for (pid, track), spans in slices.items():
        busy, until = 0.0, float("-inf")
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        times.append(
            TrackTime(
                rank=names["process", pid],
                track=track,
                num_slices=len(spans),
                busy_us=busy,
                start_us=min(start for start, _ in spans),
                end_us=until,
            )
        )
    return times


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `InputError` if a file cannot be written, before ranks work for it."""
    if not is_writable(path):
        raise InputError(f"{os.fspath(path)} {NOT_WRITABLE}")


def write_whole(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a document as JSON, whole or not at all. Raises `InputError` if it cannot be written."""
    write_text(path, json.dumps(document, separators=(",", ":")) + "\n")
