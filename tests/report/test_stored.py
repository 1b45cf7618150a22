"""Search results as files: reading gives the written result, and errors are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from stored_examples import example

from autopar.errors import InputError, PlanError
from autopar.ir.plan import Plan
from autopar.report.write import read_source, write_report, write_trace
from autopar.search.result.result import SearchResult


def test_there_and_back(stored: SearchResult) -> None:
    data = json.loads(json.dumps(stored.to_dict()))
    again = SearchResult.from_dict(data)
    assert again == stored
    assert json.loads(json.dumps(again.to_dict())) == data


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("best", "step_s"), "fast", "best.step_s: must be a finite number"),
        (("best", "stepp_s"), 1.0, "best.stepp_s: is not a known key; did you mean 'step_s'"),
        (("counted",), [1], "counted: must be an object"),
        (("others", 0, "fits"), 1, r"others\[0\].fits: must be true or false"),
        (("details", "ranks", 1, "bytes", "cache"), None, r"details.ranks\[1\].bytes.cache: must be a finite number"),
        (("details", "timeline", "passes", 2), [0, "F"], r"details.timeline.passes\[2\]: must have 6 entries, has 2"),
        (("num_devices",), True, "num_devices: must be a whole number"),
        (("version",), 99, "version 99, this autopar reads 2"),
        (("kind",), "recipe", "is no search result"),
    ],
)
def test_what_is_wrong_is_said(path: tuple[Any, ...], value: Any, says: str) -> None:
    data = example("pipeline")
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InputError, match=says):
        SearchResult.from_dict(data, "result.json")


def test_a_missing_field_and_a_wrong_plan() -> None:
    data = example("flat")
    del data["model"]
    with pytest.raises(InputError, match="model: is required"):
        SearchResult.from_dict(data)
    data = example("flat")
    data["plan"]["version"] = 7
    with pytest.raises(PlanError, match="schema version 7"):
        SearchResult.from_dict(data)


def test_files(tmp_path: Path, pipeline: SearchResult) -> None:
    assert pipeline.plan is not None
    result, plan, other = tmp_path / "result.json", tmp_path / "plan.json", tmp_path / "other.json"
    result.write_text(json.dumps(pipeline.to_dict()))
    pipeline.plan.save(plan)
    assert read_source(result) == pipeline
    found = read_source(plan)
    assert isinstance(found, Plan)
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert write_report(pipeline, page) == page.stat().st_size > 10_000
    assert write_report(found, page) == page.stat().st_size
    assert write_trace(pipeline, trace) == trace.stat().st_size
    with pytest.raises(InputError, match="no predicted time line"):
        write_trace(found, trace)
    with pytest.raises(InputError, match="there is no file"):
        read_source(tmp_path / "missing.json")
    for text, says in (("{", "is not JSON"), ('{"a": 1}', "neither a search result nor a plan"), ("[NaN]", "NaN")):
        other.write_text(text)
        with pytest.raises(InputError, match=says):
            read_source(other)
    with pytest.raises(InputError, match="cannot be written"):
        write_report(pipeline, tmp_path / "no" / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other.json",
        "plan.json",
        "report.html",
        "result.json",
        "trace.json",
    ]
