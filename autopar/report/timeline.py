"""The pipeline's time line: a lane for each rank, passes as boxes, waiting as the lane's ground."""

from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from autopar.report.svg import SIDE, Plot, Tick, boxes, line
from autopar.search.result.report_data import Timeline
from autopar.words.numbers import readable_seconds, tick_seconds, ticks

MOST_DRAWN = 2400  # passes: more would make the page large and the boxes invisible
KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, for inputs",
    "W": "backward, for weights",
}
BREAK = 24.0  # plot units between the beginning and the end of a long time line
LANE = 0.78  # part of a lane that its boxes fill


def lanes(timeline: Timeline) -> dict[str, Any]:
    """The drawing; of long lists the beginning and the end.

    For tooltips it has the passes: rank, kind, stage, micro-batch, x from and to, seconds from and to.
    """
    passes, gap, left_out = list(timeline.passes), timeline.gap, timeline.left_out
    if len(passes) > MOST_DRAWN:
        drawn = sorted(passes, key=lambda p: p[4])
        first, last = drawn[MOST_DRAWN // 2], drawn[len(drawn) - MOST_DRAWN // 2]
        gap = (min(first[4], gap[0]) if gap else first[4], max(last[4], gap[1]) if gap else last[4])
        passes = [p for p in drawn if not gap[0] <= p[4] < gap[1]]
        left_out += len(drawn) - len(passes)
    place = _places(timeline.seconds, gap)
    height = SIDE / timeline.num_ranks
    rows, corners = [], dict[str, list[tuple[float, float, float, float]]]()
    for rank, kind, stage, micro_batch, start, end in passes:
        x, to = place(start), place(end)
        corners.setdefault(kind, []).append((x, height * (rank + (1 - LANE) / 2), max(to - x, 0.4), LANE * height))
        rows.append([rank, kind, stage, micro_batch, round(x), round(to), float(f"{start:.4g}"), float(f"{end:.4g}")])
    kinds = {kind: words for kind, words in KINDS.items() if kind in corners}
    ground = boxes(
        [(0, height * (r + (1 - LANE) / 2), SIDE, LANE * height) for r in range(timeline.num_ranks)], class_="idle"
    )
    content = [ground, *(boxes(corners[kind], class_=f"pass {kind}") for kind in kinds)]
    if gap is not None:
        middle = place(gap[0]) + BREAK / 2
        content.append(boxes([(middle - BREAK / 2, 0, BREAK, SIDE)], class_="break"))
        content.append(line([(middle, 0), (middle, SIDE)], class_="cut"))
    every = max(1, -(-timeline.num_ranks // 16))
    return {
        "plot": Plot(
            content=Markup("").join(content),
            x_ticks=_ticks(timeline.seconds, gap),
            y_ticks=[Tick(at=height * (r + 0.5), text=f"rank {r}") for r in range(0, timeline.num_ranks, every)],
            x_title="seconds of one run of the schedule",
            y_title="",
            says=f"time line of {timeline.num_ranks} pipeline ranks over {readable_seconds(timeline.seconds)}",
            name="timeline",
        ),
        "rows": rows,
        "ranks": timeline.num_ranks,
        "kinds": kinds,
        "left_out": left_out,
        "is_broken": gap is not None,
    }


def _places(seconds: float, gap: tuple[float, float] | None) -> Callable[[float], float]:
    """From seconds to plot units. A gap takes `BREAK` units."""
    begin, end = gap or (seconds, seconds)
    width = BREAK if gap else 0.0
    scale = (SIDE - width) / max(seconds - (end - begin), 1e-12)

    def place(at: float) -> float:
        if at <= begin:
            return at * scale
        return min(SIDE, begin * scale + width + max(0.0, at - end) * scale)

    return place


def _ticks(seconds: float, gap: tuple[float, float] | None) -> list[Tick]:
    place = _places(seconds, gap)
    runs = [ticks(0.0, seconds, 8)] if gap is None else [ticks(0.0, gap[0], 4), ticks(gap[1], seconds, 4)]
    marks = [(value, i % 2 == 1, run is runs[-1]) for run in runs for i, value in enumerate(run)]
    return [
        Tick(at=place(value), text=tick_seconds(value), is_minor=is_minor)
        for value, is_minor, is_last_run in marks
        if not is_last_run or place(value) < SIDE * 0.97
    ]
