"""The report of `autopar validate` as one HTML page: no script, nothing loaded, names escaped, shapes beside colours.

The picture has `MAX_DOTS` dots at most: the furthest from the diagonal and every n-th of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from autopar.words.numbers import capped

if TYPE_CHECKING:
    from autopar.cost_model.published.validation import RowComparison, Validation

MAX_DOTS = 1_500
_MAX_ROWS = 100
MAX_SOURCES = 40
_MAX_NAME_CHARS = 100
_BAND = 0.25
# Okabe and Ito's colours, told apart with every kind of colour blindness; with four shapes, 28 sources.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f")
SHAPES = ("circle", "square", "triangle", "diamond")
SIZE, MARGIN = 480, 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A row in the picture: its place in SVG units, its label, and the number of its source."""

    x: float
    y: float
    label: str
    source: int


def validation_page(validation: Validation, *, title: str, subtitle: str) -> str:
    """The whole page as text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": as_percent, "signed": signed, "short": short_name}
    text = resources.files("autopar.report").joinpath("validate_report.html.jinja").read_text(encoding="utf-8")
    timed = [c for c in validation.compared if c.time_error is not None]
    worst = sorted(timed, key=lambda c: -abs(c.time_error or 0.0))
    return environment.from_string(text).render(
        title=title,
        subtitle=subtitle,
        overall=validation.overall,
        weighed=validation.mean_over_sources,
        column=validation.by_column,
        parts=list(validation.by.items())[:_MAX_ROWS],
        parts_left_out=max(0, len(validation.by) - _MAX_ROWS),
        groups=sorted(validation.groups, key=lambda g: -g.regret)[:_MAX_ROWS],
        groups_left_out=max(0, len(validation.groups) - _MAX_ROWS),
        worst=worst[:_MAX_ROWS],
        num_timed=len(timed),
        reasons=list(reasons(validation).items())[:_MAX_ROWS],
        warnings=list(warnings(validation).items())[:_MAX_ROWS],
        picture=_picture(timed, worst) if timed else None,
        band=_BAND,
    )


def reasons(validation: Validation) -> dict[str, list[str]]:
    """The rows that were not modelled, by reason."""
    return _by_text((row.id, row.reason) for row in validation.unmodelled)


def warnings(validation: Validation) -> dict[str, list[str]]:
    """The rows with a warning, by its text."""
    return _by_text(validation.warnings)


def _by_text(rows: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    by_text: dict[str, list[str]] = {}
    for row_id, text in rows:
        by_text.setdefault(text, []).append(row_id)
    return by_text


def as_percent(value: float | None) -> str:
    """A fraction as a percentage; nothing where there is none."""
    return "" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """A fraction as a percentage with its sign."""
    return "" if value is None else f"{value:+.1%}"


def short_name(name: str | None) -> str:
    """A name of bounded length."""
    return capped(name or "(not stated)", _MAX_NAME_CHARS)


def _picture(timed: Sequence[RowComparison], worst: Sequence[RowComparison]) -> dict[str, Any]:
    """Dots, ticks and the band of the picture in SVG units."""
    first = worst[: MAX_DOTS // 3]
    others = worst[len(first) :]
    stride = max(1, ceil(len(others) / (MAX_DOTS - len(first))))
    drawn = [*others[::stride], *first]  # the worst lie on top
    sources = sorted({c.row.source_key or "" for c in drawn})
    values = [value for c in timed for value in _seconds(c)]
    low, high = floor(log10(min(values)) * 2) / 2, ceil(log10(max(values)) * 2) / 2
    high = max(high, low + 0.5)

    def place(exponent: float) -> float:
        return (exponent - low) / (high - low) * (SIZE - 2 * MARGIN)

    def dot(c: RowComparison) -> Dot:
        measured, predicted = _seconds(c)
        source = c.row.source_key or ""
        label = (
            f"{short_name(c.row.id)}: measured {measured:.4g} s, predicted {predicted:.4g} s ({signed(c.time_error)})"
        )
        x, y = MARGIN + place(log10(measured)), SIZE - MARGIN - place(log10(predicted))
        return Dot(x=round(x, 1), y=round(y, 1), label=label, source=sources.index(source))

    shift = log10(1 + _BAND) / (high - low) * (SIZE - 2 * MARGIN)
    return {
        "size": SIZE,
        "margin": MARGIN,
        "shift": round(shift, 1),
        "dots": [dot(c) for c in drawn],
        "left_out": len(timed) - len(drawn),
        "sources": [(short_name(name), *_look(i)) for i, name in enumerate(sources[:MAX_SOURCES])],
        "looks": [_look(i) for i in range(len(sources))],
        "ticks": [(round(place(e), 1), f"{10.0**e:g}") for e in range(ceil(low - 1e-9), floor(high + 1e-9) + 1)],
    }


def _seconds(c: RowComparison) -> tuple[float, float]:
    assert c.time is not None and c.time_error is not None
    return c.time.seconds, c.time.seconds * (1 + c.time_error)


def _look(source: int) -> tuple[str, str]:
    return COLOURS[source % len(COLOURS)], SHAPES[source // len(COLOURS) % len(SHAPES)]
