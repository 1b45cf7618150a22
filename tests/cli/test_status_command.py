"""`autopar status` and the page of a run."""

import time
from pathlib import Path

import pytest
from run import autopar, json_of, refused
from written_runs import end, line, start, write

from autopar.ir.explanation import Prediction
from autopar.runs.record import Event, Line

PREDICTED = Prediction(
    step_s=2.0, step_interval_s=(1.5, 3.0), samples_per_s=4.0, tokens_per_s=1000.0, mfu=0.4, peak_bytes=7e9,
    peak_interval_bytes=(6e9, 9e9), device_bytes=80e9,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [
        line(s, 4.0 - s / 4, step_s=1.0, tokens_per_s=2000.0, tokens=64, peak_bytes=3_000_000_000) for s in range(9)
    ]
    return write(
        tmp_path / "run",
        [start(), *lines, end()],
        total_steps=9,
        predicted=PREDICTED,
        device_type="cuda",
        model="G[b]PT",
    )


def test_a_run_is_shown(folder: Path) -> None:
    shown = " ".join(autopar("status", str(folder)).stdout.split())
    for text in (
        "G[b]PT, 4 ranks, done", "step 8 of 9, loss 2.0000", "576 tokens", "no checkpoint in the run directory",
        "loss of steps 0 to 8, 4 to 2", "█▇▆▅▅▄▃▂▁", "step time 1 s 2 s (1.5 s to 3 s)",
        "tokens/s 2 k 1 k",
        "MFU 80.0 % 40.0 %",
        "memory of rank 0 3 GB 7 GB (6 GB to 9 GB)",
        "memory of the device 80 GB",
    ):  # fmt: skip
        assert text in shown, shown


def test_following_ends_with_the_run(folder: Path) -> None:
    assert "step 8 of 9" in autopar("status", str(folder), "--follow").stdout


def test_long_lines_hang_while_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.output.WIDTH_WITHOUT_TERMINAL", 80)
    extra = {f"a measure with a long name, number {number}": 1.0 for number in range(3)}
    run = write(tmp_path / "run", [start(), line(1, 4.0, extra=extra), end()])
    once = autopar("status", str(run)).stdout
    assert "\n    " in once  # the rest of a long line
    assert autopar("status", str(run), "--follow").stdout.splitlines() == once.splitlines()


@pytest.mark.parametrize("before", [[], [start(), line(0)], [start(), line(0), end("OutOfMemoryError")]])
def test_following_waits_for_the_next_start(
    before: list[Line | Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run", before)
    more = iter([[*before, start()], [*before, start(), line(1)], [*before, start(), line(1), end()]])
    monkeypatch.setattr(time, "sleep", lambda _: write(run, next(more)))
    assert "done" in autopar("status", str(run), "--follow").stdout
    assert next(more, None) is None


def test_json(folder: Path) -> None:
    found = json_of("status", str(folder), "--json")
    assert (found["state"], found["step"], found["tokens_per_s"], found["left_s"]) == ("done", 8, 2000.0, None)
    assert found["predicted"]["peak_bytes"] == 7e9


def test_refusals(folder: Path, tmp_path: Path) -> None:
    assert "is no run directory" in refused("status", str(tmp_path))
    assert "does not exist" in refused("status", str(tmp_path / "missing"))
    assert "exclude each other" in refused("status", str(folder), "--json", "--follow")
    assert "--interval must be a number above 0" in refused("status", str(folder), "--interval", "0")
    assert "is no run directory" in refused("report", str(tmp_path), "--out", str(tmp_path / "page.html"))
    assert "no predicted time line" in refused("report", str(folder), "--perfetto", str(tmp_path / "trace.json"))


def test_a_page_of_a_run(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert autopar("report", str(folder), "--out", str(page)).exit_code == 0
    text = page.read_text()
    for part in ("G[b]PT", "loss over 9 steps", "tokens/s over 9 steps", "step 8 of 9", "2 s predicted"):
        assert part in text
    assert "http" not in text.replace("http-equiv", "")
