"""Files of a run: what is written is read, whatever a killed job or another hand left in them."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_runs import end, info, line, start, write

from autopar.errors import InputError
from autopar.runs.record import METRICS_FILE, RUN_FILE, Line, cut_partial_line, is_run, read_info, read_metrics, to_text

NUMBERS = st.floats(allow_nan=False)
MAYBE = st.none() | NUMBERS
LINES = st.builds(
    Line,
    step=st.integers(0, 10**9),
    time_s=st.floats(0, 1e10),
    loss=NUMBERS,
    skipped=st.booleans(),
    samples=st.integers(0, 2**40),
    tokens=st.integers(0, 2**60),
    step_s=MAYBE,
    samples_per_s=MAYBE,
    tokens_per_s=MAYBE,
    peak_bytes=st.integers(0, 2**50),
    peak_rank=st.integers(0, 10**5),
    learning_rate=MAYBE,
    gradient_norm=MAYBE,
    extra=st.dictionaries(st.text(max_size=9), NUMBERS, max_size=3),
)


@settings(max_examples=60)
@given(entry=LINES)
def test_a_line_is_read_as_it_was_written(entry: Line, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write(tmp_path_factory.mktemp("run"), [start(), entry])
    (found,) = read_metrics(folder).lines
    assert asdict(found) == asdict(entry)


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    found = read_metrics(write(tmp_path, [line(1, math.nan, extra={"z": -math.inf})])).lines[0]
    assert math.isnan(found.loss) and found.extra == {"z": -math.inf}
    json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=pytest.fail)  # strict JSON


@given(starts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_a_step_replaces_itself_and_later_ones(
    starts: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each start goes on from a checkpoint of an earlier step: the file shows the steps of the unbroken run."""
    entries: list[Any] = []
    expected: dict[int, float] = {}
    for number, (first, count) in enumerate(starts):
        first = min(first, max(expected, default=-1) + 1)  # no later than the steps so far
        entries.append(start())
        for step in range(first, first + count):
            expected = {s: loss for s, loss in expected.items() if s < step} | {step: float(number)}
            entries.append(line(step, float(number)))
    found = read_metrics(write(tmp_path_factory.mktemp("run"), entries))
    assert {one.step: one.loss for one in found.lines} == expected
    assert [one.step for one in found.lines] == list(range(len(expected)))
    assert found.num_replaced == sum(count for _, count in starts) - len(expected)
    assert found.since_start == starts[-1][1]


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    write(tmp_path, [start(), line(1), line(2)])
    damaged = (
        "{",
        "[]",
        '"x"',
        '{"step": 3}',
        '{"step": -1, "loss": 1.0, "time_s": 1.0}',
        '{"event": "rm"}',
        "[" * 9999,
    )
    extra = ('{"step": 3, "loss": 1.0, "time_s": 1.0, "code": "x"}', '{"step": true, "loss": 1.0, "time_s": 1.0}')
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(
            "".join(f"{text}\n" for text in (*damaged, *extra)).encode() + b"\xff\xfe\n" + b"y" * 200_000 + b"\n"
        )
        file.write(to_text(line(4)).encode() + b'{"step": 5, "lo')
    found = read_metrics(tmp_path)
    assert [one.step for one in found.lines] == [1, 2, 4]  # the last line is being written: not damaged
    assert found.num_damaged == len(damaged) + len(extra) + 2


@pytest.mark.parametrize("left", [b"", b'{"step": 5, "lo', b"z" * 200_000])
def test_what_a_killed_job_left_of_a_line_is_cut(left: bytes, tmp_path: Path) -> None:
    write(tmp_path, [start(), line(1)])
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + left)
    cut_partial_line(path)
    assert path.read_bytes() == whole
    path.write_bytes(left)
    cut_partial_line(path)
    assert path.read_bytes() == b""


def test_the_file_of_a_run(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    write(tmp_path, [end()])
    assert is_run(tmp_path) and asdict(read_info(tmp_path)) == asdict(info())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "plan"}, "kind: must be 'autopar run'"),
        ({"version": 1}, "version: must be 2 for this autopar; got 1"),
        ({"num_ranks": "4"}, "num_ranks: must be a whole number; got '4'"),
        ({"secret": 1}, "secret: is not a known key"),
    ],
)
def test_another_file(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path, [])
    content = json.loads((tmp_path / RUN_FILE).read_text())
    (tmp_path / RUN_FILE).write_text(json.dumps(content | changes))
    with pytest.raises(InputError) as caught:
        read_info(tmp_path)
    assert says in str(caught.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is no run directory; name the folder of autopar\.Run"):
        read_info(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        read_info(tmp_path / "missing")
    os.mkfifo(tmp_path / RUN_FILE)
    with pytest.raises(InputError, match="must be a regular file"):
        read_info(tmp_path)
