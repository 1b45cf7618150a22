"""The result of a measured search, read from the plain data that `TuneResult.to_dict` writes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from autopar.cost_model.machine.profile import DeviceProfile
from autopar.errors import InputError, Problem
from autopar.files.plain_data import content_of, read_plain
from autopar.ir.plan import Plan
from autopar.report.words import degrees_in_words
from autopar.search.measured.result import KIND, VERSION, TuneResult
from autopar.search.measured.rounds import Spread
from autopar.search.measured.tuning import Candidate, Outcome, Reason, State
from autopar.search.result.format import plan_in_words

_NOT_READ = ("step_s", "tokens_per_s", "profile")  # they follow from the rest, or only their name is written
_ABOVE_0 = "must be above 0"


def tuning_from(data: Any, source: str = "tuning result") -> TuneResult:
    """The inverse of `TuneResult.to_dict`, without the profile. The data has only the name of the profile."""
    content = content_of(data, KIND, VERSION, source, command="tune", again="tune again")
    problems: list[Problem] = []
    readers: Mapping[Any, Callable[[Any], Any]] = {
        Plan: lambda plan: Plan.from_dict(plan, f"{source}: plan"),
        DeviceProfile: lambda profile: profile,
        Outcome: lambda outcome: outcome,  # read below, where its place is known
    }
    given = {name: value for name, value in content.items() if name not in _NOT_READ}
    found: TuneResult | None = read_plain(TuneResult, given, problems, readers=readers)
    if found is not None and not problems:
        outcomes = [_outcome(one.outcome, problems, f"tried[{at}].outcome") for at, one in enumerate(found.tried)]
        tried = [replace(one, outcome=outcome) for one, outcome in zip(found.tried, outcomes, strict=True) if outcome]
        found = replace(found, tried=tuple(tried))
        if not problems:
            _check(found, problems)
    if found is None or problems:
        raise InputError(f"{source} cannot be used", problems)
    return found


def _outcome(data: Any, problems: list[Problem], path: str) -> Outcome | None:
    """An outcome. None if it cannot be read."""

    def named(choices: Any, name: str) -> Callable[[Any], Any]:
        def read(value: Any) -> Any:
            if value not in get_args(choices):
                rule = f"must be one of {', '.join(filter(None, get_args(choices)))}"
                problems.append(Problem(path=f"{path}.{name}", rule=rule, value="null" if value is None else value))
            return value

        return read

    def spread(value: Any) -> Any:
        is_bounded = not isinstance(value, Mapping) or "low" in value or "high" in value
        shown = value if is_bounded else {"low": 0.0, "high": 0.0, **value}
        read: Spread | None = read_plain(Spread, shown, problems, path=f"{path}.seconds")
        return read if read is None or is_bounded else replace(read, high=float("inf"))

    readers = {State: named(State, "state"), Reason: named(Reason, "reason"), Spread: spread}
    found: Outcome | None = read_plain(Outcome, data, problems, path=path, readers=readers)
    return found


def _check(found: TuneResult, problems: list[Problem]) -> None:
    """Add what types do not say: a page divides by seconds, puts them on a logarithmic scale, and words the degrees."""
    if found.best is not None and not (
        0 <= found.best < len(found.tried) and found.tried[found.best].outcome.is_measured
    ):
        problems.append(Problem(path="best", rule="must be the position of a measured trial", value=found.best))
    for at, one in enumerate(found.tried):
        _check_candidate(one.candidate, problems, f"tried[{at}].candidate")
        seconds = one.outcome.seconds
        if seconds is not None and not (seconds.median > 0 and 0 <= seconds.low <= seconds.median <= seconds.high):
            rule = "must have 0 < median, and low ≤ median ≤ high"
            problems.append(Problem(path=f"tried[{at}].outcome.seconds", rule=rule))
    for at, left in enumerate(found.left):
        _check_candidate(left.candidate, problems, f"left[{at}].candidate")
        if left.believed_s <= 0:
            problems.append(Problem(path=f"left[{at}].believed_s", rule=_ABOVE_0, value=left.believed_s))


def _check_candidate(one: Candidate, problems: list[Problem], path: str) -> None:
    if one.predicted_s <= 0:
        problems.append(Problem(path=f"{path}.predicted_s", rule=_ABOVE_0, value=one.predicted_s))
    try:
        plan_in_words(one.degrees), degrees_in_words(one.degrees)
    except (KeyError, TypeError, ValueError, AttributeError):
        problems.append(Problem(path=f"{path}.degrees", rule="must be the degrees of a plan"))
