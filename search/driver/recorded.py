"""The record of a search in its study: how the degrees were chosen, as Optuna's trials.

    priced    COMPLETE: a candidate with an exact price, its value, and its missing bytes as the constraint
    bound     PRUNED: a combination of degrees without an exact price, its best bound as the intermediate value

The parameters of a price are all degrees by the words of `autopar.search.space.dimensions`, those of a bound are the
degrees of its combination. A combination that cannot fit has no bound. Optuna's importances and best trial are about
complete trials only, so bounds do not count there.

Every candidate and every combination has one trial in a study, however many searches write into it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.arrays import Floats
from autopar.ir.degrees import RECOMPUTE
from autopar.search.driver.optuna_refine import MISSING, SOURCE
from autopar.search.driver.optuna_seeds import kinds_of
from autopar.search.driver.search import SearchState, raised_seconds
from autopar.search.driver.study import StudyPlace, importance
from autopar.search.pricing.exact import AS_IT_IS
from autopar.search.space.candidates import Candidates
from autopar.search.space.dimensions import DIMENSIONS, WORDS, Dimension

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

MOST_TRIALS = 300  # trials of a study
FEWEST = 10  # exact prices that importances are about
COMBINATION = ("tp", "pp", "cp", "ep", "dp", "zero")
PRICED, BOUND = "priced", "bound"  # sources of trials
OFFLOAD, LEFT_OUT = "offload", "left_out"  # attributes of a trial and of the study


def record(search: SearchState, place: StudyPlace) -> Mapping[str, float]:
    """Write the trials of a search into its study, without those that it has already."""
    if not len(search.candidates):
        return {}
    wanted = _trials(search)
    with place.writing() as study:
        known = {_key(trial) for trial in study.get_trials(deepcopy=False)} - {None}
        new = [trial for trial in wanted if _key(trial) not in known]
        by_rank = sorted(range(len(new)), key=lambda at: _rank(new[at]))
        room = max(0, MOST_TRIALS - len(known))
        for at in sorted(by_rank[:room]):
            study.add_trial(new[at])
        sources = [new[at].user_attrs[SOURCE] for at in by_rank[room:]]
        left_out = {source: sources.count(source) for source in (PRICED, BOUND)}
        if study.user_attrs.get(LEFT_OUT) != left_out:
            study.set_user_attr(LEFT_OUT, left_out)
        complete = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    return importance(study) if len(complete) >= FEWEST else {}


def _trials(search: SearchState) -> "list[FrozenTrial]":
    """Exact prices in the order of the search, then bounds from the smallest on."""
    from optuna.trial import TrialState, create_trial

    c, goal, space = search.candidates, search.goal, _space(search.candidates)
    kinds, bounds, best_of = _bounds_of_combinations(search)
    any_part = next(iter(goal.parts.values()))
    shared: dict[str, Any] = {OFFLOAD: any_part.on.machine.engine.offload}
    # those of the search in its order, then those of the next best plans
    prices = dict(search.exact)
    prices |= {index: plan for (index, cut), plan in search.together.found.items() if cut == AS_IT_IS}
    trials = [
        create_trial(
            params=_params(c, index) | {"recompute": plan.degrees.recompute},
            distributions=space,
            value=goal.value(plan),
            constraints={MISSING: plan.peak_bytes - goal.part(plan).on.capacity_bytes},
            user_attrs=shared
            | {
                SOURCE: PRICED,
                "step_s": plan.seconds,
                "peak_bytes": plan.peak_bytes,
                "fits": plan.fits,
                "best_bound": float(bounds[best_of[int(kinds[index])]]),
            },
        )
        for index, plan in prices.items()
    ]
    counts, priced = np.bincount(kinds).tolist(), {int(kinds[index]) for index in prices}
    for kind, index in best_of.items():
        if kind in priced:
            continue
        bound, count, params = float(bounds[index]), counts[kind], _params(c, index)
        fits = bound < np.inf
        attributes = {SOURCE: BOUND, "bound": True, "fits": fits, "candidate": c.text(index), "candidates": count}
        trials.append(
            create_trial(
                state=TrialState.PRUNED,
                params={word: params[word] for word in COMBINATION},
                distributions={word: space[word] for word in COMBINATION},
                intermediate_values={0: bound} if fits else {},
                user_attrs=shared | attributes,
            )
        )
    return trials


def _bounds_of_combinations(search: SearchState) -> tuple[NDArray[np.int64], Floats, Mapping[int, int]]:
    """The combination of every candidate as a number, all bounds, and the best candidate of each combination in order.

    Bounds are those of the proof: screened, then raised by exact prices. Refused splits have none.
    """
    c, screened = search.candidates, search.screened
    bounds = search.goal.bounds(c, replace(screened, seconds=raised_seconds(search)))
    least_bytes = np.minimum(screened.without_bytes, screened.recomputed_bytes)
    legal = np.flatnonzero(~c.of(*search.refused))
    order = legal[np.lexsort((least_bytes[legal], bounds[legal]))]
    kinds = kinds_of(c, COMBINATION)
    first = np.sort(np.unique(kinds[order], return_index=True)[1])
    return kinds, bounds, {int(kinds[index]): int(index) for index in order[first]}


def _params(c: Candidates, index: int) -> dict[str, Any]:
    """The degrees of a candidate by their words."""
    return {each.word: each.value_at(int(_column(c, each)[index])) for each in DIMENSIONS}


def _space(c: Candidates) -> "dict[str, BaseDistribution]":
    """The distributions of all degrees. They follow from the candidates, which all searches of a study share."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    distributions: dict[str, BaseDistribution] = {"recompute": CategoricalDistribution(RECOMPUTE)}
    for each in DIMENSIONS:
        most = each.most or int(np.max(_column(c, each)))
        distributions[each.word] = (
            CategoricalDistribution(each.names) if each.names else IntDistribution(each.least, most, log=each.least > 0)
        )
    return distributions


def _column(c: Candidates, each: Dimension) -> NDArray[np.int64]:
    column: NDArray[np.int64] = getattr(c, each.column or each.word)
    return column


def _rank(trial: "FrozenTrial") -> tuple[bool, bool, float]:
    """Exact prices first, plans that fit first, then by value or bound."""
    value = trial.intermediate_values.get(0, np.inf) if trial.value is None else trial.value
    return trial.user_attrs[SOURCE] == BOUND, not trial.user_attrs["fits"], value


def _key(trial: "FrozenTrial") -> str | None:
    """The text of a trial's candidate or combination. None for trials that this module does not write."""
    words = {PRICED: WORDS, BOUND: COMBINATION}.get(trial.user_attrs.get(SOURCE, ""))
    if words is None:
        return None
    return json.dumps([trial.user_attrs[SOURCE], trial.user_attrs[OFFLOAD], *(trial.params[word] for word in words)])
