"""Figures of a run, and whether it lives."""

import json
import math
from pathlib import Path

import pytest
from written_runs import NOW_S, end, line, start, write

from autopar.files.lock import LOCK, take_lock
from autopar.ir.explanation import Prediction
from autopar.runs.record import CHECKPOINTS
from autopar.runs.status import run_status, sparkline

PREDICTED = Prediction(
    step_s=2.0, step_interval_s=(1.5, 3.0), samples_per_s=4.0, tokens_per_s=1000.0, mfu=0.4, peak_bytes=7e9,
    peak_interval_bytes=(6e9, 9e9), device_bytes=80e9,
)  # fmt: skip


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    """Rates are medians; the time left is that of this start's steps, with what lies between them."""
    rates = {"step_s": 4.0, "tokens_per_s": 500.0, "tokens": 2000}
    lines = [line(step, 5.0 - 0.1 * step, **rates, time_s=NOW_S - 300 + 5 * step) for step in range(10)]
    lines[3] = line(3, 9.0, skipped=True, step_s=0.1, time_s=NOW_S - 285)
    odd = {"step_s": 400.0, "tokens_per_s": 5.0, "gradient_norm": 0.5, "peak_bytes": 10**9, "peak_rank": 2}
    lines[9] = line(9, 4.1, **rates | odd, time_s=NOW_S - 255)
    folder = write(tmp_path, [start(), line(7), start(), *lines], total_steps=21, predicted=PREDICTED)
    lock = take_lock(folder)
    found = run_status(folder, now_s=NOW_S)
    assert (found.state, found.step, found.loss, found.total_steps) == ("running", 9, 4.1, 21)
    assert (found.step_s, found.tokens_per_s) == (4.0, 500.0)
    assert found.mfu == pytest.approx(0.2)
    assert found.left_s == pytest.approx(5.0 * 11)
    assert (found.num_skipped, found.num_starts, found.num_replaced, found.num_tokens) == (1, 2, 1, 9 * 2000)
    assert (found.peak_bytes, found.peak_rank, found.gradient_norm) == (10**9, 2, 0.5)
    assert found.age_s == pytest.approx(255)
    assert [step for step, _ in found.losses] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    lock.release()


def test_the_states_of_a_run(tmp_path: Path) -> None:
    folder = write(tmp_path, [])
    assert run_status(folder).state == "not started"
    write(folder, [start(), line(0)])
    assert run_status(folder).state == "killed"
    lock = take_lock(folder)
    assert run_status(folder).state == "running"
    content = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps(content | {"started": "1"}))
    assert run_status(folder).state == "killed"
    (folder / LOCK).write_text(json.dumps(content | {"host": "elsewhere"}))
    written = (folder / LOCK).stat().st_mtime
    assert run_status(folder, now_s=written + 5).state == "running"
    assert run_status(folder, now_s=written + 500).state == "killed"
    (folder / LOCK).write_text(json.dumps(content))
    for events in ([], [start(), line(0), end()], [start(), end("OutOfMemoryError")]):
        write(folder, events)
        assert run_status(folder).state == "starting"
    lock.release()
    write(folder, [start(), line(0), end("OutOfMemoryError")])
    found = run_status(folder)
    assert (found.state, found.detail) == ("failed", "it ended with OutOfMemoryError")
    write(folder, [start(), line(0), end()])
    assert run_status(folder).state == "done"


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path, [start()])
    assert run_status(folder).checkpoint is None
    (folder / CHECKPOINTS).mkdir()
    for text, step in (("step-00000020\n", 20), ("step-00000021.1", 21), ("../../etc", None), ("", None)):
        (folder / CHECKPOINTS / "latest").write_text(text)
        found = run_status(folder).checkpoint
        assert (None if found is None else found.step) == step


def test_a_curve_of_losses_that_are_no_numbers(tmp_path: Path) -> None:
    folder = write(tmp_path, [start(), line(0, 3.0), line(1, math.nan), line(2, 1.0), end()])
    found = run_status(folder)
    assert sparkline([loss for _, loss in found.losses], 10) == "█×▁"
    content = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(content)["losses"][1] == [1, None]
    assert sparkline([math.nan], 4) == "×" and sparkline([], 4) == "" and sparkline([2.0, 2.0], 4) == "▁▁"
