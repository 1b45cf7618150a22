"""Optuna varies pipeline stages, which bounds cannot rank: it moves blocks out of the first and the last stage.

The cut that makes the slowest stage fastest need not make the step fastest. A lighter first stage holds fewer
activations, so fewer blocks are recomputed. Unequal stages also cost different schedules different times. A trial is
one of the best candidates with some blocks moved, priced by a replay of its action list. The sampler is told the
missing bytes of a trial that does not fit. If all variations are no more than the requested trials, all are tried.

Several processes may share a study. A variation that another process priced is not priced again. The trials of all
processes count, so a search adds none to a complete study. Each process seeds its sampler by the number of its first
trial.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from autopar.search.driver.study import CUTS, StudyPlace, importance, next_trial
from autopar.search.result.result import Trial

if TYPE_CHECKING:
    import optuna

    from autopar.search.pricing.exact import PricedPlan

MOST_MOVED = 1  # blocks out of an end; 2 gained no more, and the sampler missed gains of 1 (docs/search.md)
MISSING = "missing_bytes"  # a trial's constraint: bytes over the device's capacity, at most 0 if it fits
SOURCE = "source"  # the origin of a trial that no sampler chose
STARTUP = 10  # random trials before the sampler uses the values of trials
STALE_S = 60.0  # a trial takes milliseconds; the process of a trial that runs longer than this has died
NONE = (0, 0)
MOVES = range(-MOST_MOVED, MOST_MOVED + 1)

Variation = tuple[str, tuple[int, int]]  # a candidate's text, and the blocks moved out of its ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A candidate of trials."""

    index: int
    text: str  # names it in the study
    name: str = ""  # if it is tried as it is
    is_varied: bool = True  # it is tried with blocks moved

    @property
    def variations(self) -> Sequence[Variation]:
        """All variations. The candidate as it is comes first."""
        if not self.is_varied:
            return [(self.text, NONE)]
        return [(self.text, moved) for moved in sorted(product(MOVES, MOVES), key=lambda moves: moves != NONE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """All trials of the study, the best plan that fits, and how much each parameter decided."""

    trials: tuple[Trial, ...] = ()
    best: "PricedPlan | None" = None
    importance: Mapping[str, float] = field(default_factory=dict, hash=False)


def refine(
    starts: Sequence[Start],
    price: Callable[[int, tuple[int, int]], "PricedPlan"],
    *,
    trials: int,
    capacity_bytes: float,
    seed: int,
    value: Callable[["PricedPlan"], float] = lambda plan: plan.seconds,
    index_of: Callable[[str], int] | None = None,
    place: StudyPlace | None = None,
    should_continue: Callable[[], bool] = lambda: True,
    prefetch: Callable[[Sequence[tuple[int, tuple[int, int]]]], None] = lambda _: None,
) -> Refinement:
    """Vary the candidates in `starts` until the study has `trials` different trials, or all variations."""
    refining = _Refining(place, starts, price, value, capacity_bytes, index_of)
    every = [(start, variation) for start in starts for variation in start.variations]
    all_are_tried = len(every) <= trials
    sources = {(start.text, NONE): f"enqueued: {start.name}" for start in starts if start.name}
    if all_are_tried:
        prefetch([(start.index, moved) for start, (_, moved) in every])
        sources |= {variation: "enumerated" for _, variation in every if variation not in sources}
    refining.enqueue(sources, is_shared=place is not None)
    most = min(trials, len(every))
    while should_continue() and not refining.is_spent(most):
        refining.one_trial(seed, most)
    return refining.result()


class _Refining:
    """One process's part of a study."""

    def __init__(
        self,
        place: StudyPlace | None,
        starts: Sequence[Start],
        price: Callable[[int, tuple[int, int]], "PricedPlan"],
        value: Callable[["PricedPlan"], float],
        capacity_bytes: float,
        index_of: Callable[[str], int] | None,
    ) -> None:
        import optuna
        from optuna.distributions import CategoricalDistribution, IntDistribution

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        texts, self.place = [start.text for start in starts], place
        self.study, choices = (optuna.create_study(), texts) if place is None else place.opened(texts, CUTS)
        self.starts, self.price, self.value = starts, price, value
        self.capacity_bytes, self.index_of = capacity_bytes, index_of
        self.start = {start.text: start for start in starts}
        moves = IntDistribution(MOVES[0], MOVES[-1])
        self.space: dict[str, Any] = {
            "candidate": CategoricalDistribution(list(choices)),
            "out_of_first": moves,
            "out_of_last": moves,
        }
        self.choices = set(choices)
        self.before = {trial.number for trial in self.study.get_trials(deepcopy=False) if trial.state.is_finished()}
        self.own: dict[int, PricedPlan] = {}
        self.mine: set[int] = set()
        self.is_repeating = False  # whether the sampler's last variation had a price

    def enqueue(self, sources: Mapping[Variation, str], *, is_shared: bool) -> None:
        """Try these variations before a sampler chooses, each once in a study."""
        for wanted, source in sources.items():
            if wanted[0] in self.choices:
                # skipping is slow, and needed if another process may have enqueued the variation
                attributes = {SOURCE: source}
                self.study.enqueue_trial(_params(wanted), user_attrs=attributes, skip_if_exists=is_shared)

    def is_spent(self, trials: int) -> bool:
        """Whether `trials` different variations have a value or are being priced. Samplers may repeat a variation."""
        counted = [trial for trial in self.study.get_trials(deepcopy=False) if _counts(trial)]
        different = {self.variation(trial.params) for trial in counted if trial.params.keys() == self.space.keys()}
        return len(different) >= trials or len(counted) >= 2 * trials

    def one_trial(self, seed: int, trials: int) -> None:
        import optuna

        if self.is_repeating:
            self.enqueue_untried()
        trial = next_trial(self.study, self.space, self.place)
        if not self.mine:  # the numbers of first trials differ, so that no two processes sample the same
            startup = min(STARTUP, trials)
            mixed = seed + 1_000_003 * trial.number
            self.study.sampler = optuna.samplers.TPESampler(seed=mixed % 2**32, n_startup_trials=startup)
        self.mine.add(trial.number)
        wanted = self.variation(trial.params)
        told = self._told(wanted)
        self.is_repeating = told is not None
        if told is None:
            plan = self.price(self.index(wanted[0]), wanted[1])
            self.own[trial.number] = plan
            told = (self.value(plan), plan.peak_bytes - self.capacity_bytes)
        trial.set_constraint(MISSING, told[1])
        self.study.tell(trial, told[0])

    def enqueue_untried(self) -> None:
        """Try next what no trial has, because the sampler repeats itself."""
        trials = self.study.get_trials(deepcopy=False)
        tried = {self.variation(trial.params) for trial in trials if trial.params.keys() == self.space.keys()}
        untried = (variation for start in self.starts for variation in start.variations if variation not in tried)
        self.enqueue(dict.fromkeys(islice(untried, 1), "enumerated"), is_shared=True)

    def variation(self, params: Mapping[str, Any]) -> Variation:
        """The variation of a trial. A candidate that is not varied has no moved blocks."""
        text = str(params["candidate"])
        start = self.start.get(text)
        moved = (int(params["out_of_first"]), int(params["out_of_last"]))
        return text, moved if start is None or start.is_varied else NONE

    def index(self, text: str) -> int:
        if text in self.start or self.index_of is None:
            return self.start[text].index
        return self.index_of(text)

    def _told(self, wanted: Variation) -> tuple[float, float] | None:
        """Value and missing bytes of a variation. None if no process has priced it."""
        for trial in self.study.get_trials(deepcopy=False):
            if trial.value is not None and self.variation(trial.params) == wanted:
                return trial.value, trial.constraints[MISSING]
        return None

    def result(self) -> Refinement:
        told = self.study.get_trials(deepcopy=False)
        fits = [trial for trial in told if trial.value is not None and trial.constraints.get(MISSING, 1.0) <= 0]
        best = min(fits, key=lambda trial: (trial.value, trial.number), default=None)
        priced = None
        if best is not None:
            text, moved = self.variation(best.params)
            priced = self.own.get(best.number) or self.price(self.index(text), moved)
        trials = tuple(self.row(t) for t in sorted(told, key=lambda t: t.number) if t.state.is_finished())
        return Refinement(trials=trials, best=priced, importance=importance(self.study))

    def row(self, trial: "optuna.trial.FrozenTrial") -> Trial:
        source = str(trial.user_attrs.get(SOURCE, "sampled"))
        if trial.number not in self.mine:
            source = "resumed" if trial.number in self.before else "another process"
        return Trial(
            number=trial.number,
            params=dict(trial.params),
            value=trial.value,
            missing_bytes=trial.constraints.get(MISSING),
            state=trial.state.name.lower(),
            source=source,
        )


def _params(wanted: Variation) -> dict[str, Any]:
    text, moved = wanted
    return {"candidate": text, "out_of_first": moved[0], "out_of_last": moved[1]}


def _counts(trial: "optuna.trial.FrozenTrial") -> bool:
    """Whether a trial has a value, or a live process is pricing it."""
    if trial.value is not None:
        return True
    if trial.state.name != "RUNNING" or trial.datetime_start is None:
        return False
    now = datetime.now(UTC if trial.datetime_start.tzinfo else None)
    return abs((now - trial.datetime_start).total_seconds()) < STALE_S
