"""A predicted pipeline as a document in the Trace Event Format, which ui.perfetto.dev and chrome://tracing read.

A rank is a process with three threads. An arrow leads from the end of a message to the pass that takes it.
"""

from collections.abc import Iterator
from typing import Any

from autopar.errors import InputError
from autopar.report.timeline import KINDS
from autopar.search.result.report_data import Timeline
from autopar.search.result.result import SearchResult

_Json = dict[str, Any]
PASSES, WAITING, MESSAGES = 0, 1, 2
_NAMES = {PASSES: "passes", WAITING: "waiting", MESSAGES: "messages"}
_LEAST_US = 0.01  # shorter waits are rounding


def perfetto_trace(result: SearchResult) -> _Json:
    """The document of a search's best plan. Raises `InputError` where it has no time line."""
    if result.details is None or result.details.timeline is None or result.best is None:
        why = (
            "nothing fits"
            if result.best is None
            else "the best plan has no pipeline"
            if result.best.degrees.get("pp", 1) == 1
            else "it is too long"
        )
        raise InputError(f"there is no time line to write: {why}; leave --perfetto out")
    timeline = result.details.timeline
    events = [*_names(timeline), *_passes(timeline), *_waiting(timeline), *_messages(timeline)]
    about = {
        "model": result.model,
        "cluster": result.cluster,
        "predicted_step_s": result.best.step_s,
        "runs_of_the_schedule": timeline.runs,
        "passes_left_out": timeline.left_out,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(timeline: Timeline) -> Iterator[_Json]:
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"pipeline rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for thread, name in _NAMES.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _passes(timeline: Timeline) -> Iterator[_Json]:
    for rank, kind, stage, micro_batch, start, end in timeline.passes:
        details = {"stage": stage, "micro_batch": micro_batch, "pass": KINDS[kind]}
        yield _slice(f"{stage}{kind}{micro_batch}", KINDS[kind], rank, PASSES, start, end, details)


def _waiting(timeline: Timeline) -> Iterator[_Json]:
    """Waiting times between passes. A gap in a long time line is marked as left out."""
    of_rank: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(timeline.num_ranks)}
    for p in timeline.passes:
        of_rank[p[0]].append((p[4], p[5]))
    for rank, spans in of_rank.items():
        free = 0.0
        for start, end in [*sorted(spans), (timeline.seconds, timeline.seconds)]:
            if (start - free) * 1e6 > _LEAST_US:
                is_cut = timeline.gap is not None and free <= timeline.gap[1] and start >= timeline.gap[0]
                name = "not shown" if is_cut and timeline.left_out else "waiting"
                yield _slice(name, name, rank, WAITING, free, start, {})
            free = max(free, end)


def _messages(timeline: Timeline) -> Iterator[_Json]:
    for number, (rank, to, stage, micro_batch, start, end) in enumerate(timeline.messages):
        details = {"from_rank": rank, "to_rank": to, "from_stage": stage, "micro_batch": micro_batch}
        yield _slice(f"to rank {to}", "message", rank, MESSAGES, start, end, details)
        arrow = {"id": number, "name": "message", "cat": "message"}
        yield {"ph": "s", "pid": rank, "tid": MESSAGES, "ts": _us(start), **arrow}
        yield {"ph": "f", "bp": "e", "pid": to, "tid": PASSES, "ts": _us(_taken(timeline, to, end)), **arrow}


def _taken(timeline: Timeline, rank: int, arrival: float) -> float:
    """When the receiver next begins a pass, into which the arrow leads."""
    starts = [p[4] for p in timeline.passes if p[0] == rank and p[4] >= arrival * (1 - 1e-6)]
    return min(starts, default=arrival)


def _slice(name: str, kind: str, rank: int, thread: int, start: float, end: float, details: _Json) -> _Json:
    where = {"pid": rank, "tid": thread, "ts": _us(start), "dur": max(0.0, round((end - start) * 1e6, 3))}
    return {"ph": "X", "name": name, "cat": kind, "args": details, **where}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
