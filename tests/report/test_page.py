"""The page of a search or a plan: its text, that it needs no other file, and that names stay text."""

import re
from dataclasses import replace
from typing import Any

import pytest
from parsed import parsed

from autopar.cli.plan import result_sections
from autopar.report.page import html_report
from autopar.report.page_tools import script_json
from autopar.report.plan_page import plan_report
from autopar.search.result.report_data import Details, RankCost, Timeline
from autopar.search.result.result import SearchResult

HOSTILE = (
    "<script>alert(1)</script>",
    '"; rm -rf / #',
    "../../etc/passwd",
    "</script><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "<!--",
    "\u2028]]>",
)
MOST_BYTES = 500_000


def test_what_a_search_says(stored: SearchResult) -> None:
    page = parsed(html_report(stored))
    assert stored.model in page.words
    assert "How it was searched" in page.words
    if stored.best is None:
        assert stored.closest is not None
        assert "No plan fits" in page.words
        assert stored.closest.remedy in page.words
    else:
        assert "Why this plan" in page.words
        assert "Memory against capacity" in page.words
        assert "All candidates" in page.words
        for one in stored.others:
            assert one.reason in page.words


def test_what_stages_of_its_own_save(pipeline: SearchResult) -> None:
    """The proof is of candidates, so that a plan which is below their bound is not called proven."""
    assert pipeline.best is not None
    proven = replace(pipeline, is_proven=True, gap=0.0, bound=pipeline.best.value / 0.95)
    words = parsed(html_report(proven)).words
    assert proven.saved_by_own_stages == pytest.approx(0.05)
    assert "refining saves 5.0 %" in words
    assert "refining its stages saves 5.0%" in words
    assert "refining its stages saves 5.0%" in result_sections(proven)[0].lines[-2]
    alike = replace(proven, bound=pipeline.best.value * 1.0001)
    assert alike.saved_by_own_stages == 0
    assert "refining saves" not in parsed(html_report(alike)).words
    alone = replace(proven, bound=None)
    assert "No candidate fits; with refined stages this plan does" in parsed(html_report(alone)).words
    assert "no candidate fits; with refined stages this plan does" in result_sections(alone)[0].lines[-2]


def test_it_stands_alone(stored: SearchResult) -> None:
    html = html_report(stored)
    page = parsed(html)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            target = attributes.get(name) or ""
            assert target == "" or target.startswith("#") or target == "data:,", (tag, name, target)
    assert "url(" not in html
    assert "@import" not in html
    assert len(html.encode()) < MOST_BYTES
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {a["href"] for tag, a in page.tags if tag == "a"}
    assert targets <= {f"#{one}" for one in ids}


def test_no_number_is_broken(stored: SearchResult) -> None:
    page = parsed(html_report(stored))
    assert not re.search(r"\b(nan|inf|None(?! of| can)|Infinity|NaN)\b", page.words)
    for tag, attributes in page.tags:
        if tag == "rect":
            x, width = float(attributes["x"] or "nan"), float(attributes["width"] or "nan")
            assert 0 <= x <= 2100 and 0 < width <= 2100, attributes
        elif tag == "path":
            assert re.fullmatch(r"([MLCHVlhvz]-?[\d. -]*)*", attributes["d"] or ""), attributes


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str, pipeline: SearchResult, misfit: SearchResult) -> None:
    for found in (pipeline, misfit):
        harmless, page = parsed(html_report(found)), parsed(html_report(hostile(found, name)))
        assert shape(page) == shape(harmless)
        assert name.strip() in "".join(page.text)
        assert page.scripts[1] == harmless.scripts[1]
    assert pipeline.plan is not None
    renamed = replace(pipeline.plan, model=name, notes=(name,))
    blank = replace(pipeline.plan, model="a", notes=("b",))
    assert shape(parsed(plan_report(renamed))) == shape(parsed(plan_report(blank)))


def shape(page: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Elements and the names of their attributes."""
    return [(tag, tuple(sorted(attributes))) for tag, attributes in page.tags]


def hostile(found: SearchResult, name: str) -> SearchResult:
    """Every name that comes from outside, replaced."""
    others = tuple(replace(one, reason=name) for one in found.others)
    baselines = tuple(replace(one, name=name) for one in found.baselines)
    trials = tuple(replace(one, source=name, state=name) for one in found.trials)
    counted = replace(found.counted, refused=dict.fromkeys(found.counted.refused, name))
    closest = None if found.closest is None else replace(found.closest, remedy=name)
    return replace(
        found, model=name, cluster=name, engine=name, profile=name, precision=name, others=others, baselines=baselines,
        trials=trials, counted=counted, closest=closest, notes=tuple(name for _ in found.notes),
        assumptions=tuple(name for _ in found.assumptions),
    )  # fmt: skip


def test_data_of_scripts_cannot_end_its_element() -> None:
    for name in HOSTILE:
        text = str(script_json({name: name}))
        assert "<" not in text and ">" not in text and "\u2028" not in text
        assert parsed(f"<script>{text}</script>").data == {name: name}


def test_long_names_are_cut(flat: SearchResult) -> None:
    page = parsed(html_report(replace(flat, model="m" * 5000)))
    assert "m" * 200 not in page.words


def test_the_largest_search_is_small(pipeline: SearchResult) -> None:
    """64 stages that all differ, a time line and candidates as long as are kept, 400 trials."""
    assert pipeline.details is not None and pipeline.points is not None
    rank = pipeline.details.ranks[0]
    ranks = tuple(different(rank, i) for i in range(64))
    passes = tuple((i % 64, "FB"[i % 2], i % 64, i // 128, i * 1e-3, i * 1e-3 + 9.1e-4) for i in range(4000))
    timeline = Timeline(
        num_ranks=64, num_stages=64, micro_batches=256, runs=2, seconds=40.0, passes=passes,
        messages=tuple((i % 63, i % 63 + 1, i % 63, 1, i * 1e-3, i * 1e-3) for i in range(4000)), left_out=28768,
        gap=(2.0, 38.0),
    )  # fmt: skip
    details: Details = replace(pipeline.details, ranks=ranks, timeline=timeline)
    columns = {
        name: tuple(column[i % len(column)] for i in range(1500)) for name, column in pipeline.points.columns.items()
    }
    columns["seconds"] = tuple(3.7 + 0.012345 * i for i in range(1500))
    trials = tuple(replace(pipeline.trials[i % len(pipeline.trials)], number=i) for i in range(400))
    large = replace(
        pipeline, details=details, points=replace(pipeline.points, columns=columns, fitting=90_000), trials=trials,
        num_devices=16_384,
    )  # fmt: skip
    html = html_report(large)
    assert len(html.encode()) < MOST_BYTES
    assert "passes, is left out" in parsed(html).words


def different(rank: RankCost, number: int) -> RankCost:
    parts = {name: value * (1 + 0.01 * number) for name, value in rank.bytes.items()}
    return replace(rank, rank=number, stages=(number,), bytes=parts)


def test_a_plan_alone(pipeline: SearchResult) -> None:
    assert pipeline.plan is not None and pipeline.plan.summary is not None
    page = parsed(plan_report(pipeline.plan))
    assert "Pipeline stages" in page.words
    assert "How parameters are split" in page.words
    bare = parsed(plan_report(replace(pipeline.plan, summary=None)))
    assert "this plan has no summary" in bare.words
