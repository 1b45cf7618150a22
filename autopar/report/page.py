"""A search result as one HTML file that needs nothing else: no network, no other file, no library in the browser."""

from typing import Any

from autopar.cost_model.interval import usable_bytes
from autopar.report.block import drawing
from autopar.report.curves import history, panel
from autopar.report.page_tools import render
from autopar.report.parts import BYTES, SECONDS, Bar, bytes_bar, seconds_bar
from autopar.report.scatter import scatter_chart
from autopar.report.timeline import lanes
from autopar.report.words import as_sentence
from autopar.search.result.format import what_does_not_fit
from autopar.search.result.report_data import Details, RankCost
from autopar.search.result.result import PARTS, Contender, SearchResult

MOST_DRAWN_TRIALS = 150  # rows of the table
MOST_BARS = 24
LONGEST = 2.0  # times the best step: bars of slower plans are torn off
_SAME = 0.002  # ranks whose parts differ by less than this part of the step are drawn once


def html_report(result: SearchResult) -> str:
    """The page of a search."""
    chart = scatter_chart(result)
    timeline = None if result.details is None or result.details.timeline is None else lanes(result.details.timeline)
    data: dict[str, Any] = {}
    if chart is not None:
        data["candidates"] = {"rows": chart["rows"], "schedules": chart["schedules"], "fewer": chart["has_fewer"]}
    if timeline is not None:
        data["timeline"] = {name: timeline[name] for name in ("rows", "ranks", "kinds")}
    return render(
        "search.html.jinja",
        found=result,
        misses=as_sentence(what_does_not_fit(result.counted)),
        plans=_plans(result),
        ranks=None if result.details is None else _ranks(result, result.details),
        chart=chart,
        timeline=timeline,
        terms=_terms(result),
        closest=_closest(result),
        full=usable_bytes(1.0),
        panels=[panel(curve) for curve in result.what_if],
        trials=history(result, MOST_DRAWN_TRIALS),
        drawing=None if result.block is None else drawing(result.block),
        data=data,
    )


# ---- the parts of the page ----


def _plans(result: SearchResult) -> list[dict[str, Any]]:
    """The best plan, the next ones and those chosen by hand, on one scale; those without room come last."""
    if result.best is None:
        return []
    chosen: list[tuple[str, Contender]] = [("Best", result.best)]
    chosen += [("", plan) for plan in result.others]
    for plan in result.baselines:
        same = next((i for i, (_, other) in enumerate(chosen) if other.degrees == plan.degrees), None)
        if same is None:
            chosen.append((plan.name, plan))
        elif plan.name and plan.name not in chosen[same][0]:
            chosen[same] = (" = ".join(filter(None, (chosen[same][0], plan.name))), chosen[same][1])
    longest = min(max(plan.step_s for _, plan in chosen), LONGEST * result.best.step_s)
    order = sorted(chosen, key=lambda pair: (not pair[1].fits, pair[1].value))
    return [
        {"name": name, "one": plan, "bar": seconds_bar(name or "another plan", plan.parts, longest)}
        for name, plan in order
    ]


def _closest(result: SearchResult) -> dict[str, Any] | None:
    """The memory of the closest plan, by part."""
    if result.closest is None:
        return None
    parts = dict(result.closest.parts) or {"peak": result.closest.peak_bytes}
    bar = bytes_bar("closest plan", parts, result.device_bytes, "its fullest rank")
    return {"bar": bar, "key": BYTES.key(parts) if result.closest.parts else []}


def _ranks(result: SearchResult, details: Details) -> dict[str, Any]:
    groups, within = _alike(details.ranks)
    step = max(sum(rank.seconds.values()) for rank in details.ranks)
    slowest = max(details.ranks, key=lambda rank: sum(v for k, v in rank.seconds.items() if k in ("products",)))
    fullest = max(details.ranks, key=lambda rank: sum(rank.bytes.values()))
    capacity = result.device_bytes
    return {
        "seconds": [
            _rank_bar(group, lambda r, name, what: seconds_bar(name, r.seconds, step, what)) for group in groups
        ],
        "bytes": [_rank_bar(group, lambda r, name, what: bytes_bar(name, r.bytes, capacity, what)) for group in groups],
        "slowest": slowest.rank,
        "fullest": fullest.rank,
        "seconds_key": SECONDS.key(result.best.parts if result.best else slowest.seconds),
        "bytes_key": BYTES.key(fullest.bytes),
        "count": len(details.ranks),
        "within": within,
    }


def _alike(ranks: tuple[RankCost, ...]) -> tuple[list[list[RankCost]], float]:
    """Neighbours that differ in nothing one could see, and by what part they may; more where there are many ranks."""
    within = _SAME
    while True:
        groups: list[list[RankCost]] = []
        for rank in ranks:
            if groups and _same(groups[-1][0], rank, within):
                groups[-1].append(rank)
            else:
                groups.append([rank])
        if len(groups) <= MOST_BARS:
            return groups, within
        within *= 2


def _same(rank: RankCost, other: RankCost, within: float) -> bool:
    pairs = ((rank.seconds, other.seconds), (rank.bytes, other.bytes))
    is_alike = all(
        abs(a.get(name, 0.0) - b.get(name, 0.0)) <= within * max(sum(a.values()), 1e-12)
        for a, b in pairs
        for name in {*a, *b}
    )
    ends = (rank.has_first, rank.has_last) == (other.has_first, other.has_last)
    return is_alike and ends and (rank.num_blocks == other.num_blocks or within > _SAME)


def _rank_bar(group: list[RankCost], draw: Any) -> Bar:
    first, last = group[0], group[-1]
    name = f"rank {first.rank}" if first is last else f"ranks {first.rank}–{last.rank}"
    words_of = [f"{first.num_blocks} block{'s' * (first.num_blocks != 1)}"]
    if len(first.stages) > 1:
        words_of.append(f"{len(first.stages)} stages")
    ends = [end for end, has in (("embedding", first.has_first), ("head and loss", first.has_last)) if has]
    bar: Bar = draw(first, name, ", ".join([*words_of, *ends]))
    return bar


def _terms(result: SearchResult) -> list[dict[str, Any]]:
    if result.details is None:
        return []
    return [{"words": PARTS.get(term.part, term.part), "term": term} for term in result.details.terms]
