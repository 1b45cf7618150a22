"""Results that are kept in memory: a `Memo` inside a search, `functools` in a module.

    `Memo`             results of one search, labelling or pricing; they go away with the object that holds the memo
    `functools`        results of the process: facts about shipped files, schedules, expressions and lists of roles
    `cached_property`  results of one immutable object
    files on disk      `autopar.cache.store`

One rule holds for all of them: a key has every input of its result. Therefore a memoised function reads its arguments
and nothing else. It is a function of a module or of a class, never one inside another function. An argument that is
compared by identity, such as a program, is not changed after it is made.
"""

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


class Memo:
    """Results of functions. Each is computed once for the same inputs."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], Any] = {}

    def __call__(self, function: Callable[[*Arguments], T], *inputs: *Arguments) -> T:
        """The result of `function(*inputs)`. An exception is raised, and not kept."""
        key = (function, inputs)
        if key not in self._results:
            assert getattr(function, "__closure__", None) is None, f"{function} has inputs that the key lacks"
            self._results[key] = function(*inputs)
        result: T = self._results[key]
        return result

    def __len__(self) -> int:
        return len(self._results)
