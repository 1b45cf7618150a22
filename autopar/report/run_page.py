"""A run directory as a page: loss, throughput and memory over steps."""

import math
from collections.abc import Sequence

from autopar.report.page_tools import render
from autopar.report.svg import SIDE, Axis, Plot, line, plotted
from autopar.runs.record import read_info, read_metrics
from autopar.runs.status import curve, run_status, steps_of
from autopar.words.numbers import amount, ticks

_MARGIN = 20.0  # plot units beside the curve
_METRICS = (
    ("loss", "loss"),
    ("tokens_per_s", "tokens/s"),
    ("step_s", "seconds of a step"),
    ("learning_rate", "learning rate"),
    ("gradient_norm", "gradient norm"),
    ("peak_bytes", "peak memory in bytes"),
)


def run_report(path: str) -> str:
    """The page of a run directory. Raises `InputError` for a folder that is no run."""
    info, metrics, now = read_info(path), read_metrics(path), run_status(path)
    lines = [row for row in metrics.lines if not row.skipped]
    plots = [(title, _plot(title, steps_of(lines, name))) for name, title in _METRICS]
    return render(
        "run.html.jinja",
        run=now,
        info=info,
        plots=[(title, plot) for title, plot in plots if plot is not None],
    )


def _plot(title: str, points: Sequence[tuple[int, float]]) -> Plot | None:
    """A curve over steps. None if fewer than two values are known."""
    shown = [(step, value) for step, value in curve(points) if math.isfinite(value)]
    if len(shown) < 2:
        return None
    values = [value for _, value in shown]
    low, high = min(values), max(values)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    first, last = shown[0][0], shown[-1][0]
    x, y = Axis(first, last, _MARGIN, SIDE - _MARGIN), Axis(low - pad, high + pad, SIDE, 0.0)
    return plotted(
        [line([(x.at(step), y.at(value)) for step, value in shown], class_="own")],
        x.ticks([n for n in ticks(first, last, 6) if n == int(n)], "{:,.0f}".format),
        y.ticks(ticks(y.low, y.high, 5), amount),
        x_title="step",
        y_title=title,
        says=f"{title} over {len(points)} steps",
    )
