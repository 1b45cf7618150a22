"""`autopar validate`: its output and files, for an estimator with known errors."""

import csv
import json
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from run import autopar, json_of, refused

from autopar.cost_model.published.row import COLUMNS, NoEstimate, Row, RowEstimate, read_rows
from autopar.cost_model.published.validation import validate_rows

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data"
RUNS = DATA / "published_runs.csv"
SWEEP = DATA / "sweep_vtrain_single_a100.csv"


def estimate_rows(rows: Sequence[Row]) -> list[RowEstimate | NoEstimate]:
    """Every row in a second and half its device's memory; experts are not modelled."""
    assert all(row.step_time_s is None and row.outcome is None and row.peak_mem_gb is None for row in rows)
    return [
        NoEstimate(id=row.id, reason="experts | are <not> known")
        if row.moe_experts
        else RowEstimate(
            id=row.id,
            seconds=1.0,
            peak_bytes=(row.gpu_mem_gb or 80) * 2**29,
            fits=None if row.gpu_mem_gb is None else True,
            parts={"all": 1.0},
        )
        for row in rows
    ]


@pytest.fixture(autouse=True)
def known_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("autopar.cost_model.published.estimate")
    module.estimate_rows = estimate_rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_table() -> None:
    shown = autopar("validate", str(RUNS), "--tier", "core")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("312 of 343 rows modelled")
    assert any(line.startswith("mosaic_llmfoundry") for line in lines)
    assert any(line.startswith("all ") for line in lines)
    assert "every source weighed once" in shown.stdout
    assert "rows that ran out of memory are predicted not to fit" in shown.stdout
    assert "not modelled, experts | are <not> known: amd_primus_005, nvidia_dgxc_" in shown.stdout
    assert all(len(line) <= 160 for line in lines)


def test_json_is_what_the_measures_are() -> None:
    data = json_of("validate", str(RUNS), "--by", "gpu_type")
    rows = read_rows(RUNS)
    expected = validate_rows(rows, estimate_rows, by="gpu_type")
    assert data == json.loads(json.dumps(expected.to_dict())) | {"left_out": [], "unknown_columns": []}
    overall = data["overall"]
    assert (overall["rows"], overall["modelled"]) == (878, 838)
    assert {"n", "median", "p90", "mean", "max", "bias"} == overall["step_time"].keys() == overall["memory"].keys()
    assert data["by"].keys() == {row.gpu_type for row in rows}
    assert sum(part["rows"] for part in data["by"].values()) == 878
    assert len(data["unmodelled"]) == 40


def test_sweep_has_groups_of_its_own() -> None:
    data = json_of("validate", str(SWEEP))
    assert data["overall"]["rows"] == 1440
    assert data["overall"]["ranking"]["groups"] == len(data["ranked_groups"]) == 96


def test_predictions(tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    assert autopar("validate", str(RUNS), "--out", str(out)).exit_code == 0
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["id", "seconds", "peak_bytes", "fits"]
    assert len(lines) == 838
    assert {line["fits"] for line in lines} == {"true", ""}
    assert all(float(line["seconds"]) == 1.0 and int(line["peak_bytes"]) > 0 for line in lines)
    assert list(tmp_path.iterdir()) == [out]


def test_rows_without_results_are_predicted(tmp_path: Path) -> None:
    """Somebody's own runs, before they ran."""
    runs, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    with RUNS.open(newline="") as source, runs.open("w", newline="") as target:
        writer = csv.DictWriter(target, COLUMNS[: COLUMNS.index("outcome")], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(csv.DictReader(source))
    data = json_of("validate", str(runs), "--out", str(out))
    assert data["overall"]["modelled"] == 838
    assert data["overall"]["step_time"] == dict.fromkeys(("median", "p90", "mean", "max", "bias")) | {"n": 0}
    assert len(out.read_text().splitlines()) == 839
    assert autopar("validate", str(runs), "--report", str(tmp_path / "report.html")).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no_such.csv",), "no such file"),
        ((str(RUNS), "--tier", "cor"), "did you mean 'core'?"),
        ((str(RUNS), "--by", "gpu"), "valid: gpu_type, group, source_key"),
        ((str(SWEEP), "--tier", "core"), "none of the 1440 rows"),
        ((str(DATA / "README.md"),), "the header of"),
        ((str(RUNS), "--out", "/no/such/folder/x.csv"), "--out: cannot be written: name a file in a folder"),
        ((str(RUNS), "--report", str(DATA)), "cannot be written"),
        ((str(RUNS), "--out", str(RUNS)), "is the file of the runs"),
    ],
)
def test_refused(arguments: tuple[str, ...], says: str) -> None:
    before = RUNS.read_bytes()
    assert says in refused("validate", *arguments)
    assert RUNS.read_bytes() == before


