"""`autopar report`: its files, and the sources that it refuses."""

import json
from pathlib import Path

import pytest
from run import autopar, refused

from autopar.search.result.result import SearchResult

EXAMPLES = Path(__file__).parent.parent / "report" / "examples"


def stored(name: str) -> SearchResult:
    return SearchResult.from_dict(json.loads((EXAMPLES / f"{name}.json").read_text()))


def test_a_search_gives_a_page_and_a_trace(tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    result = autopar("report", str(EXAMPLES / "pipeline.json"), "--out", str(page), "--perfetto", str(trace))
    assert result.exit_code == 0, result.output
    assert f"written to {page}" in result.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_plan_gives_a_smaller_page(tmp_path: Path) -> None:
    plan = stored("flat").plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    result = autopar("report", str(tmp_path / "plan.json"), "--out", str(tmp_path / "plan.html"))
    assert result.exit_code == 0, result.output
    assert "How parameters are split" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("missing.json", "--out", "x.html"), "there is no file missing.json"),
        ((str(EXAMPLES / "flat.json"),), "nothing to write"),
        (
            (str(EXAMPLES / "flat.json"), "--perfetto", "trace.json"),
            "no time line to write: the best plan has no pipeline",
        ),
        ((str(EXAMPLES / "flat.json"), "--out", "no/such/folder/x.html"), "cannot be written"),
        ((__file__, "--out", "x.html"), "is not JSON"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused("report", *arguments)
