"""SVG as escaped text: elements, and plots that stretch while their text does not.

A `Plot` is an SVG without text in a box of 1000 × 1000 units, with HTML labels beside its axes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

SIDE = 1000.0  # units of a plot's sides


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element; text and attributes are escaped. ``class_`` is ``class``, ``stroke_width`` is ``stroke-width``."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(str(escape(child)) for child in children)
    return Markup(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")


def short(value: float) -> str:
    """A coordinate with one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def line(points: Sequence[tuple[float, float]], **attributes: object) -> Markup:
    """A polyline in plot units; its width is in pixels whatever the plot's size."""
    path = "".join(f"{'L' if i else 'M'}{short(x)} {short(y)}" for i, (x, y) in enumerate(points))
    return tag("path", d=path, vector_effect="non-scaling-stroke", **attributes)


def dots(points: Iterable[tuple[float, float]], **attributes: object) -> Markup:
    """Round points in one element, as lines without length; their size is the stroke's width."""
    path = "".join(f"M{short(x)} {short(y)}h0" for x, y in points)
    return tag("path", d=path, vector_effect="non-scaling-stroke", stroke_linecap="round", **attributes)


def boxes(corners: Iterable[tuple[float, float, float, float]], **attributes: object) -> Markup:
    """Rectangles in one element, each by x, y, width and height."""
    path = "".join(f"M{short(x)} {short(y)}h{short(w)}v{short(h)}h-{short(w)}z" for x, y, w, h in corners)
    return tag("path", d=path, **attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A label on an axis; `at` in plot units from the left or the top. `is_minor` ones are left out on a phone."""

    at: float
    text: str
    is_minor: bool = False

    @property
    def place(self) -> str:
        return f"{self.at / SIDE:.2%}"


@dataclass(frozen=True, slots=True)
class Axis:
    """The values from `low` to `high` in plot units from `begin` to `end`. A vertical axis ends at 0, the top."""

    low: float
    high: float
    begin: float = 0.0
    end: float = SIDE

    def at(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.begin + part * (self.end - self.begin)

    def ticks(self, values: Iterable[float], text: Callable[[float], str]) -> list[Tick]:
        return [Tick(at=self.at(value), text=text(value)) for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The parts of a plot for a template: the SVG's content, ticks, titles of the axes, a description in words."""

    content: Markup
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_title: str
    y_title: str
    says: str
    name: str = ""


def plotted(traces: Iterable[Markup], x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], **texts: str) -> Plot:
    """A plot of traces over lines at the ticks. `texts` are the other fields."""
    lines = [line([(tick.at, 0), (tick.at, SIDE)], class_="grid") for tick in x_ticks]
    lines += [line([(0, tick.at), (SIDE, tick.at)], class_="grid") for tick in y_ticks]
    return Plot(content=Markup("").join([*lines, *traces]), x_ticks=x_ticks, y_ticks=y_ticks, **texts)
