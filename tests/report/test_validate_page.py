"""The page of `autopar validate`: its dots, names of others, and its size."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from parsed import parsed

from autopar.cost_model.published.row import NoEstimate, Row, RowEstimate, read_rows
from autopar.cost_model.published.validation import validate_rows
from autopar.report.validate_report import validation_page

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data"
RUNS = DATA / "published_runs.csv"
SWEEP = DATA / "sweep_vtrain_single_a100.csv"


def estimate_rows(rows: Sequence[Row]) -> list[RowEstimate | NoEstimate]:
    """Every row in a second; experts are not modelled."""
    return [
        NoEstimate(id=row.id, reason="experts | are <not> known")
        if row.moe_experts
        else RowEstimate(id=row.id, seconds=1.0, peak_bytes=2.0**35, fits=True, parts={})
        for row in rows
    ]


@pytest.mark.parametrize("path", [RUNS, SWEEP], ids=["collection", "sweep"])
def test_report(path: Path) -> None:
    found = validate_rows(read_rows(path), estimate_rows)
    text = validation_page(found, title=path.name, subtitle="")
    assert len(text.encode()) < 500_000
    page = parsed(text)
    assert not {"img", "iframe", "object"} & page.names
    loaded = [value for _, given in page.tags for name, value in given.items() if name in ("src", "href")]
    assert loaded == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", text)
    tips = [given["data-t"] or "" for _, given in page.tags if "data-t" in given]
    measured = [c for c in found.compared if c.time_error is not None]
    assert sorted(tip.split("\n")[0] for tip in tips) == sorted(c.row.id for c in measured)
    dots = [given["d"] or "" for name, given in page.tags if name == "path" and "data-t" in given]
    places = [float(number) for dot in dots for number in dot[1:-2].split()]
    assert places and all(0 <= place <= 1000 for place in places)


def test_hostile_names() -> None:
    attack = '"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}'
    rows = [
        replace(row, id=f"{attack}{i}", model=attack, source_key=attack, gpu_type=attack, group=attack)
        for i, row in enumerate(read_rows(RUNS)[:12])
    ]

    def estimate(asked: Sequence[Row]) -> list[RowEstimate | NoEstimate]:
        found = estimate_rows(asked)
        return [NoEstimate(id=found[0].id, reason=attack), *found[1:]]

    text = validation_page(validate_rows(rows, estimate), title=attack, subtitle=attack)
    page = parsed(text)
    assert "img" not in page.names and len(page.scripts) == 2  # the page's own
    assert not [name for _, given in page.tags for name in given if name.startswith("on")]
    assert "49" not in re.findall(r"\{\{.*?\}\}|(?<=onerror=alert\(1\)&gt;)\d+", text)
    assert text.count("&lt;script&gt;") > 10


def test_report_without_any_measured_row() -> None:
    rows = [replace(row.without_result(), outcome=None) for row in read_rows(RUNS)[:3]]
    text = validation_page(validate_rows(rows, estimate_rows), title="mine.csv", subtitle="")
    assert "svg" not in parsed(text).names and "By source_key" in text


def test_huge_files_give_small_pages() -> None:
    one = read_rows(RUNS)[0]
    rows = [replace(one, id=f"{'x' * 3_000}{i}", source_key=f"source {i % 500}", tp=i + 1) for i in range(4_000)]
    text = validation_page(validate_rows(rows, estimate_rows), title="big.csv", subtitle="")
    assert len(text.encode()) < 500_000
    assert "are left out" in text
