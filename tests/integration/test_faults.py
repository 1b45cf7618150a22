"""Faults of ranks end all ranks soon, with the first cause; bad input is one named error before any rank starts."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torchrun
from integration_models import Wanted, planned
from suites import long

from autopar.commands.verify import verify
from autopar.errors import AutoparError, CaptureError, InputError, PlanError, RankError
from autopar.runtime.distributed.launch import Ranks

BOUND_S = 30
WANTED = Wanted(spec="gpt2")
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "seq_len": 16, "batch": 4}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    "who, fault, cause",
    (
        (2, "raise", "a planted fault"),
        (1, "kill", "exit code -9 .SIGKILL."),
        long(3, "abort", "exit code -6 .SIGABRT."),
    ),
)
def test_a_failing_rank_ends_all(who: int, fault: str, cause: str, four_ranks: Ranks) -> None:
    _, plan = planned(WANTED, 4, {"tp": 2, "dp": 2, "zero": 3})
    pids = four_ranks.run("integration_ranks:pid")
    started = time.monotonic()
    with pytest.raises(RankError, match=cause) as caught:
        four_ranks.run("integration_ranks:faulty_step", WANTED, plan, who, fault)
    assert caught.value.rank == who and str(caught.value).startswith(f"rank {who} failed: ")
    assert time.monotonic() - started < BOUND_S
    assert not any(is_running(pid) for pid in pids) and not four_ranks.is_open
    if fault != "kill":  # the original traceback
        assert "integration_ranks.py" in str(caught.value) and "in fail" in str(caught.value)


@pytest.mark.parametrize(
    ("differ", "own"), (("shape", ("TensorShape=[2, 3]", "TensorShape=[2, 4]")), ("kind", ("BROADCAST", "ALLREDUCE")))
)
def test_unlike_collectives_are_an_error_at_once(differ: str, own: tuple[str, str]) -> None:
    """Whichever rank reports it, the error says what both ranks call."""
    started = time.monotonic()
    with Ranks(2, timeout_s=600) as ranks, pytest.raises(RankError, match="Detected mismatch between coll") as caught:
        ranks.run("integration_ranks:unlike_collectives", differ)
    assert time.monotonic() - started < ranks.timeout_s / 2
    text = str(caught.value)
    for rank, what in enumerate(own):
        assert re.search(rf"Rank {rank} is running collective: CollectiveFingerPrint\([^)]*{re.escape(what)}", text), (
            text
        )


def test_an_interrupted_run_ends_all_ranks(two_ranks: Ranks) -> None:
    """What they would still send is not the answer to the next run."""
    pids = two_ranks.run("integration_ranks:pid")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        two_ranks.run("integration_ranks:sleep", 60.0)
    assert not any(is_running(pid) for pid in pids) and not two_ranks.is_open


@pytest.mark.parametrize(
    "after_s, who, cause",
    (
        (0.0, 0, "rank 0 failed: the process ended with exit code -6 .SIGABRT."),
        (1.5, 1, "rank 1 did not answer within 1 s; rank 0 waited for it: a collective of NCCL timed out"),
    ),
)
def test_nccl_ends_ranks_that_waited(after_s: float, who: int, cause: str) -> None:
    """Its watchdog aborts a process whose collective does not end in time: the rank that it waits for is the cause."""
    with Ranks(2, timeout_s=600.0) as world:
        pids = world.run("integration_ranks:pid")
        world.timeout_s, world.device_type = 1.0, "cuda"  # gloo ranks that end as NCCL's do
        with pytest.raises(RankError, match=cause) as caught:
            world.run("integration_ranks:abort_or_sleep", after_s)
    assert caught.value.rank == who and not any(is_running(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("fault, cause", (long("raise", "ValueError: a planted fault"), ("kill", "Signal 9 (SIGKILL)")))
def test_a_failing_rank_ends_torchrun(fault: str, cause: str, tmp_path: Path) -> None:
    process = torchrun.start(2, "torchrun_fault.py", tmp_path, fault)
    while not (tmp_path / "planted").exists() and process.poll() is None:
        time.sleep(0.1)
    started = time.monotonic()
    output, _ = process.communicate(timeout=BOUND_S)
    assert process.returncode != 0 and (tmp_path / "planted").exists(), output[-3000:]
    assert time.monotonic() - started < BOUND_S
    assert cause in output
    first = output.partition("Root Cause (first observed failure):")[2]
    assert "local_rank: 1" in first
    assert not any(is_running(int(file.read_text())) for file in tmp_path.glob("pid-*"))


def test_ranks_of_a_killed_parent_leave_nothing() -> None:
    program = """
