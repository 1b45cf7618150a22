"""Run directories on ranks: the lines that rank 0 writes, one error for all ranks, and jobs that are killed."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import run_ranks
from data_ranks import LENGTH

from autopar.runs.record import METRICS_FILE, RUN_FILE, read_info, read_metrics
from autopar.runs.status import run_status
from autopar.runtime.distributed.launch import Ranks

World = Callable[[int], Ranks]
WISH: dict[str, Any] = {"tp": 2, "dp": 2, "zero": 3}


def test_metrics_are_those_of_all_ranks_and_continue_under_another_plan(worlds: World, tmp_path: Path) -> None:
    """Samples and tokens of short batches are counted as they are, memory is that of the fullest rank."""
    folder = tmp_path / "run"
    losses = worlds(4).run("run_ranks:trained", 4, WISH, str(folder), [(0, 3)])[0]
    losses[2:] = worlds(2).run("run_ranks:trained", 2, {"pp": 2, "micro_batches": 2}, str(folder), [(2, 3), (3, 5)])[0]
    found = read_metrics(folder)
    assert [line.step for line in found.lines] == [0, 1, 2, 3, 4]
    assert [line.loss for line in found.lines] == losses
    assert (found.num_replaced, found.num_damaged, found.since_start) == (1, 0, 2)
    assert [line.samples for line in found.lines] == [8, 7, 4, 4, 4]
    assert [line.tokens for line in found.lines] == [line.samples * LENGTH for line in found.lines]
    assert [(line.peak_bytes, line.peak_rank) for line in found.lines] == [(1030, 3)] * 2 + [(1010, 1)] * 3
    assert [line.step_s is None for line in found.lines] == [True, False, True, True, False]
    for line in found.lines:
        assert line.gradient_norm is not None and line.gradient_norm > 0
        assert (line.learning_rate, line.extra) == (0.1, {"share": 0.5})
        if line.step_s and line.samples_per_s and line.tokens_per_s:
            assert line.samples_per_s * line.step_s == pytest.approx(line.samples)
            assert line.tokens_per_s == pytest.approx(line.samples_per_s * LENGTH)
    info = read_info(folder)
    assert (info.model, info.num_ranks, info.total_steps, info.plan["degrees"]["pp"]) == ("Tokens", 2, 10, 2)
    assert run_status(folder).state == "done" and run_status(folder).num_starts == 3
    assert all(run_ranks.SECRET.encode() not in path.read_bytes() for path in folder.iterdir())


def test_every_refusal_is_one_error_on_all_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks.run("run_ranks:refusals", 4, WISH, str(tmp_path / "run"))
    expected = {
        "second": "is in use by process",
        "total": "total_steps must be a whole number above 0; got 0",
        "folder": "cannot be made",
        "step": "step: must be above 0, which was logged before; got 0",
        "steps": "rank 0 step 2, rank 1 step 3, rank 2 step 2, rank 3 step 2; log the same step on every rank",
        "extra": "extra['x']: must be a number; got 'y'",
        "call": "ranks call different methods",
    }
    for name, text in expected.items():
        assert [text in rank[name] for rank in found] == [True] * 4, found[0][name]
    assert "loss: must be a number; got 'low'" in found[1]["type"]
    assert "the metrics of rank 1 cannot be logged" in found[0]["type"]
    assert [(line.step, line.loss) for line in read_metrics(tmp_path / "run").lines] == [(0, 1.0), (5, 2.0)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [METRICS_FILE, RUN_FILE]


def test_a_full_disk_is_one_error_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run("run_ranks:on_a_full_disk", 2, {"dp": 2}, str(tmp_path / "run"))
    for logged, _ in found:
        assert logged[0] == ""
        assert f"{METRICS_FILE}" in logged[1] and "cannot" in logged[1]
    assert "No space left on device" in found[0][0][1] and "No space left" in found[0][1]


def test_a_directory_of_another_model(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run("run_ranks:trained", 2, {"dp": 2}, str(tmp_path), [(0, 1)])
    for message in two_ranks.run("run_ranks:another_model", 2, {"dp": 2}, str(tmp_path)):
        assert "holds a run of the model 'Tokens', this one is 'Sequential'; name another directory" in message


PROGRAM = """
import sys, time, torch, autopar
model = torch.nn.Sequential(torch.nn.Linear(8, 4))
batch = (torch.randn(4, 8), torch.arange(4))
loss_fn = torch.nn.functional.cross_entropy
parallel = autopar.parallelize(model, "1xcpu", example_inputs=batch, plan={"dp": 1}, loss_fn=loss_fn)
first, last = map(int, sys.argv[2:])
with autopar.Run(sys.argv[1], parallel) as run:
    for step in range(first, last):
        run.log(step, parallel.forward_backward(batch))
        print("logged", flush=True)
    time.sleep(100 if last < 9 else 0)
"""


def test_a_killed_job_leaves_every_line_and_no_lock(tmp_path: Path) -> None:
    """Another job is refused while it lives. The next start after it goes on in the same file."""
    script, folder = tmp_path / "job.py", tmp_path / "run"
    script.write_text(PROGRAM)
    job = subprocess.Popen([sys.executable, str(script), str(folder), "0", "3"], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(3)] == ["logged\n"] * 3
    assert run_status(folder).state == "running" and run_status(folder).step == 2
    with pytest.raises(AssertionError, match=f"is in use by process {job.pid}"):
        forked.alone(script, [str(folder), "0", "9"], tmp_path)
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert run_status(folder).state == "killed"
    with open(folder / METRICS_FILE, "ab") as file:
        file.write(b'{"step":3,"lo')
    assert [line.step for line in read_metrics(folder).lines] == [0, 1, 2]
    forked.alone(script, [str(folder), "2", "9"], tmp_path)
    found = read_metrics(folder)
    assert [line.step for line in found.lines] == list(range(9))
    assert (found.num_replaced, found.num_damaged) == (1, 0)
    assert run_status(folder).state == "done"
    for text in (folder / METRICS_FILE).read_text().splitlines():
        json.loads(text)


def test_tensorboard(tmp_path: Path, two_ranks: Ranks) -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        for message in two_ranks.run("run_ranks:with_tensorboard", 2, {"dp": 2}, str(tmp_path / "run")):
            assert "pip install 'tensorboard>=2.21,<3'" in message
        return
    assert two_ranks.run("run_ranks:with_tensorboard", 2, {"dp": 2}, str(tmp_path / "run")) == [""] * 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [(0, 1.0), (1, 1.0)]
