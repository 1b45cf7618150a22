"""One rank's step as slices on tracks, from a record of torch's profiler. Pure: no process group, no profiler.

    compute              passes of stages (``0F1``: stage 0, forward, micro-batch 1, as torch prints actions), and in
                         them the calls of blocks by module path
    <mesh dimension>     its collectives: kind and bytes
    point-to-point       messages between stages
    host                 with a GPU only: the host's work to launch the compute

A block's backward pass has no range of its own in the profile. Autograd numbers the nodes of the forward pass, and the
profiler shows the numbers in both passes. Nodes numbered inside a block's forward range belong to this block.

With a GPU, a slice spans the kernels that were launched inside a host range. Collectives are NCCL's kernels, which name
their process group. On the host, the profile does not name the group of a collective. A log of the step before has the
groups in the same order (`LoggedCollective` of `autopar.runtime.distributed.collective_log`).
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.runtime.distributed.collective_log import LoggedCollective, kind_of

COMPUTE, HOST, MESSAGES, UNKNOWN = "compute", "host", "point-to-point", "collectives"
MICROSECONDS = 1e-3  # of a nanosecond
_RANGE = re.compile(
    r"block (?P<path>.*) \(call (?P<call>\d+), stage (?P<stage>\d+), micro-batch (?P<micro_batch>\d+)\)"
)
_ACTION = re.compile(r"PP:(?P<stage>\d+)(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|[FBIW])(?P<micro_batch>\d+)")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKWARD = "autograd::engine::evaluate_function"
ProfilerEvent = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Something that took time; start and duration in microseconds."""

    track: str
    name: str
    start_us: float
    duration_us: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def range_name(path: str, call: int, stage: int, micro_batch: int) -> str:
    """The profiler's range around one call of a block."""
    return f"block {path} (call {call}, stage {stage}, micro-batch {micro_batch})"


def slices_of(
    document: Mapping[str, Any],
    sent: Sequence[LoggedCollective],
    *,
    tracks: Mapping[str, str],
    micro_batches: int,
    origin_ns: int = 0,
) -> list[Slice]:
    """The slices of one rank's profile, in microseconds since `origin_ns`. `tracks` are those of process groups."""
    events = sorted((e for e in document["traceEvents"] if e.get("ph") == "X"), key=lambda e: float(e["ts"]))
    base_us = (int(document.get("baseTimeNanoseconds", 0)) - origin_ns) * MICROSECONDS
    device = _Device(events)
    actions = _actions(events, micro_batches)
    spans = [*actions, *_blocks(events, actions)]
    if not any(s.name[:1].isdigit() for s in actions):
        spans += _passes(spans)
    calls = _communication(events, sent)
    messages = [_described(s, calls) for s in spans if s.track == MESSAGES]
    compute = [s for s in spans if s.track == COMPUTE]
    collectives = _collectives(calls, events, tracks)
    if device.kernels:
        hosted = [replace(s, track=HOST) for s in compute]
        compute = [*hosted, *(span for s in compute for span in device.span(s))]
        messages = [span for s in messages for span in device.messages(s)]
        collectives = device.collectives(tracks) or collectives
    else:
        messages = [_received(s, events) for s in messages]
    return [replace(s, start_us=s.start_us + base_us) for s in (*compute, *collectives, *messages)]


def _slice(track: str, name: str, event: ProfilerEvent, **details: Any) -> Slice:
    return Slice(track=track, name=name, start_us=float(event["ts"]), duration_us=float(event["dur"]), details=details)


def _actions(events: Iterable[ProfilerEvent], micro_batches: int) -> list[Slice]:
    """The passes and messages of torch's pipeline. A schedule that runs again goes on counting micro-batches."""
    spans, times = [], dict[str, int]()
    for event in events:
        match = _ACTION.fullmatch(event["name"]) if event.get("cat") == "user_annotation" else None
        if match is None:
            continue
        run = times.get(event["name"], 0)
        times[event["name"]] = run + 1
        stage, kind, index = int(match["stage"]), match["kind"], int(match["micro_batch"]) + run * micro_batches
        track = COMPUTE if len(kind) == 1 else MESSAGES
        details = {"pass": kind[-1], "stage": stage, "micro_batch": index}
        spans.append(_slice(track, f"{stage}{kind}{index}", event, **details))
    return spans


