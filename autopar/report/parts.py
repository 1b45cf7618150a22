"""The parts of a step and of a rank's memory: their names in words, their colours, and bars made of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup

from autopar.cost_model.parts import MEMORY
from autopar.report.svg import SIDE, line, short, tag
from autopar.search.result.report_data import WAITING
from autopar.search.result.result import PARTS
from autopar.words.numbers import percent, readable_bytes, readable_seconds

# computing in blue, communication in orange and red, the rest in green and grey; told apart without red and green too
_COLOURS = json.loads((resources.files("autopar.report") / "colours.json").read_text("utf-8"))
_OTHER = "#888888"  # of a part that this version does not know
LEAST_WIDTH = 0.3  # plot units below which a segment is not drawn


@dataclass(frozen=True, slots=True)
class PartWords:
    """How parts are shown: their colours, their words and their amounts."""

    colours: Mapping[str, str]
    words: Mapping[str, str]
    readable: Callable[[float], str]

    def segments(self, parts: Mapping[str, float], longest: float) -> Markup:
        """Coloured parts of a bar on a scale that ends with `longest`."""
        total, at, rects = sum(parts.values()) or 1.0, 0.0, []
        known = [name for name in self.colours if name in parts]
        for name in (*known, *(name for name in parts if name not in self.colours)):
            width = SIDE * parts[name] / longest if longest else 0.0
            if width >= LEAST_WIDTH:
                tip = f"{self.words.get(name, name)}: {self.readable(parts[name])} ({percent(parts[name] / total)})"
                colour = self.colours.get(name, _OTHER)
                rects.append(tag("rect", x=short(at), width=short(width), height="1000", fill=colour, data_t=tip))
            at += width
        return Markup("").join(rects)

    def key(self, parts: Mapping[str, float]) -> list[dict[str, str]]:
        """The key of the parts, the largest first: colour, name, amount and share."""
        total = sum(parts.values()) or 1.0
        return [
            {
                "colour": self.colours.get(name, _OTHER),
                "words": self.words.get(name, name),
                "value": self.readable(value),
                "share": percent(value / total),
            }
            for name, value in sorted(parts.items(), key=lambda part: -part[1])
            if value > 0
        ]


SECONDS = PartWords(_COLOURS["seconds"], {**PARTS, WAITING: WAITING}, readable_seconds)
BYTES = PartWords(_COLOURS["bytes"], MEMORY, readable_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One stacked bar, its name and what stands behind it."""

    name: str
    content: Markup
    value: str
    says: str
    detail: str = ""


def seconds_bar(name: str, parts: Mapping[str, float], longest: float, detail: str = "") -> Bar:
    """A step's bar on a scale that ends with `longest` seconds; a longer one is torn off there."""
    total = sum(parts.values())
    content = SECONDS.segments(parts, longest)
    if total > 1.001 * longest:
        content += Markup("").join(line([(at, SIDE), (at + 12, 0)], class_="torn") for at in (955.0, 970.0))
    value = readable_seconds(total)
    return Bar(name=name, content=content, value=value, says=f"{name}: {value} a step", detail=detail)


def bytes_bar(name: str, parts: Mapping[str, float], capacity: float, detail: str = "") -> Bar:
    """A rank's bar, with a mark at the device's capacity."""
    peak = sum(parts.values())
    longest = 1.06 * max(peak, capacity)
    content = BYTES.segments(parts, longest)
    at = SIDE * capacity / longest
    mark = line([(at, 0), (at, SIDE)], class_="capacity")
    value = f"{readable_bytes(peak)} of {readable_bytes(capacity)}"
    return Bar(name=name, content=content + mark, value=value, says=f"{name} needs {value}", detail=detail)
