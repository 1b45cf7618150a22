"""The Optuna study of a measured search: one trial for each plan that was queued, run, pruned or has failed.

    params         the degrees by name
    value          the measured value of the objective
    constraint     ``memory``: above 0 after a trial that ran out of memory
    user_attrs     the plan's degrees, its prediction, the outcome, and its process

Several processes share a study. A process puts a plan into the queue and asks the study for a trial. No two processes
get the same trial. The process writes its host, its number and a deadline into the trial. A trial whose process is gone
is given up, and its plan may be tried again. `autopar.search.driver.study` keeps the storage.
"""

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.cost_model.interval import Situation, interval_of
from autopar.errors import Problem
from autopar.files.plain_data import read_plain
from autopar.search.driver.study import StudyPlace, next_trial, study_values
from autopar.search.measured.tuning import Candidate, Outcome, value_of

if TYPE_CHECKING:
    import optuna

DEGREES, OUTCOME, OWNER, REPEATED, MEMORY = "degrees", "outcome", "owner", "repeated", "memory"
_T = TypeVar("_T")
_SLACK_S = 30.0  # after the deadline of a trial of another host it is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process of a running trial. `until` is its deadline, in seconds since 1970."""

    host: str
    pid: int
    until: float

    @property
    def is_alive(self) -> bool:
        """Whether the trial may still end. Of another host only the deadline counts."""
        if time.time() > self.until + _SLACK_S:
            return False
        if self.host != platform.node():
            return True
        with suppress(PermissionError):  # the process is there, and another user's
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A trial of this process: its number, and the position of its candidate."""

    number: int
    candidate: int


class TrialStudy:
    """The trials of one measured search, in memory or in a study that is kept."""

    def __init__(
        self, candidates: Sequence[Candidate], place: StudyPlace | None, *, objective: str, tokens: int = 0
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.place, self.objective, self.tokens = place, objective, tokens
        self.candidates: tuple[Candidate, ...] = tuple(candidates)
        if place is None:
            self.study = optuna.create_study(study_name="autopar")
        else:
            self.study, kept = place.opened([json.dumps(asdict(plan)) for plan in candidates])
            with study_values(place.where):
                self.candidates = tuple(_read(Candidate, json.loads(text)) for text in kept)
        self._places = {_text(plan.degrees): at for at, plan in enumerate(self.candidates)}
        self._claimed: dict[int, optuna.Trial] = {}
        if place is not None:
            with study_values(place.where):
                self.outcomes(), self.numbers(), self.taken()

    def outcomes(self) -> dict[int, Outcome]:
        """The outcomes of all candidates that were tried, by any process. Trials that were given up do not count."""
        outcomes: dict[int, Outcome] = {}
        for trial, at in self._trials():
            if _is_answer(trial):
                outcomes[at] = outcome_from(trial.user_attrs[OUTCOME])
            elif not trial.state.is_finished() and (owner := _owner_of(trial)) is not None and not owner.is_alive:
                self._tell(trial.number, "failed")
        return outcomes

    def numbers(self) -> dict[int, int]:
        """The numbers of the trials with an outcome, by the position of their candidates."""
        return {at: trial.number for trial, at in self._trials() if _is_answer(trial)}

    def taken(self) -> tuple[int, ...]:
        """The candidates that are being measured now."""
        return tuple(at for trial, at in self._trials() if _is_running(trial))

    def claim(self, at: int, *, within_s: float) -> Claim | None:
        """Queue a candidate and take a trial out of the queue: perhaps another one that another process has queued."""
        plan = self.candidates[at]
        about = {
            DEGREES: _text(plan.degrees),
            "predicted_s": plan.predicted_s,
            "predicted_interval_s": interval_of(plan.predicted_s, "time", Situation()),
            "predicted_bytes": plan.predicted_bytes,
        }
        self.study.enqueue_trial(params_of(plan.degrees), user_attrs=about)
        trial = next_trial(self.study, self.space(), self.place)
        owner = Owner(host=platform.node(), pid=os.getpid(), until=time.time() + within_s)
        trial.set_user_attr(OWNER, asdict(owner))
        place = self._places[trial.user_attrs[DEGREES]]
        earlier = [each for each, its in self._trials() if its == place and each.number < trial.number]
        if any(_is_answer(each) or _is_running(each) for each in earlier):
            trial.set_user_attr(REPEATED, True)
            self._tell(trial.number, "failed")
            return None
        self._claimed[trial.number] = trial
        return Claim(number=trial.number, candidate=place)

    def finish(self, claim: Claim, outcome: Outcome) -> None:
        """Write the outcome of a claimed trial."""
        trial, plan = self._claimed.pop(claim.number), self.candidates[claim.candidate]
        trial.set_user_attr(OUTCOME, outcome_to_dict(outcome))
        if outcome.seconds is not None and self.tokens:
            trial.set_user_attr("tokens_per_s", self.tokens / outcome.seconds.median)
        trial.set_constraint(MEMORY, 1.0 if outcome.reason == "oom" else -1.0)
        value = value_of(plan, outcome, self.objective) if outcome.is_measured else None
        if outcome.state == "pruned" and value is not None:
            trial.report(value, outcome.steps)
        self._tell(claim.number, outcome.state, value if outcome.state == "complete" else None)

    def _tell(self, number: int, state: str, value: float | None = None) -> None:
        import optuna

        states = optuna.trial.TrialState
        named = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        self.study.tell(number, value, state=named[state], skip_if_finished=True)

    def _trials(self) -> Iterator[tuple["optuna.trial.FrozenTrial", int]]:
        """The trials with the positions of their candidates, without repeated ones."""
        for trial in self.study.get_trials(deepcopy=False):
            at = self._places.get(trial.user_attrs.get(DEGREES, ""))
            if at is not None and REPEATED not in trial.user_attrs:
                yield trial, at

    def space(self) -> dict[str, "optuna.distributions.BaseDistribution"]:
        """The values that each degree has among the candidates."""
        import optuna

        distributions: dict[str, optuna.distributions.BaseDistribution] = {}
        every = [params_of(candidate.degrees) for candidate in self.candidates]
        for name in dict.fromkeys(name for params in every for name in params):
            values = [params[name] for params in every if name in params]
            if all(type(value) is int for value in values):
                distributions[name] = optuna.distributions.IntDistribution(min(values), max(values))
            else:
                distributions[name] = optuna.distributions.CategoricalDistribution(sorted(set(values), key=str))
        return distributions


def _read(kind: type[_T], data: Any) -> _T:
    """A value of a study. Raises `ValueError` for data of another form."""
    problems: list[Problem] = []
    value: _T = read_plain(kind, data, problems)
    if problems:
        raise ValueError(str(problems[0]))
    return value


def params_of(degrees: Mapping[str, Any]) -> dict[str, Any]:
    """The degrees as parameters of a trial. A list, such as cuts, is a text."""
    return {name: value if isinstance(value, (str, int)) else json.dumps(value) for name, value in degrees.items()}


def _text(degrees: Mapping[str, Any]) -> str:
    return json.dumps(dict(degrees), sort_keys=True)


def _owner_of(trial: "optuna.trial.FrozenTrial") -> Owner | None:
    owner = trial.user_attrs.get(OWNER)
    return None if owner is None else _read(Owner, owner)


def _is_answer(trial: "optuna.trial.FrozenTrial") -> bool:
    """Whether a trial has ended with an outcome that counts."""
    outcome = trial.user_attrs.get(OUTCOME)
    return trial.state.is_finished() and outcome is not None and outcome["reason"] != "interrupted"


def _is_running(trial: "optuna.trial.FrozenTrial") -> bool:
    owner, began = _owner_of(trial), trial.datetime_start
    if owner is None:  # its process takes it out of the queue, and then writes itself into it
        return not trial.state.is_finished() and began is not None and time.time() < began.timestamp() + _SLACK_S
    return not trial.state.is_finished() and owner.is_alive


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """Plain data of an outcome. An interval without bounds is left out, because JSON has no infinity."""
    data = asdict(outcome)
    if outcome.seconds is not None and outcome.seconds.low == 0:
        data["seconds"] = {"median": outcome.seconds.median}
    return data


def outcome_from(data: Mapping[str, Any]) -> Outcome:
    """The inverse of `outcome_to_dict`."""
    return _read(Outcome, data)
