"""What-if curves and Optuna's history: lines over one thing."""

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from markupsafe import Markup

from autopar.report.svg import SIDE, Plot, Tick, dots, grid, line, tag
from autopar.search.result.format import readable_value
from autopar.search.result.report_data import Curve, CurvePoint
from autopar.search.result.result import SearchResult, Trial
from autopar.words.numbers import amount, readable_seconds, ticks

MARGIN = 60.0  # plot units left and right of the first and the last point


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A curve: its title, the values that stay the same, its plot, and its figures as a table."""

    title: str
    held: str
    plot: Plot
    rows: list[tuple[str, ...]]


def panels(found: SearchResult) -> list[Panel]:
    """One for each what-if curve: tokens a second over the thing that changes."""
    return [_panel(curve) for curve in found.what_if]


def _panel(curve: Curve) -> Panel:
    rates = [rate for one in curve.points for rate in (one.tokens_per_s, one.bound_tokens_per_s) if rate]
    top = 1.12 * max(rates, default=1.0)
    low, high = log2(curve.points[0].factor), log2(curve.points[-1].factor)

    def place(one: CurvePoint, rate: float) -> tuple[float, float]:
        part = (log2(one.factor) - low) / (high - low) if high > low else 0.5
        return MARGIN + part * (SIDE - 2 * MARGIN), SIDE * (1 - rate / top)

    x_ticks = [
        Tick(at=place(one, 0)[0], text=_setting(curve, one), is_minor=curve.unit == "B/s" and i % 2 == 1)
        for i, one in enumerate(curve.points)
    ]
    y_ticks = [Tick(at=SIDE * (1 - value / top), text=amount(value) or "0") for value in ticks(0, top, 5)]
    fitting = [one for one in curve.points if one.tokens_per_s is not None and one.fits]
    bounded = [one for one in curve.points if one.bound_tokens_per_s is not None]
    content = [grid(x_ticks, y_ticks)]
    content.append(line([place(one, one.bound_tokens_per_s or 0.0) for one in bounded], class_="limit"))
    content.append(line([place(one, one.tokens_per_s or 0.0) for one in fitting], class_="own"))
    for group, name in ((bounded, "limit dot"), (fitting, "own dot")):
        for one in group:
            rate = (one.bound_tokens_per_s if name == "limit dot" else one.tokens_per_s) or 0.0
            content.append(dots([place(one, rate)], class_=name, data_t=_tip(curve, one)))
    return Panel(
        title=curve.name[:1].upper() + curve.name[1:],
        held=curve.held,
        plot=Plot(
            content=Markup("").join(content),
            x_ticks=tuple(x_ticks),
            y_ticks=tuple(y_ticks),
            x_title=curve.name if not curve.unit or curve.unit == "B/s" else f"{curve.name} in {curve.unit}",
            y_title="tokens/s",
            says=f"tokens a second over {curve.name}",
        ),
        rows=[_row(curve, one) for one in curve.points],
    )


def _setting(curve: Curve, one: CurvePoint) -> str:
    if curve.unit == "B/s":
        return amount(one.value, curve.unit)
    return f"{one.value:,.0f}"


def _tip(curve: Curve, one: CurvePoint) -> str:
    step = "this plan cannot be split so"
    if one.step_s is not None:
        step = f"this plan: {readable_seconds(one.step_s)}{'' if one.fits else ', does not fit'}"
    bound = "no candidate fits" if one.bound_s is None else f"no candidate below {readable_seconds(one.bound_s)}"
    return f"{_setting(curve, one)} {curve.unit if curve.unit != 'B/s' else ''} (× {one.factor:g})\n{step}\n{bound}"


def _row(curve: Curve, one: CurvePoint) -> tuple[str, ...]:
    plan = "cannot be split so" if one.step_s is None else readable_seconds(one.step_s) if one.fits else "does not fit"
    bound = "none fits" if one.bound_s is None else readable_seconds(one.bound_s)
    rate = amount(one.tokens_per_s, "tokens/s") if one.tokens_per_s and one.fits else ""
    return (f"× {one.factor:g}", _setting(curve, one), plan, rate, bound)


# ---- trials ----


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Trials as a plot, how much each parameter decides, and the trials as a table."""

    plot: Plot
    importance: list[tuple[str, float]]
    rows: list[dict[str, str | float | int]]
    left_out: int
    names: list[str]


