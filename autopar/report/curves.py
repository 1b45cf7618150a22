"""What-if curves and Optuna's history: lines over one thing."""

from collections.abc import Callable
from math import log2
from typing import Any

from markupsafe import Markup

from autopar.report.svg import SIDE, Axis, Tick, dots, line, plotted, tag
from autopar.search.result.format import readable_value
from autopar.search.result.report_data import Curve, CurvePoint
from autopar.search.result.result import SearchResult, Trial
from autopar.words.numbers import amount, readable_seconds, ticks

MARGIN = 60.0  # plot units left and right of the first and the last point


def panel(curve: Curve) -> dict[str, Any]:
    """A what-if curve of tokens a second.

    It has a title, a plot and a table. `held` names the values that stay.
    """
    rates = [rate for p in curve.points for rate in (p.tokens_per_s, p.bound_tokens_per_s) if rate]
    top = 1.12 * max(rates, default=1.0)
    low, high = log2(curve.points[0].factor), log2(curve.points[-1].factor)

    x, y = Axis(low, high, MARGIN, SIDE - MARGIN), Axis(0.0, top, SIDE, 0.0)
    x_ticks = [
        Tick(at=x.at(log2(p.factor)), text=_setting(curve, p), is_minor=curve.unit == "B/s" and i % 2 == 1)
        for i, p in enumerate(curve.points)
    ]
    rates_of = {
        "limit": {p: p.bound_tokens_per_s for p in curve.points if p.bound_tokens_per_s is not None},
        "own": {p: p.tokens_per_s for p in curve.points if p.tokens_per_s is not None and p.fits},
    }
    places = {n: {p: (x.at(log2(p.factor)), y.at(rate)) for p, rate in of.items()} for n, of in rates_of.items()}
    traces = [line(list(at.values()), class_=name) for name, at in places.items()]
    traces += [
        dots([place], class_=f"{name} dot", data_t=_tip(curve, p))
        for name, at in places.items()
        for p, place in at.items()
    ]
    return {
        "title": curve.name[:1].upper() + curve.name[1:],
        "held": curve.held,
        "plot": plotted(
            traces,
            x_ticks,
            y.ticks(ticks(0, top, 5), amount),
            x_title=curve.name if not curve.unit or curve.unit == "B/s" else f"{curve.name} in {curve.unit}",
            y_title="tokens/s",
            says=f"tokens a second over {curve.name}",
        ),
        "rows": [_row(curve, p) for p in curve.points],
    }


def _setting(curve: Curve, point: CurvePoint) -> str:
    if curve.unit == "B/s":
        return amount(point.value, curve.unit)
    return f"{point.value:,.0f}"


def _tip(curve: Curve, pt: CurvePoint) -> str:
    step = "this plan cannot be split so"
    if pt.step_s is not None:
        step = f"this plan: {readable_seconds(pt.step_s)}{'' if pt.fits else ', does not fit'}"
    bound = "no candidate fits" if pt.bound_s is None else f"no candidate below {readable_seconds(pt.bound_s)}"
    return f"{_setting(curve, pt)} {curve.unit if curve.unit != 'B/s' else ''} (× {pt.factor:g})\n{step}\n{bound}"


def _row(curve: Curve, pt: CurvePoint) -> tuple[str, ...]:
    plan = "cannot be split so" if pt.step_s is None else readable_seconds(pt.step_s) if pt.fits else "does not fit"
    bound = "none fits" if pt.bound_s is None else readable_seconds(pt.bound_s)
    rate = amount(pt.tokens_per_s, "tokens/s") if pt.tokens_per_s and pt.fits else ""
    return (f"× {pt.factor:g}", _setting(curve, pt), plan, rate, bound)


# ---- trials ----


def history(result: SearchResult, most: int) -> dict[str, Any] | None:
    """Trials as a plot, how much each parameter decides, and a table of trials. None where no trial was told."""
    told = [t for t in result.trials if t.value is not None]
    if not told:
        return None
    values = [t.value for t in told if t.value is not None]
    best = min((t.value for t in told if _fits(t) and t.value is not None), default=min(values))
    top = min(max(values), 2 * best)  # slower ones are drawn at the upper end
    low, high = best - 0.08 * (top - best or best), top + 0.04 * (top - best or best)
    last = max(t.number for t in told) or 1

    x, y = Axis(0.0, last, MARGIN / 2, SIDE - MARGIN / 2), Axis(low, high, SIDE, 0.0)

    def place(number: int, value: float) -> tuple[float, float]:
        return x.at(number), y.at(min(value, top))

    traces = [_best_so_far(told, place)]
    for trial in told:
        name = "trial dot" if _fits(trial) else "trial misses dot"
        traces.append(dots([place(trial.number, trial.value or 0.0)], class_=name, data_t=_trial_tip(result, trial)))
    return {
        "plot": plotted(
            traces,
            x.ticks([n for n in ticks(0, last, 8) if n == int(n)], "{:g}".format),
            y.ticks(ticks(low, high, 5), lambda value: readable_value(value, result.unit)),
            x_title="trial",
            y_title="step time" if result.objective == "time" else result.objective,
            says=f"{len(told)} trials of Optuna",
        ),
        "importance": sorted(result.importance.items(), key=lambda pair: -pair[1]),
        "rows": [_trial_row(result, t) for t in result.trials[:most]],
        "left_out": max(0, len(result.trials) - most),
        "names": list(dict.fromkeys(name for t in result.trials for name in t.params)),
    }


def _fits(trial: Trial) -> bool:
    return trial.missing_bytes is None or trial.missing_bytes <= 0


def _best_so_far(told: list[Trial], place: Callable[[int, float], tuple[float, float]]) -> Markup:
    points: list[tuple[float, float]] = []
    best = float("inf")
    for trial in sorted(told, key=lambda trial: trial.number):
        value = trial.value
        if value is not None and _fits(trial) and value < best:
            if points:
                points.append((place(trial.number, best)[0], points[-1][1]))
            points.append(place(trial.number, value))
            best = value
    if points:
        points.append((SIDE, points[-1][1]))
    return line(points, class_="own") if points else tag("g")


def _trial_tip(result: SearchResult, tr: Trial) -> str:
    value = "not told" if tr.value is None else readable_value(tr.value, result.unit)
    misses = "" if _fits(tr) else f", {(tr.missing_bytes or 0.0) / 1e9:.2f} GB too much"
    return f"trial {tr.number}, {tr.source}: {value}{misses}"


def _trial_row(result: SearchResult, tr: Trial) -> dict[str, str | float | int]:
    return {
        "number": tr.number,
        "value": "" if tr.value is None else readable_value(tr.value, result.unit),
        "sort": "" if tr.value is None else tr.value,
        "room": "" if tr.missing_bytes is None else f"{-tr.missing_bytes / 1e9:.2f} GB",
        "left": "" if tr.missing_bytes is None else -tr.missing_bytes,
        "source": tr.source,
        "state": tr.state,
        **{f"param {name}": str(value) for name, value in tr.params.items()},
    }
