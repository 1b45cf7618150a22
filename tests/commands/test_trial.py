"""What a trial waits for, and what its failures mean."""

from collections.abc import Callable

import pytest

from autopar.commands import trial
from autopar.commands.trial_world import is_crowded, reason_of
from autopar.errors import InputError, RankError
from autopar.search.measured.tuning import Outcome

GB, TOTAL = 10**9, 80 * 10**9


def readings(*free_gb: float) -> Callable[[], tuple[int, int]]:
    """A device whose free memory is read in this order; the last figure stays."""
    left = list(free_gb)
    return lambda: (int((left.pop(0) if len(left) > 1 else left[0]) * GB), TOTAL)


def test_a_trial_waits_for_memory_of_ranks_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MEMORY_POLL_S", 0.0)
    read = readings(10, 30, 61, 79)
    trial.wait_for_memory(60 * GB, read)
    assert read()[0] == 79 * GB  # it went on at the first reading that suffices


def test_memory_of_other_processes_is_named_and_not_called_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MEMORY_WAIT_S", 0.05)
    with pytest.raises(InputError, match=r"30 GB of 80 GB .*end the processes that hold the rest") as caught:
        trial.wait_for_memory(60 * GB, readings(30))
    error = RankError(f"rank 0 failed: InputError: {caught.value}", rank=0)
    assert reason_of(error) == "error"  # so it teaches nothing about the plan's memory
    assert is_crowded(Outcome(state="failed", reason="error", message=str(error)))


def test_a_plan_that_is_larger_than_the_device_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster says more memory than the device has: running out of it is the answer."""
    monkeypatch.setattr(trial, "MEMORY_WAIT_S", 0.05)
    trial.wait_for_memory(120 * GB, readings(79))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rank 0 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 15.66 GiB", "oom"),
        ("rank 3 did not answer within 24 s\n\nrank 3 is at", "timeout"),
        ("rank 1 failed: a collective of NCCL timed out: it did not end within 150 s", "timeout"),
        ("rank 1 failed: the process ended with exit code -9 (SIGKILL)", "killed"),
        ("rank 1 failed: ValueError: no", "error"),
    ],
)
def test_what_a_failure_means(text: str, reason: str) -> None:
    assert reason_of(RankError(text, rank=0), kills_before=10**9) == reason
