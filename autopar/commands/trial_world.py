"""The controller's side of a trial: the ranks of one plan, the timing in turns, and the reasons of failures."""

import re
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autopar.commands.trial import CROWDED, TrialJob
from autopar.errors import RankError
from autopar.runtime.distributed.launch import Ranks
from autopar.search.measured.rounds import Spread, median_interval
from autopar.search.measured.tuning import Outcome, Reason

WARM_UP = 2  # steps that are not timed
ROUNDS = 10  # timed steps of a trial, at most
_FEWEST = 6  # rounds after which a median has an interval
MOST_TEXT = 2000  # characters of an error that a study keeps
_AGAIN = 4  # steps of the best plan beside a trial whose world could not stay beside it
_MEMORY = re.compile(r"out ?of ?memory|cannot allocate memory|MemoryError|std::bad_alloc|DefaultCPUAllocator", re.I)
_TIME = re.compile(r"did not (answer|end) within")
_KILLED_BY_KERNEL = re.compile(r"^oom_kill (\d+)$", re.M)
_VMSTAT = Path("/proc/vmstat")


class World:
    """The ranks that train one plan, until `close`."""

    def __init__(self, job: TrialJob, num_ranks: int, *, within_s: float) -> None:
        started = time.monotonic()
        # ranks that wait for another say so after half of the time
        self._ranks = Ranks(num_ranks, timeout_s=within_s / 2, checked=False, device_type=job.device_type)
        try:
            self._ranks.run("autopar.commands.trial:build", job)
        except BaseException:
            self.close()
            raise
        self.building_s = time.monotonic() - started
        self.stepping_s, self.peak_bytes = 0.0, 0

    def step(self) -> float:
        """Run one step, and return the seconds of the slowest rank."""
        seconds, peaks = zip(*self._ranks.run("autopar.commands.trial:step"), strict=True)
        self.stepping_s += seconds[0]
        self.peak_bytes = max(self.peak_bytes, *peaks)
        return float(max(seconds))

    @property
    def is_open(self) -> bool:
        """Whether the ranks are there."""
        return self._ranks.is_open

    def close(self) -> None:
        """End all ranks."""
        if self._ranks.is_open:
            self._ranks.close()


@dataclass(slots=True, kw_only=True)
class Incumbent:
    """The best plan so far: its seconds on the scale of the first trial, and its world, if the memory suffices."""

    seconds: float
    start: Callable[[], World]
    world: World | None

    def wake(self) -> None:
        """Start its ranks, if they are not there. If that fails they stay away."""
        if self.world is None or not self.world.is_open:
            with suppress(RankError):
                self.world = self.start()
                for _ in range(WARM_UP):
                    self.world.step()
                return
            self.close()

    def close(self) -> None:
        """End its ranks."""
        if self.world is not None:
            self.world.close()
        self.world = None


def measured(
    start: Callable[[], World], best: Incumbent | None, *, rounds: int = ROUNDS
) -> tuple[Outcome, World | None]:
    """Run the trial of one plan. Its world is still there afterwards, unless the trial failed."""
    started, before = time.monotonic(), _kills_by_kernel()
    earlier_s = 0.0 if best is None or best.world is None else best.world.stepping_s
    try:
        with ExitStack() as stack:
            world = stack.enter_context(closing(start()))
            for _ in range(WARM_UP):
                world.step()
            try:
                seconds, is_slower, steps = _timed(world, best, rounds)
            except RankError:
                if not world.is_open or best is None:
                    raise
                best.close()  # it was the best plan that failed
                seconds, is_slower, steps = _timed(world, None, rounds)
            stack.pop_all()
    except RankError as error:
        spent = time.monotonic() - started
        return Outcome(
            state="failed", reason=reason_of(error, before), message=str(error)[:MOST_TEXT], whole_s=spent
        ), None
    outcome = Outcome(
        state="pruned" if is_slower else "complete",
        seconds=seconds,
        peak_bytes=world.peak_bytes,
        steps=steps,
        building_s=world.building_s,
        stepping_s=world.stepping_s
        + (0.0 if best is None or best.world is None else best.world.stepping_s - earlier_s),
        whole_s=time.monotonic() - started,
    )
    return outcome, world


def _timed(world: World, best: Incumbent | None, rounds: int) -> tuple[Spread, bool, int]:
    """The seconds of a step, whether the plan is surely slower than the best one, and the number of timed steps."""
    if best is None or best.world is None:
        times = [world.step() for _ in range(rounds)]
        return median_interval(times), False, len(times)
    ratios: list[float] = []
    for turn in range(rounds):
        ours, other = (world.step, best.world.step) if turn % 2 else (best.world.step, world.step)
        first, second = ours(), other()
        ratios.append(first / second if turn % 2 else second / first)
        gain = median_interval(ratios)
        if len(ratios) >= _FEWEST and gain.low > 1:
            return gain.times(best.seconds), True, len(ratios)
    return median_interval(ratios).times(best.seconds), False, len(ratios)


def beside(seconds: Spread, best: Incumbent) -> Spread:
    """The seconds of a plan that ran alone, on the scale of the first trial: the best plan steps again after it."""
    best.wake()
    if best.world is None:
        return seconds
    with suppress(RankError):
        base_s = median(best.world.step() for _ in range(_AGAIN))
        return seconds.times(best.seconds / base_s)
    best.close()
    return seconds


def reason_of(error: RankError, kills_before: int = 0) -> Reason:
    """The reason of a failure: ``oom``, ``timeout``, ``killed`` or ``error``."""
    text = str(error)
    if _MEMORY.search(text):
        return "oom"
    if _TIME.search(text):
        return "timeout"
    if "the process ended with exit code" in text:
        return "oom" if "SIGKILL" in text and _kills_by_kernel() > kills_before else "killed"
    return "error"


def is_crowded(outcome: Outcome) -> bool:
    """Whether a trial failed for want of memory, which another plan or process may hold."""
    return outcome.reason == "oom" or CROWDED in outcome.message


def _kills_by_kernel() -> int:
    """How many processes Linux has killed for want of memory since it started."""
    with suppress(OSError):
        match = _KILLED_BY_KERNEL.search(_VMSTAT.read_text(encoding="ascii"))
        return int(match[1]) if match else 0
    return 0