import os, signal
from autopar.runtime.distributed import launch
launch.PRELOADED = ()
world = launch.Ranks(1)
assert world.run("builtins:abs") == [0]
os.kill(os.getpid(), signal.SIGKILL)
"""
    with tempfile.TemporaryDirectory() as folder:  # shorter than tmp_path: names of sockets have a limit
        done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"TMPDIR": folder})
        assert done.returncode == -signal.SIGKILL
        deadline = time.monotonic() + BOUND_S
        while list(Path(folder).glob("autopar-ranks-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not list(Path(folder).glob("autopar-ranks-*"))


def test_unfit_batches_are_refused_on_all_ranks(two_ranks: Ranks) -> None:
    _, plan = planned(WANTED, 2, {"dp": 2, "zero": 3})
    (messages, loss), (others, other_loss) = two_ranks.run("integration_ranks:unfit_batches", WANTED, plan)
    assert messages == others and loss == other_loss
    expected = {
        "shape": ("input_ids", "(4, 15)", "(4, 16)"),
        "batch": ("8 sequences", "the plan has 4", "pass at most 4"),
        "uneven": ("different numbers of sequences", "'input_ids': 1", "'labels': 4"),
        "dtype": ("labels", "torch.int32", "torch.int64"),
        "unknown": ("input_idz", "did you mean 'input_ids'?"),
        "missing": ("labels", "NoneType"),
        "not a tensor": ("input_ids", "list"),
        "too few": ("expected 2 tensors", "got 1"),
    }
    assert messages.keys() == expected.keys()
    for name, parts in expected.items():
        assert all(part in messages[name] for part in parts), messages[name]


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("autopar.commands.verify.Ranks", refuse)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, plan = planned(WANTED, 4, {"tp": 2, "dp": 2, "zero": 3})
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    "change, parts",
    (
        ({"spec": "llama3-8b"}, ("another model", "gpt2", "differ")),
        ({"layers": 3}, ("another size of the model", "gpt2", "2 of shape [64] there, 3 of shape [64] here")),
        ({"hidden": 128}, ("another size of the model", "gpt2", "[512, 64] there, 1 of shape [512, 128] here")),
        ({"world_size": 2}, ("for 4 ranks", "has 2")),
        ({"seq_len": 8}, ("length 16", "length 8")),
        ({"batch": 2}, ("4 sequences of one data-parallel rank", "have 2")),
    ),
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_plan_of_something_else(change: dict[str, Any], parts: tuple[str, ...], plan_file: Path) -> None:
    options = SIZES | {"spec": "gpt2", "world_size": 4} | change
    with pytest.raises(PlanError) as caught:
        verify(options.pop("spec"), plan=str(plan_file), **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    "field, value, parts",
    (
        ("version", 99, ("schema version 99", "reads 1")),
        ("colour", "red", ("colour", "not a known key")),
        ("degrees", {"tp": 2.5}, ("tp", "whole number", "2.5")),
    ),
)
def test_plan_file_that_cannot_be_read(
    field: str, value: Any, parts: tuple[str, ...], plan_file: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "plan.json"
    changed.write_text(json.dumps(json.loads(plan_file.read_text()) | {field: value}))
    with pytest.raises(PlanError) as caught:
        verify("gpt2", world_size=4, plan=str(changed), **SIZES)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    "change, degrees, error, parts",
    (
        ({}, {"tp": 3}, PlanError, ("tp", "must divide the 4 ranks", "2 or 4")),
        ({"batch": 4}, {"tp": 2, "accumulate": 3}, PlanError, ("accumulate", "must divide", "2 or 4")),
        ({"seq_len": 18}, {"tp": 4, "sequence_parallel": True}, PlanError, ("sequence", "18", "3 and 6")),
        ({}, {"tpp": 4}, PlanError, ("tpp", "unknown key", "did you mean 'tp'?")),
        ({}, {"tp": 2, "zero": 5}, PlanError, ("zero", "0, 1, 2 or 3", "5")),
        ({"spec": "gpt22"}, {}, InputError, ("gpt22", "did you mean 'gpt2'?")),
        ({"dtype": "int8"}, {}, InputError, ("int8", "float64")),
    ),
    ids=str,
)
def test_bad_wishes(
    change: dict[str, Any], degrees: dict[str, Any], error: type[AutoparError], parts: tuple[str, ...]
) -> None:
    options = SIZES | {"spec": "gpt2"} | change
    with pytest.raises(error) as caught:
        verify(options.pop("spec"), world_size=4, degrees=degrees, **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.usefixtures("no_ranks")
def test_model_that_does_not_export() -> None:
    with pytest.raises(CaptureError) as caught:
        verify("integration_models:branches", world_size=2)
    text = str(caught.value)
    assert "module '0' (Branches)" in text
    file, _, rest = text.partition("integration_models.py:")
    line = int(rest.split(":")[0])
    source = (Path(__file__).parent / "ranks" / "integration_models.py").read_text().splitlines()
    assert file and "if x.sum() > 0" in source[line - 1]
