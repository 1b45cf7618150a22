"""The registry of pipeline schedules, and the action lists that the runtime runs and the cost model replays.

A schedule is one file in this folder with a `SCHEDULE`. The registry finds it, and refuses two of one name.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from autopar.errors import Problem
from autopar.ir.schedules.action import action_of
from autopar.ir.schedules.schedule import ActionLists, Schedule

_WITHOUT_SCHEDULE = ("action", "elementwise", "registry", "schedule")
DEFAULT_SCHEDULE = "1f1b"


def by_name(schedules: Iterable[Schedule]) -> Mapping[str, Schedule]:
    """Schedules by name, oldest first."""
    named: dict[str, Schedule] = {}
    for schedule in sorted(schedules, key=lambda each: (each.published, each.name)):
        assert schedule.name not in named, f"two schedules are called {schedule.name}; rename one of them"
        named[schedule.name] = schedule
    return named


def _schedules_of_folder() -> list[Schedule]:
    package = __name__.rpartition(".")[0]
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [importlib.import_module(f"{package}.{name}") for name in names if name not in _WITHOUT_SCHEDULE]
    return [module.SCHEDULE for module in modules]


SCHEDULES = by_name(_schedules_of_folder())
SCHEDULE_NAMES = tuple(SCHEDULES)  # arrays of candidates hold positions in it


def rank_of_stage(schedule: str, pp: int, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    return SCHEDULES[schedule].rank_of_stage(pp, stage)


def schedule_problems(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> list[Problem]:
    """Why a schedule cannot run with these sizes, and the nearest values with which it can. Empty if it can."""
    kind = SCHEDULES[schedule]
    least, most = kind.least_stages, kind.most_stages
    if virtual_stages < least or (most is not None and virtual_stages > most):
        wanted = f"{least}" if least == most else f"at least {least}"
        rule = f"schedule {schedule} has {wanted} stage{'s' * (least > 1)} on a rank"
        return [Problem(path="virtual_stages", value=virtual_stages, rule=rule, suggestion=f"use {least}")]
    refusal = kind.refusal(pp, micro_batches)
    if refusal is None:
        return []
    rule, suggestion = refusal
    rule = f"schedule {schedule} {rule}"
    return [Problem(path="micro_batches", value=micro_batches, rule=rule, suggestion=suggestion)]


def actions(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> ActionLists:
    """Per pipeline rank, its actions in the order in which they run, for sizes that `schedule_problems` allows."""
    orders = numbered_actions(schedule, pp, virtual_stages, micro_batches)
    return tuple(tuple(action_of(number, micro_batches) for number in order) for order in orders)


@lru_cache(maxsize=64)
def numbered_actions(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """As `actions`, each of them as a number: lists are long, and a search replays many."""
    order = SCHEDULES[schedule].rank_order
    return tuple(tuple(order(rank, pp, virtual_stages, micro_batches)) for rank in range(pp))