def _blocks(events: Sequence[ProfilerEvent], actions: Sequence[Slice]) -> list[Slice]:
    """Calls of blocks. Forward and recomputed calls have marked ranges. Autograd's numbers give the backward calls."""
    forward, reruns, seen = list[tuple[Slice, Any]](), list[tuple[Slice, Any]](), set[tuple[str, ...]]()
    for event in events:
        match = _RANGE.fullmatch(event["name"]) if event.get("cat") == "user_annotation" else None
        if match is None:
            continue
        details = {"stage": int(match["stage"]), "micro_batch": int(match["micro_batch"]), "call": int(match["call"])}
        kind = "recompute" if match.groups() in seen else "F"
        block = _slice(COMPUTE, match["path"], event, **{"pass": kind}, **details)
        (reruns if match.groups() in seen else forward).append((block, event["tid"]))
        seen.add(match.groups())
    spans: dict[tuple[int, int], list[float]] = {}
    passes = [p for p in actions if p.track == COMPUTE]
    owner_of = _numbers(events, forward)
    for event in events:
        if event["name"].startswith(_BACKWARD):
            owner = owner_of(event.get("args", {}).get("Sequence number"))
            if owner is not None:
                start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
                inside = next((k for k, p in enumerate(passes) if p.start_us <= start <= p.end_us), -1)
                span = spans.setdefault((owner, inside), [start, end])
                span[1] = max(span[1], end)
    backward = []
    for (owner, inside), (start, end) in spans.items():
        block, kind = forward[owner][0], passes[inside].details["pass"] if inside >= 0 else "B"
        details = dict(block.details) | {"pass": kind}
        backward.append(replace(block, start_us=start, duration_us=end - start, details=details))
    return [*(s for s, _ in forward), *(s for s, _ in reruns), *backward]


def _numbers(
    events: Sequence[ProfilerEvent], forward: Sequence[tuple[Slice, Any]]
) -> Callable[[int | None], int | None]:
    """From an autograd node's number to its forward range, which begins with its first operator's number."""
    starts: dict[Any, tuple[list[float], list[int]]] = {}
    for event in events:
        number = event.get("args", {}).get("Sequence number")
        if number is not None and not event["args"].get("Fwd thread id"):
            times, numbers = starts.setdefault(event["tid"], ([], []))
            times.append(float(event["ts"]))
            numbers.append(int(number))
    firsts: list[tuple[int, int, int]] = []  # first number, number after the last, index of the range
    for index, (block, tid) in enumerate(forward):
        times, numbers = starts.get(tid, ([], []))
        at, after = bisect_left(times, block.start_us), bisect_left(times, block.end_us)
        if at < after:
            firsts.append((numbers[at], numbers[after] if after < len(numbers) else numbers[-1] + 1, index))
    firsts.sort()
    bounds = [first for first, _, _ in firsts]

    def owner(number: int | None) -> int | None:
        at = bisect_right(bounds, number) - 1 if number is not None else -1
        return firsts[at][2] if at >= 0 and number is not None and number < firsts[at][1] else None

    return owner


def _passes(blocks: Sequence[Slice]) -> list[Slice]:
    """Passes of a step without pipeline ranges: from the first to the last block of a micro-batch's pass."""
    groups: dict[tuple[int, str, int], list[Slice]] = {}
    for block in blocks:
        kind = "B" if block.details["pass"] == "recompute" else block.details["pass"]
        groups.setdefault((block.details["stage"], kind, block.details["micro_batch"]), []).append(block)
    spans = []
    for (stage, kind, index), same in groups.items():
        start, end = min(s.start_us for s in same), max(s.end_us for s in same)
        details = {"pass": kind, "stage": stage, "micro_batch": index}
        name = f"{stage}{kind}{index}"
        spans.append(Slice(track=COMPUTE, name=name, start_us=start, duration_us=end - start, details=details))
    return spans


def _communication(
    events: Sequence[ProfilerEvent], sent: Sequence[LoggedCollective]
) -> list[tuple[ProfilerEvent, LoggedCollective | None]]:
    """The calls of the profile, each with its entry in the log. No call has one if the orders differ."""
    calls = outermost(events)
    agree = [str(e["name"]) for e in calls] == [c.operator for c in sent]
    return list(zip(calls, sent, strict=True)) if agree else [(event, None) for event in calls]


def _collectives(
    calls: Sequence[tuple[ProfilerEvent, LoggedCollective | None]],
    events: Sequence[ProfilerEvent],
    tracks: Mapping[str, str],
) -> list[Slice]:
    """Collectives on the host, as long as gloo's own event; without one, as long as the call."""
    works = [e for e in events if str(e["name"]).startswith("gloo:")]
    spans = []
    for event, entry in calls:
        kind = kind_of(event["name"])
        if kind is None or (entry is not None and entry.num_ranks == 1):
            continue
        work = _work_of(event, kind, works)
        track = UNKNOWN if entry is None or entry.group is None else tracks.get(entry.group, UNKNOWN)
        details: dict[str, Any] = {}
        if entry is not None:
            details = {"input_bytes": entry.input_bytes, "output_bytes": entry.output_bytes, "ranks": entry.num_ranks}
        spans.append(_slice(track, kind, event if work is None else work, **details))
    return spans


