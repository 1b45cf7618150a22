"""CPU seconds of every folder of tests, with those of the processes that they start. `make test` fails past a limit.

`limits.json` has the limits, in seconds of the machine whose `loop` it names. A slower machine has more seconds.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIMITS = Path(__file__).with_name("cpu_seconds.json")
SLACK = 1.3  # seconds of one run and of another differ: two processes share a core's caches, and children a core
TICKS = os.sysconf("SC_CLK_TCK")
WHOLE = "all"


class CpuSeconds:
    """A plugin of pytest. A worker counts, and the process that started the workers prints."""

    def __init__(self, is_bounded: bool) -> None:
        self.is_bounded = is_bounded
        self.seconds = Counter[str]()
        self.last = tree_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                now = tree_seconds()
                self.seconds[folder_of(item.path)] += now - self.last
                self.last = now

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self.seconds)
        elif self.is_bounded and session.exitstatus == pytest.ExitCode.OK and past_limits(self.seconds):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.seconds:
            return
        limits = scaled_limits()
        terminalreporter.section("CPU seconds")
        for folder, seconds in (*self.seconds.most_common(), (WHOLE, self.seconds.total())):
            limit = f"{limits.get(folder, 0):8.0f}" if self.is_bounded else ""
            terminalreporter.write_line(f"{folder:16} {seconds:8.0f}{limit}")
        for folder in past_limits(self.seconds) if self.is_bounded else ():
            terminalreporter.write_line(f"past the limit of {LIMITS.name}: {folder}", red=True)


def folder_of(path: Path) -> str:
    """The folder of `tests` that a file is in."""
    parts = path.relative_to(Path(__file__).parents[1]).parts
    return parts[0] if len(parts) > 1 else "."


def past_limits(seconds: Counter[str]) -> list[str]:
    limits = scaled_limits()
    return [name for name, s in (*seconds.items(), (WHOLE, seconds.total())) if s > SLACK * limits.get(name, 0)]


def scaled_limits() -> dict[str, float]:
    """Limits in seconds of this machine."""
    limits: dict[str, float] = json.loads(LIMITS.read_text())
    slower = max(1.0, loop_seconds() / limits.pop("loop"))
    return {folder: slower * limit for folder, limit in limits.items()}


def loop_seconds() -> float:
    """Seconds of a loop that tells how fast a core is, the best of five."""

    def one() -> float:
        start = time.process_time()
        sum(i * i % 7 for i in range(1_000_000))
        return time.process_time() - start

    return min(one() for _ in range(5))


def tree_seconds() -> float:
    """CPU seconds of this process, of those below it, and of those that they have waited for."""
    seconds, parents = dict[int, float](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(path.parent.name)
        parents[pid], seconds[pid] = int(values[1]), sum(map(int, values[11:15])) / TICKS

    def is_below(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_below(parents[pid]))

    return sum(s for pid, s in seconds.items() if is_below(pid))
