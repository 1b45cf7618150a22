"""Predicted against measured step times of a measured search, and the believed ones of plans that were not measured.

Both axes have the same logarithmic range. A failed trial has no time and lies on the lower edge.
"""

from dataclasses import replace
from math import isfinite, log10

from markupsafe import Markup

from autopar.report.numbers import readable_seconds, tick_seconds, ticks
from autopar.report.scatter import time_ticks
from autopar.report.svg import SIDE, Plot, Tick, dots, grid, line
from autopar.search.measured.result import Left, Tried, TuneResult
from autopar.search.measured.rounds import Spread
from autopar.search.result.format import plan_in_words

_EDGE = 0.985 * SIDE  # where failed trials lie
_NARROW = 0.7  # decades: on a narrower range the ticks are round numbers at equal distances


def tuning_scatter(found: TuneResult) -> Plot | None:
    """The picture. None if there is no plan."""
    values = _values(found)
    if not values:
        return None
    low, high = log10(min(values)), log10(max(values))
    pad = 0.05 * (high - low + 0.1)
    low, high = low - pad, high + pad

    def at(seconds: float) -> float:
        return (log10(seconds) - low) / (high - low) * SIDE

    x_ticks = _ticks(low, high)
    y_ticks = [replace(one, at=SIDE - one.at) for one in x_ticks]
    content = [grid(x_ticks, y_ticks), line([(0, SIDE), (SIDE, 0)], class_="limit")]
    for left in found.left:
        place, says = (at(left.candidate.predicted_s), SIDE - at(left.believed_s)), _left_tip(left)
        rim = "left dot" if not left.why else "left out dot"
        content += [dots([place], class_=rim, data_t=says), dots([place], class_="hole dot", data_t=says)]
    best = None if found.best is None else found.tried[found.best]
    for one in (*(each for each in found.tried if each is not best), *([best] if best else [])):
        x, seconds, says = at(one.candidate.predicted_s), one.outcome.seconds, _trial_tip(one)
        if seconds is None:
            content.append(dots([(x, _EDGE)], class_="failed dot", data_t=says))
            continue
        if _is_bounded(seconds):
            ends = [(x, SIDE - at(seconds.low)), (x, SIDE - at(seconds.high))]
            content.append(line(ends, class_="interval", data_t=says))
        name = "best dot" if one is best else "pruned dot" if one.outcome.state == "pruned" else "own dot"
        content.append(dots([(x, SIDE - at(seconds.median))], class_=name, data_t=says))
    return Plot(
        content=Markup("").join(content),
        x_ticks=tuple(x_ticks),
        y_ticks=tuple(y_ticks),
        x_title="predicted step time (logarithmic)",
        y_title="measured or believed step time (logarithmic)",
        says=f"predicted against measured step time of {len(found.tried)} plans that were tried, and the believed step "
        f"time of {len(found.left)} others",
    )


def interval(seconds: Spread) -> str:
    """The interval in words; empty if there were too few steps."""
    return f"{readable_seconds(seconds.low)} to {readable_seconds(seconds.high)}" if _is_bounded(seconds) else ""


def _is_bounded(seconds: Spread) -> bool:
    return seconds.low > 0 and isfinite(seconds.high)


def _values(found: TuneResult) -> list[float]:
    """All seconds that the picture shows."""
    values = [seconds for left in found.left for seconds in (left.candidate.predicted_s, left.believed_s)]
    for one in found.tried:
        values.append(one.candidate.predicted_s)
        if (seconds := one.outcome.seconds) is not None:
            values += [seconds.median, *((seconds.low, seconds.high) if _is_bounded(seconds) else ())]
    return values


def _ticks(low: float, high: float) -> list[Tick]:
    """Of the horizontal axis."""
    if high - low >= _NARROW:
        return time_ticks(low, high)
    return [
        Tick(at=(log10(value) - low) / (high - low) * SIDE, text=tick_seconds(value), is_minor=number % 2 == 1)
        for number, value in enumerate(ticks(10.0**low, 10.0**high, 7))
    ]


def _trial_tip(one: Tried) -> str:
    outcome, what = one.outcome, f"trial {one.number + 1}: {plan_in_words(one.candidate.degrees)}"
    predicted = f"predicted {readable_seconds(one.candidate.predicted_s)}"
    if outcome.seconds is None:
        return f"{what}\n{predicted}, failed"
    within = interval(outcome.seconds)
    measured = f"measured {readable_seconds(outcome.seconds.median)}{f' ({within})' if within else ''}"
    slower = "\nsurely slower than the best plan" if outcome.state == "pruned" else ""
    return f"{what}\n{predicted}, {measured}{slower}"


def _left_tip(one: Left) -> str:
    times = f"predicted {readable_seconds(one.candidate.predicted_s)}, believed {readable_seconds(one.believed_s)}"
    return f"not measured: {plan_in_words(one.candidate.degrees)}\n{times}{', cannot run' if one.why else ''}"