def outermost(events: Sequence[ProfilerEvent]) -> list[ProfilerEvent]:
    """The calls of communicating operators, by time, without those inside another one."""
    outer: list[ProfilerEvent] = []
    until: dict[Any, float] = {}
    for event in events:
        name = str(event["name"])
        ours = name.startswith(("_c10d_functional::", "c10d::")) and "wait_tensor" not in name
        if ours and event.get("cat") == "cpu_op" and float(event["ts"]) >= until.get(event["tid"], 0.0):
            outer.append(event)
            until[event["tid"]] = float(event["ts"]) + float(event["dur"])
    return outer


def _work_of(event: ProfilerEvent, kind: str, works: list[ProfilerEvent]) -> ProfilerEvent | None:
    """gloo's own event of a call: the first unused event of its kind that starts after the call."""
    names = ["gloo:" + kind.replace("-", "_")] + ["gloo:all_reduce"] * (kind == "reduce-scatter")
    for index, work in enumerate(works):
        if float(work["ts"]) >= float(event["ts"]) and str(work["name"]).startswith(tuple(names)):
            return works.pop(index)
    return None


def _received(message: Slice, events: Sequence[ProfilerEvent]) -> Slice:
    """A message on the host. A receive lasts from its call until the data is there, a send as long as its call."""
    if "RECV" not in message.name:
        return message
    ends = [
        float(e["ts"]) + float(e["dur"])
        for e in events
        if e["name"] == "gloo:recv" and message.start_us <= float(e["ts"]) <= message.end_us
    ]
    return replace(message, duration_us=max((*ends, message.end_us)) - message.start_us)


def _described(message: Slice, calls: Sequence[tuple[ProfilerEvent, LoggedCollective | None]]) -> Slice:
    """A message as it runs on the host, with its two stages and its bytes."""
    stage, is_sent = message.details["stage"], "SEND" in message.name
    other = stage + (1 if (message.details["pass"] == "F") == is_sent else -1)
    source, target = (stage, other) if is_sent else (other, stage)
    sent = [c for event, c in calls if message.start_us <= float(event["ts"]) <= message.end_us]
    details = dict(message.details) | {"from_stage": source, "to_stage": target}
    if sent and None not in sent:
        details["bytes"] = sum(c.input_bytes for c in sent if c is not None)
    return replace(message, details=details)


class _Device:
    """Kernels of a GPU by the time at which the host launched them."""

    def __init__(self, events: Sequence[ProfilerEvent]) -> None:
        launched = {
            e["args"]["correlation"]: float(e["ts"])
            for e in events
            if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
        }
        pairs = [
            (launched[e["args"]["correlation"]], e)
            for e in events
            if e.get("cat") in _ON_DEVICE and e.get("args", {}).get("correlation") in launched
        ]
        pairs.sort(key=lambda pair: pair[0])
        self.kernels = [e for _, e in pairs]
        self.launched = [at for at, _ in pairs]

    def _inside(self, host: Slice) -> list[ProfilerEvent]:
        return self.kernels[bisect_left(self.launched, host.start_us) : bisect_right(self.launched, host.end_us)]

    def span(self, host: Slice) -> list[Slice]:
        """From the first to the last kernel that a range of the host launched, its communication left out."""
        return _span(host, [e for e in self._inside(host) if not _is_nccl(e)])

    def messages(self, host: Slice) -> list[Slice]:
        return _span(host, [e for e in self._inside(host) if _is_nccl(e)]) or [host]

    def collectives(self, tracks: Mapping[str, str]) -> list[Slice]:
        """NCCL's kernels without messages. They name their process group."""
        spans = []
        for event in self.kernels:
            arguments = event["args"]
            kind = kind_of(f"c10d::{arguments.get('Collective name', '')}") if _is_nccl(event) else None
            if kind is not None:
                track = tracks.get(str(arguments.get("Process Group Name")), UNKNOWN)
                names = {"In msg nelems": "input_elements", "Out msg nelems": "output_elements", "dtype": "dtype"}
                details = {ours: arguments[theirs] for theirs, ours in names.items() if theirs in arguments}
                spans.append(_slice(track, kind, event, ranks=arguments.get("Group size"), **details))
        return spans


def _is_nccl(event: ProfilerEvent) -> bool:
    return str(event["name"]).startswith(("nccl", "rccl"))


def _span(host: Slice, kernels: Sequence[ProfilerEvent]) -> list[Slice]:
    if not kernels:
        return []
    start = min(float(e["ts"]) for e in kernels)
    end = max(float(e["ts"]) + float(e["dur"]) for e in kernels)
    return [replace(host, start_us=start, duration_us=end - start)]
