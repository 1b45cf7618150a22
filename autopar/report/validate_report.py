"""The report of `autopar validate` as a page.

Its picture has `MAX_DOTS` dots at most. Rows with the largest errors come first. Of the others, every n-th is drawn.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from markupsafe import Markup

from autopar.report.scatter import log_square
from autopar.report.svg import SIDE, Plot, dots, line
from autopar.words.numbers import capped, readable_seconds

if TYPE_CHECKING:
    from autopar.cost_model.published.ranking import RankedGroup
    from autopar.cost_model.published.validation import Measures, RowComparison, Validation

MAX_DOTS = 1_450
MAX_ROWS = 100
BAND = 0.25
# Okabe and Ito's colours, told apart with every kind of colour blindness, for the sources with most rows
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_OTHER = "#7f7f7f"


def validation_page(validation: "Validation", *, title: str, subtitle: str) -> str:
    """The whole page as text."""
    from autopar.report.page_tools import render

    timed = [c for c in validation.compared if c.time_error is not None]
    worst = sorted(timed, key=lambda c: -abs(c.time_error or 0.0))
    drawn = _drawn(worst)
    count = Counter(c.row.source_key or "" for c in timed)
    colours = dict(zip((name for name, _ in count.most_common()), COLOURS, strict=False))
    return render(
        "validate_report.html.jinja",
        title=title,
        subtitle=subtitle,
        validation=validation,
        sources=[*colours.items(), *([("others", _OTHER)] if len(count) > len(colours) else [])],
        picture=_picture(drawn, colours) if drawn else None,
        band=BAND,
        num_timed=len(timed),
        num_drawn=len(drawn),
        parts=[(capped(name), *_without_p90(figures(part))) for name, part in list(validation.by.items())[:MAX_ROWS]],
        groups=[_group(group) for group in sorted(validation.groups, key=lambda g: -g.regret)],
        worst=[_row(c) for c in worst[:MAX_ROWS]],
        most=MAX_ROWS,
        reasons=ids_by_text((row.reason, row.id) for row in validation.unmodelled),
        warnings=ids_by_text((text, row_id) for row_id, text in validation.warnings),
        percent=as_percent,
        signed=signed,
    )


def figures(part: "Measures") -> tuple[str, ...]:
    """Rows, modelled rows, timed rows and the errors of their times, rows with memory and the errors of it."""
    time, memory = part.step_time, part.memory
    errors = (*map(as_percent, (time.median, time.mean, time.p90, time.max)), signed(time.bias))
    of_memory = (str(memory.n or ""), as_percent(memory.median), as_percent(memory.p90), signed(memory.bias))
    return (str(part.rows), str(part.modelled), str(time.n or ""), *errors, *of_memory)


def _without_p90(cells: tuple[str, ...]) -> tuple[str, ...]:
    """`figures` without the 90th percentile of memory, for which the page has no room."""
    return (*cells[:-2], cells[-1])


def _group(group: "RankedGroup") -> tuple[str | int, ...]:
    best = (capped(group.predicted_best), capped(group.measured_best))
    return capped(group.name), group.layouts, f"{group.correlation:.2f}", as_percent(group.regret), *best


def _row(c: "RowComparison") -> tuple[str, ...]:
    assert c.time is not None and c.predicted is not None
    seconds = (f"{c.time.seconds:.4g}", f"{c.predicted.seconds:.4g}")
    about = (c.row.model or "(not stated)", f"{c.row.num_gpus} × {c.row.gpu_type}", c.time.derivation)
    return capped(c.row.id), signed(c.time_error), *seconds, *map(capped, about)


def ids_by_text(rows: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The ids of rows, by their reason or warning."""
    by_text: dict[str, list[str]] = {}
    for text, row_id in rows:
        by_text.setdefault(text, []).append(row_id)
    return by_text


def as_percent(value: float | None) -> str:
    """A fraction as a percentage; nothing where there is none."""
    return "" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """A fraction as a percentage with its sign."""
    return "" if value is None else f"{value:+.1%}"


def _drawn(worst: Sequence["RowComparison"]) -> list[tuple["RowComparison", float, float]]:
    """The rows of the picture with their measured and predicted seconds. The worst rows come last, and lie on top."""
    first, others = worst[: MAX_DOTS // 3], worst[MAX_DOTS // 3 :]
    stride = max(1, ceil(len(others) / (MAX_DOTS - len(first))))
    drawn = [*others[::stride], *first]
    return [
        (c, c.time.seconds, c.time.seconds * (1 + c.time_error)) for c in drawn if c.time and c.time_error is not None
    ]


def _picture(drawn: Sequence[tuple["RowComparison", float, float]], colours: dict[str, str]) -> Plot:
    seconds = [each for _, measured, predicted in drawn for each in (measured, predicted)]
    ends = (min(seconds), max(seconds))

    def traces(at: Callable[[float], float]) -> Iterator[Markup]:
        for factor in (1 + BAND, 1 / (1 + BAND)):
            yield line([(at(end), SIDE - at(end * factor)) for end in ends], class_="grid")
        for c, measured, predicted in drawn:
            times = f"measured {readable_seconds(measured)}, predicted {readable_seconds(predicted)}"
            says = f"{capped(c.row.id)}\n{times} ({signed(c.time_error)})"
            colour = colours.get(c.row.source_key or "", _OTHER)
            yield dots([(at(measured), SIDE - at(predicted))], class_="own dot", style=f"stroke:{colour}", data_t=says)

    return log_square(
        seconds,
        traces,
        x_title="measured step time (logarithmic)",
        y_title="predicted step time (logarithmic)",
        says=f"predicted against measured step time of {len(drawn)} rows",
    )