def test_bad_file_writes_nothing(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    runs.write_text(RUNS.read_text().replace(",2304,", ",wide,"))
    says = refused("validate", str(runs), "--out", str(out), "--strict")
    assert "megatron_sc21_t1_001, hidden: must be a whole number" in says
    assert not out.exists()


@pytest.fixture
def runs_of_mine(tmp_path: Path) -> Path:
    """Six rows: two that cannot be used, one that is not modelled, one with a warning; two columns of their own."""
    with RUNS.open(newline="") as file:
        rows = list(csv.DictReader(file))[:6]
    rows[1]["moe_experts"], rows[2]["hidden"], rows[3]["outcome"] = "8", "wide", "OOM"
    rows = [row | {"hiden": "1", "\x1b[31mmine": "x" * 5_000} for row in rows]
    path = tmp_path / "mine.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_that_cannot_be_used_are_listed_and_left_out(runs_of_mine: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "out.csv", tmp_path / "report.html"
    shown = autopar("validate", str(runs_of_mine), "--out", str(out), "--report", str(report))
    assert shown.exit_code == 0, shown.output
    text = shown.stdout
    assert text.startswith("3 of 4 rows modelled")
    assert "not modelled, experts | are <not> known: megatron_sc21_t1_002" in text
    assert "left out, hidden: must be a whole number of at least 1" in text
    assert "got 'wide': megatron_sc21_t1_003" in text
    assert "left out, outcome: must be one of ok, oom, or empty; got 'OOM': megatron_sc21_t1_004" in text
    assert "not known, and not read: 'hiden' (did you mean 'hidden'?), '\\x1b[31mmine'" in text
    assert len(out.read_text().splitlines()) == 4
    assert "4 rows of tier all, 2 more left out" in report.read_text()


def test_left_out_rows_are_in_the_json(runs_of_mine: Path) -> None:
    data = json_of("validate", str(runs_of_mine))
    assert [one["id"] for one in data["left_out"]] == ["megatron_sc21_t1_003", "megatron_sc21_t1_004"]
    assert data["left_out"][0]["reason"].endswith("got 'wide'")
    assert data["unknown_columns"] == ["hiden", "\x1b[31mmine"]
    assert data["overall"]["rows"] == 4
    assert data["warnings"] == []


def test_strict_refuses_what_would_be_left_out(runs_of_mine: Path) -> None:
    assert "'hiden': is not a known column" in refused("validate", str(runs_of_mine), "--strict")
    assert json_of("validate", str(RUNS), "--strict") == json_of("validate", str(RUNS))


def test_many_reasons_are_counted(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    with RUNS.open(newline="") as source, runs.open("w", newline="") as target:
        lines = list(csv.DictReader(source))
        writer = csv.DictWriter(target, COLUMNS)
        writer.writeheader()
        writer.writerows(line | {"tp": f"x{i}"} if i < 30 else line for i, line in enumerate(lines))
    assert "left out: and 10 more reasons (--json)" in autopar("validate", str(runs)).stdout


def test_warnings_are_shown_by_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def with_warnings(rows: Sequence[Row]) -> list[RowEstimate | NoEstimate]:
        found = estimate_rows(rows)
        return [replace(one, warnings=("<b>x</b>",)) if isinstance(one, RowEstimate) else one for one in found]

    monkeypatch.setattr(sys.modules["autopar.cost_model.published.estimate"], "estimate_rows", with_warnings)
    report = tmp_path / "report.html"
    shown = autopar("validate", str(RUNS), "--report", str(report))
    assert "warning, <b>x</b>: megatron_sc21_t1_001, " in shown.stdout and "and 830 more" in shown.stdout
    assert "&lt;b&gt;x&lt;/b&gt;: 838 rows" in report.read_text()
    assert json_of("validate", str(RUNS))["warnings"][0] == {"id": "megatron_sc21_t1_001", "text": "<b>x</b>"}
