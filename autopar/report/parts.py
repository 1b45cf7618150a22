"""The parts of a step and of a rank's memory: their names in words, their colours, and bars made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autopar.cost_model.parts import MEMORY
from autopar.report.svg import SIDE, line, short, tag
from autopar.search.result.report_data import WAITING
from autopar.search.result.result import PARTS
from autopar.words.numbers import percent, readable_bytes, readable_seconds

# computing in blue, communication in orange and red, the rest in green and grey; told apart without red and green too
SECONDS_COLOURS: Mapping[str, str] = {
    "products": "#1f5fa6",
    "attention": "#4a8fd3",
    "memory-bound": "#8fbbe8",
    "host": "#b9cbe0",
    "expert counts": "#d3dff0",
    "recomputation": "#6f5cb8",
    "embedding, head, loss": "#2f9a94",
    "tensor collectives": "#d9741a",
    "context collectives": "#e8963f",
    "expert collectives": "#f0b465",
    "shard collectives": "#b93c10",
    "data collectives": "#e2604a",
    "messages": "#e3b008",
    "bubble": "#98a2ad",
    "gradient accumulation": "#7f9c3c",
    "optimizer": "#4d7c2f",
    "fixed": "#6b7280",
    "stragglers": "#b9c0c8",
    WAITING: "#d5dae0",
}
BYTES_COLOURS: Mapping[str, str] = {
    "parameters": "#1f5fa6",
    "gradients": "#4a8fd3",
    "optimizer state": "#8fbbe8",
    "gathered": "#d9741a",
    "activations": "#2f9a94",
    "logits": "#83c5bb",
    "workspace": "#6f5cb8",
    "cache": "#b9c0c8",
    "reserve": "#98a2ad",
}
_OTHER = "#888888"  # of a part that this version does not know
SECONDS_WORDS: Mapping[str, str] = {**PARTS, WAITING: WAITING}
LEAST_WIDTH = 0.3  # plot units below which a segment is not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of a key: colour, name, amount and share."""

    colour: str
    words: str
    value: str
    share: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One stacked bar, its name and what stands behind it."""

    name: str
    content: Markup
    value: str
    says: str
    detail: str = ""


def seconds_key(parts: Mapping[str, float]) -> list[Entry]:
    """The parts of a step, the longest first."""
    return _key(parts, SECONDS_COLOURS, SECONDS_WORDS, readable_seconds)


def bytes_key(parts: Mapping[str, float]) -> list[Entry]:
    """The parts of a rank's memory, the largest first."""
    return _key(parts, BYTES_COLOURS, MEMORY, readable_bytes)


def seconds_bar(name: str, parts: Mapping[str, float], longest: float, detail: str = "") -> Bar:
    """A step's bar on a scale that ends with `longest` seconds; a longer one is torn off there."""
    total = sum(parts.values())
    content = _segments(parts, longest, SECONDS_COLOURS, SECONDS_WORDS, readable_seconds)
    if total > 1.001 * longest:
        content += Markup("").join(line([(at, SIDE), (at + 12, 0)], class_="torn") for at in (955.0, 970.0))
    value = readable_seconds(total)
    return Bar(name=name, content=content, value=value, says=f"{name}: {value} a step", detail=detail)


def bytes_bar(name: str, parts: Mapping[str, float], capacity: float, detail: str = "") -> Bar:
    """A rank's bar, with a mark at the device's capacity."""
    needed = sum(value for part, value in parts.items() if part != "cache")
    shown = dict(parts) | {"cache": max(0.0, min(parts.get("cache", 0.0), capacity - needed))}
    longest = 1.06 * max(needed, capacity)
    content = _segments(shown, longest, BYTES_COLOURS, MEMORY, readable_bytes)
    at = SIDE * capacity / longest
    mark = line([(at, 0), (at, SIDE)], class_="capacity")
    value = f"{readable_bytes(needed)} of {readable_bytes(capacity)}"
    return Bar(name=name, content=content + mark, value=value, says=f"{name} needs {value}", detail=detail)


def _segments(
    parts: Mapping[str, float],
    longest: float,
    colours: Mapping[str, str],
    words: Mapping[str, str],
    readable: Callable[[float], str],
) -> Markup:
    total, at, rects = sum(parts.values()) or 1.0, 0.0, []
    for name in (*(name for name in colours if name in parts), *(name for name in parts if name not in colours)):
        width = SIDE * parts[name] / longest if longest else 0.0
        if width >= LEAST_WIDTH:
            tip = f"{words.get(name, name)}: {readable(parts[name])} ({percent(parts[name] / total)})"
            colour = colours.get(name, _OTHER)
            rects.append(tag("rect", x=short(at), width=short(width), height="1000", fill=colour, data_t=tip))
        at += width
    return Markup("").join(rects)


def _key(
    parts: Mapping[str, float], colours: Mapping[str, str], words: Mapping[str, str], readable: Callable[[float], str]
) -> list[Entry]:
    total = sum(parts.values()) or 1.0
    order: Sequence[str] = sorted((name for name in parts if parts[name] > 0), key=lambda name: -parts[name])
    return [
        Entry(
            colour=colours.get(name, _OTHER),
            words=words.get(name, name),
            value=readable(parts[name]),
            share=percent(parts[name] / total),
        )
        for name in order
    ]
