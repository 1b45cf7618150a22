"""All candidates by step time and memory: dots of screening, rings of exact prices, the best, the front, capacity.

Also the other plots with times on logarithmic axes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any

from markupsafe import Markup

from autopar.report.svg import SIDE, Axis, Plot, Tick, dots, line, plotted, tag
from autopar.search.result.result import SearchResult
from autopar.words.numbers import tick_seconds, ticks

BEYOND = 6.0  # times the best step: slower candidates are counted, not drawn
_NARROW = 0.7  # decades: on a narrower range the ticks are round numbers at equal distances
_NEAR = 0.35  # of a device's memory: where all need less, its line is left out
_DEGREES = (
    *("pp", "tp", "cp", "dp_shard", "dp_replicate", "zero"),
    *("micro_batch", "micro_batches", "virtual", "devices"),
)


def scatter_chart(result: SearchResult) -> dict[str, Any] | None:
    """The chart and its counts, or None where no candidate fits.

    For tooltips it has a row per dot: plot units x and y, seconds, gigabytes, exact, degrees, schedule.
    """
    if result.points is None or not result.points.columns.get("seconds"):
        return None
    columns = result.points.columns
    seconds: Sequence[float] = columns["seconds"]
    best = min(seconds) if result.best is None else min(result.best.step_s, *seconds)
    kept = [i for i, value in enumerate(seconds) if value <= BEYOND * best]
    here = [] if result.best is None else [(result.best.step_s, result.best.peak_bytes)]
    shown = [(seconds[i], columns["bytes"][i]) for i in kept] + here
    low, high = log10(min(s for s, _ in shown)), log10(max(s for s, _ in shown))
    low, high = low - 0.03 * (high - low + 0.1), high + 0.03 * (high - low + 0.1)
    most = max(b for _, b in shown)
    has_capacity = most >= _NEAR * result.device_bytes
    top = 1.08 * (max(result.device_bytes, most) if has_capacity else most)

    x, y = Axis(low, high), Axis(0.0, top, SIDE, 0.0)

    def place(s: float, b: float) -> tuple[float, float]:
        return x.at(log10(s)), y.at(b)

    at = {i: place(seconds[i], columns["bytes"][i]) for i in kept}
    content, capacity = list[Markup](), y.at(result.device_bytes)
    if has_capacity:
        content.append(line([(0, capacity), (SIDE, capacity)], class_="capacity"))
    content.append(_layer("screened", dots([at[i] for i in kept if not columns["exact"][i]], class_="dot")))
    content.append(_layer("front", _stairs([place(x, y) for x, y in _front(result) if x <= BEYOND * best])))
    content.append(_layer("exact", dots([at[i] for i in kept if columns["exact"][i]], class_="dot exact")))
    content += [dots([place(*p)], class_="dot best") for p in here]
    names = sorted(set(columns["schedule"]))
    unit, unit_name = (1e9, "GB") if top >= 1e9 else (1e6, "MB")
    plot = plotted(
        content,
        time_ticks(x),
        y.ticks(ticks(0, top), lambda value: f"{value / unit:g} {unit_name}"),
        x_title="seconds of a step (logarithmic)",
        y_title="memory of the fullest rank",
        says=f"{len(kept)} candidates by step time and memory",
        name="candidates",
    )
    return {
        "plot": plot,
        "rows": [_row(columns, i, at[i], names) for i in kept],
        "schedules": names,
        "drawn": len(kept),
        "slower": len(seconds) - len(kept),
        "fitting": result.points.fitting,
        "beyond": round(BEYOND),
        "has_capacity": has_capacity,
        "has_fewer": any(count < result.num_devices for count in columns["devices"]),
    }


def _front(result: SearchResult) -> list[tuple[float, float]]:
    """Seconds and bytes of plans on the front with the best plan's devices; no bound below the proven fastest step."""
    devices = result.num_devices if result.best is None else result.best.num_devices
    least = result.best.step_s if result.best is not None and result.is_proven and result.objective == "time" else 0.0
    points = sorted((max(p.step_s, least), p.peak_bytes) for p in result.front if p.num_devices == devices)
    kept: list[tuple[float, float]] = []
    for seconds, peak in points:
        if not kept or peak < kept[-1][1]:
            kept.append((seconds, peak))
    return kept


def _stairs(points: Sequence[tuple[float, float]]) -> Markup:
    """Right, then down."""
    corners = [corner for (x, y), (to, _) in pairwise(points) for corner in ((x, y), (to, y))]
    return line([*corners, points[-1]], class_="front") if points else Markup("")


def _layer(name: str, content: Markup) -> Markup:
    return tag("g", content, data_layer=name)


def _row(columns: Any, i: int, at: tuple[float, float], schedules: Sequence[str]) -> list[Any]:
    degrees = [columns[name][i] if name in columns else 1 for name in _DEGREES]  # older results have no `cp`
    numbers = [round(at[0]), round(at[1]), columns["seconds"][i], round(columns["bytes"][i] / 1e9, 2)]
    return [*numbers, columns["exact"][i], *degrees, schedules.index(columns["schedule"][i])]


def time_ticks(axis: Axis) -> list[Tick]:
    """1, 2, 5 and their tens where there are few, tens where there are many. The axis has logarithms of seconds."""
    marks = []
    for exponent in range(floor(axis.low), ceil(axis.high) + 1):
        for factor in (1, 3) if axis.high - axis.low > 1.6 else (1, 1.5, 2, 3, 5, 7):
            at, text = exponent + log10(factor), tick_seconds(factor * 10.0**exponent)
            if axis.low <= at <= axis.high:
                marks.append(Tick(at=axis.at(at), text=text, is_minor=factor in (1.5, 7)))
    return marks


def log_square(
    seconds: Sequence[float], traces: Callable[[Callable[[float], float]], Iterable[Markup]], **texts: str
) -> Plot:
    """A plot of two times on axes with one logarithmic range, and a line where they are equal.

    `traces` draws with a function from seconds to units of the horizontal axis.
    """
    low, high = log10(min(seconds)), log10(max(seconds))
    pad = 0.05 * (high - low + 0.1)
    axis = Axis(low - pad, high + pad)
    if axis.high - axis.low < _NARROW:
        values = enumerate(ticks(10.0**axis.low, 10.0**axis.high, 7))
        marks = [Tick(at=axis.at(log10(v)), text=tick_seconds(v), is_minor=i % 2 == 1) for i, v in values]
    else:
        marks = time_ticks(axis)
    equal = line([(0, SIDE), (SIDE, 0)], class_="limit")
    shown = [equal, *traces(lambda value: axis.at(log10(value)))]
    return plotted(shown, marks, [replace(tick, at=SIDE - tick.at) for tick in marks], **texts)
