"""What bounds cannot rank, by Optuna: blocks moved out of a pipeline's first and last stage.

The cut that makes the slowest stage fastest need not make the step fastest: a lighter first stage holds fewer
activations, so that fewer blocks are recomputed, and schedules feel unequal stages in different places. A trial is one
of the best candidates with some blocks moved, priced by replaying its action list. Trials that do not fit are told to
the sampler by how many bytes they miss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.search.exact import Priced

if TYPE_CHECKING:
    import optuna

MOST_MOVED = 2
MISSING = "missing_bytes"  # a trial's constraint: what it is over the device's capacity, at most 0 where it fits
STARTUP = 10  # trials before the sampler has enough to go by


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """One trial: which candidate, the blocks moved out of its ends, and what that costs."""

    number: int
    candidate: int
    moved: tuple[int, int]
    priced: Priced


def refine(
    best: Sequence[int],
    price: Callable[[int, tuple[int, int]], Priced],
    *,
    trials: int,
    capacity_bytes: float,
    seed: int,
    goes_on: Callable[[], bool] = lambda: True,
    storage: "optuna.storages.BaseStorage | None" = None,
    study_name: str | None = None,
) -> list[Refined]:
    """At most `trials` variations of the candidates in `best`, the first of which is tried first as it is.

    With a `storage` the study goes on where another process, or an earlier search, left it.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(STARTUP, trials)),
        storage=storage,
        study_name=study_name,
        load_if_exists=storage is not None,
    )
    moves = optuna.distributions.IntDistribution(-MOST_MOVED, MOST_MOVED)
    space: dict[str, Any] = {
        "candidate": optuna.distributions.CategoricalDistribution(list(best)),
        "out_of_first": moves,
        "out_of_last": moves,
    }
    if not study.trials:
        study.enqueue_trial({"candidate": best[0], "out_of_first": 0, "out_of_last": 0})
    found: list[Refined] = []
    known: dict[tuple[int, int, int], Priced] = {}
    while len(found) < trials and goes_on():
        trial = study.ask(space)
        wanted = (trial.params["candidate"], trial.params["out_of_first"], trial.params["out_of_last"])
        if wanted not in known:
            known[wanted] = price(wanted[0], wanted[1:])
        one = known[wanted]
        trial.set_constraint(MISSING, one.needed_bytes - capacity_bytes)
        study.tell(trial, one.seconds)
        found.append(Refined(number=trial.number, candidate=wanted[0], moved=wanted[1:], priced=one))
    return found