def history(found: SearchResult, most: int) -> History | None:
    """The study, or None where no trial was told."""
    told = [one for one in found.trials if one.value is not None]
    if not told:
        return None
    values = [one.value for one in told if one.value is not None]
    best = min((one.value for one in told if _fits(one) and one.value is not None), default=min(values))
    top = min(max(values), 2 * best)  # slower ones are drawn at the upper end
    low, high = best - 0.08 * (top - best or best), top + 0.04 * (top - best or best)
    last = max(one.number for one in told) or 1

    def place(number: int, value: float) -> tuple[float, float]:
        part = MARGIN / 2 + (SIDE - MARGIN) * number / last
        return part, SIDE * (1 - (min(value, top) - low) / (high - low))

    y_ticks = [
        Tick(at=SIDE * (1 - (value - low) / (high - low)), text=readable_value(value, found.unit))
        for value in ticks(low, high, 5)
    ]
    x_ticks = [Tick(at=place(int(n), low)[0], text=f"{n:g}") for n in ticks(0, last, 8) if n == int(n)]
    content = [grid(x_ticks, y_ticks), _best_so_far(told, place)]
    for one in told:
        name = "trial dot" if _fits(one) else "trial misses dot"
        content.append(dots([place(one.number, one.value or 0.0)], class_=name, data_t=_trial_tip(found, one)))
    return History(
        plot=Plot(
            content=Markup("").join(content),
            x_ticks=tuple(x_ticks),
            y_ticks=tuple(y_ticks),
            x_title="trial",
            y_title="step time" if found.objective == "time" else found.objective,
            says=f"{len(told)} trials of Optuna",
        ),
        importance=sorted(found.importance.items(), key=lambda pair: -pair[1]),
        rows=[_trial_row(found, one) for one in found.trials[:most]],
        left_out=max(0, len(found.trials) - most),
        names=list(dict.fromkeys(name for one in found.trials for name in one.params)),
    )


def _fits(one: Trial) -> bool:
    return one.missing_bytes is None or one.missing_bytes <= 0


def _best_so_far(told: list[Trial], place: Callable[[int, float], tuple[float, float]]) -> Markup:
    points: list[tuple[float, float]] = []
    best = float("inf")
    for one in sorted(told, key=lambda trial: trial.number):
        value = one.value
        if value is not None and _fits(one) and value < best:
            if points:
                points.append((place(one.number, best)[0], points[-1][1]))
            points.append(place(one.number, value))
            best = value
    if points:
        points.append((SIDE, points[-1][1]))
    return line(points, class_="own") if points else tag("g")


def _trial_tip(found: SearchResult, one: Trial) -> str:
    value = "not told" if one.value is None else readable_value(one.value, found.unit)
    misses = "" if _fits(one) else f", {(one.missing_bytes or 0.0) / 1e9:.2f} GB too much"
    return f"trial {one.number}, {one.source}: {value}{misses}"


def _trial_row(found: SearchResult, one: Trial) -> dict[str, str | float | int]:
    return {
        "number": one.number,
        "value": "" if one.value is None else readable_value(one.value, found.unit),
        "sort": "" if one.value is None else one.value,
        "room": "" if one.missing_bytes is None else f"{-one.missing_bytes / 1e9:.2f} GB",
        "left": "" if one.missing_bytes is None else -one.missing_bytes,
        "source": one.source,
        "state": one.state,
        **{f"param {name}": str(value) for name, value in one.params.items()},
    }
