"""The knowledge and the next step of a measured search. Everything here is a function of candidates and outcomes.

    candidates    plans that fit by their prediction, in the order of their price
    outcomes      the measurements of the candidates with a trial, or the reasons of failed trials
    learnt        factors on computing and on the links of each tier, by ridge regression over the measured plans
    belief        the seconds of every candidate after that (`autopar.search.measured.belief`)
    decision      the candidate to measure next, or the reason why measuring ends

An out-of-memory trial rules out the candidates that are predicted to need as much or more. The same candidates and
outcomes give the same decision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.fit.measured_steps import term_factors
from autopar.cost_model.interval import Situation, interval_of
from autopar.ir.schedules.registry import SCHEDULE_NAMES
from autopar.search.measured.belief import Belief, belief, chances, expected_gains, worth_measuring
from autopar.search.measured.rounds import Spread

State = Literal["complete", "pruned", "failed"]
Reason = Literal["", "oom", "error", "timeout", "killed", "interrupted"]
LEVELS = {"none": 1.0, "selective": 2.0, "full": 4.0}
APART = 4.0  # plans of unlike schedules are as far from each other as by two doublings of a degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that may be measured. `terms` are its predicted seconds of computing, and of the links of each tier."""

    degrees: Mapping[str, Any] = field(hash=False)
    predicted_s: float
    predicted_bytes: float  # of the fullest rank, predicted
    terms: Mapping[str, float] = field(hash=False)
    num_devices: int
    per_second: float = 1.0  # the objective's value of one second, such as US dollars


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurement or the failure of one trial. A failed trial has no times."""

    state: State
    reason: Reason = ""
    message: str = ""
    seconds: Spread | None = None  # of one step, on the scale of the first trial
    peak_bytes: float | None = None  # of the fullest rank
    steps: int = 0  # that were timed
    building_s: float = 0.0
    stepping_s: float = 0.0  # of all steps in the trial, also of the best plan
    whole_s: float = 0.0  # of the trial

    @property
    def is_measured(self) -> bool:
        """Whether the trial has a step time. A pruned trial has one too."""
        return self.seconds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrial:
    """The candidate to measure next, or None with the reason why measuring ends."""

    next: int | None
    why: str
    is_settled: bool = False  # measuring on cannot pay, by the rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The knowledge after some trials: `factors` by term, the belief, and the candidates ruled out with the reason."""

    factors: Mapping[str, float]
    belief: Belief
    ruled_out: Mapping[int, str]

    @property
    def chance_left(self) -> float:
        """A bound of the chance that a plan is left that is notably faster than the best measured plan."""
        return min(1.0, float(np.sum(self._open(chances(self.belief)))))

    @property
    def gain_left(self) -> float:
        """The largest expected part of the best step time that measuring one more plan saves."""
        return float(np.max(self._open(expected_gains(self.belief)), initial=0.0))

    def _open(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([0.0 if at in self.ruled_out else value for at, value in enumerate(values)])


def known_after(candidates: Sequence[Candidate], outcomes: Mapping[int, Outcome]) -> Evidence:
    """What outcomes say of all candidates."""
    names = list(dict.fromkeys(name for plan in candidates for name in plan.terms))
    shares = np.array([[plan.terms.get(name, 0.0) / plan.predicted_s for name in names] for plan in candidates])
    measured = {at: run.seconds.median for at, run in outcomes.items() if run.seconds is not None}
    predicted = np.array([plan.predicted_s for plan in candidates])
    factors = np.ones(len(names))
    if measured:
        at = sorted(measured)
        factors = term_factors([measured[i] / predicted[i] for i in at], shares[at])
    corrected = predicted * (1 + shares @ (factors - 1))
    known = belief(corrected.tolist(), np.array([plan_coordinates(plan.degrees) for plan in candidates]), measured)
    return Evidence(
        factors=dict(zip(names, factors.tolist(), strict=True)),
        belief=known,
        ruled_out=_ruled_out(candidates, outcomes),
    )


def decide(
    candidates: Sequence[Candidate],
    outcomes: Mapping[int, Outcome],
    *,
    most: int,
    objective: str = "time",
    is_late: bool = False,
    taken: Sequence[int] = (),
) -> NextTrial:
    """The candidate to measure next, or why measuring ends."""
    known = known_after(candidates, outcomes)
    left = [at for at in range(len(candidates)) if at not in outcomes and at not in known.ruled_out]
    free = [at for at in left if at not in taken]
    if not left:
        return NextTrial(next=None, why="every plan was tried, or cannot run", is_settled=True)
    if objective == "memory":
        is_worth = _may_need_less(candidates, outcomes, left)
    else:
        is_worth = worth_measuring(known.belief, left)
    if not is_worth:
        return NextTrial(next=None, why="measuring another plan would hardly pay", is_settled=True)
    if is_late:
        return NextTrial(next=None, why="the time is used up")
    if len(outcomes) >= most:
        return NextTrial(next=None, why=f"{most} trials are done")
    if not free:
        return NextTrial(next=None, why="the plans that are left are being measured by another process")
    if objective == "memory":
        return NextTrial(next=min(free, key=lambda at: (candidates[at].predicted_bytes, at)), why="the least memory")
    value = {at: known.belief.mean[at] + np.log(candidates[at].per_second) for at in free}
    return NextTrial(next=min(free, key=lambda at: (value[at], at)), why="the best by what is known")


def best_of(candidates: Sequence[Candidate], outcomes: Mapping[int, Outcome], objective: str = "time") -> int | None:
    """The best candidate that ran, by the objective. None if none ran."""
    ran = [at for at, run in outcomes.items() if run.is_measured]
    return min(ran, key=lambda at: (value_of(candidates[at], outcomes[at], objective), at), default=None)


def value_of(candidate: Candidate, outcome: Outcome, objective: str) -> float:
    """The measured value of the objective: bytes of memory, or the value of the measured seconds."""
    assert outcome.seconds is not None
    if objective == "memory":
        return outcome.peak_bytes if outcome.peak_bytes is not None else candidate.predicted_bytes
    return outcome.seconds.median * candidate.per_second


def plan_coordinates(degrees: Mapping[str, Any]) -> list[float]:
    """The degrees of a plan, each at least 1, in which plans are near or far from each other."""
    counts = [float(degrees.get(name) or 1) for name in ("tp", "pp", "cp", "ep", "dp_replicate", "virtual_stages")]
    batches = prod(float(degrees.get(name) or 1) for name in ("micro_batches", "accumulate"))
    level = LEVELS.get(str(degrees.get("recompute")), 1.0)
    schedule = degrees.get("schedule") if (degrees.get("pp") or 1) > 1 else None
    schedules = [APART if schedule == name else 1.0 for name in SCHEDULE_NAMES]
    return [*counts, batches, level, 2.0 if degrees.get("zero") == 3 else 1.0, *schedules]


def _ruled_out(candidates: Sequence[Candidate], outcomes: Mapping[int, Outcome]) -> dict[int, str]:
    out = {at: run.reason or run.state for at, run in outcomes.items() if not run.is_measured}
    least = min((candidates[at].predicted_bytes for at, run in outcomes.items() if run.reason == "oom"), default=np.inf)
    why = "a plan that is predicted to need no more memory ran out of memory"
    return out | {at: why for at, plan in enumerate(candidates) if at not in outcomes and plan.predicted_bytes >= least}


def _may_need_less(candidates: Sequence[Candidate], outcomes: Mapping[int, Outcome], left: Sequence[int]) -> bool:
    """Whether a plan that was not tried may need less memory than the best plan that ran."""
    best = min(
        (value_of(candidates[at], run, "memory") for at, run in outcomes.items() if run.is_measured), default=np.inf
    )
    low, _ = interval_of(1.0, "memory", Situation())
    return min(candidates[at].predicted_bytes for at in left) * low < best
