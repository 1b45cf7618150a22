"""Which candidates Optuna varies: the best, the baselines, and what is nearly as fast as the best.

Of every kind of pipeline (degrees, schedule, stages, micro-batch) there is one, the fastest by its exact price or,
where it has none, by its bound: those that differ in how state is held or in the order of ranks alone mostly gain the
same from the same cuts. Of the best one's kind there is another one too, which may have more room. Bounds choose which
are priced exactly, and exact prices which of these are varied.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.step.unique_rows import distinct, numbered
from autopar.search.driver.optuna_refine import Start
from autopar.search.space.baselines import Baseline
from autopar.search.space.candidates import Candidates

NEARLY = 0.03  # slower than the best: moving a block has been seen to gain 2 %
_MOST = 8  # of all: with blocks moved, and baselines as they are, no more than the trials of a search
KIND = ("tp", "pp", "schedule", "virtual", "micro_batch")
BEST = "best of screening"


def starts_of(
    found: Candidates,
    bounds: NDArray[np.float64],
    values: Callable[[Sequence[int]], Sequence[float]],
    best: int,
    others: Sequence[int],
    baselines: Sequence[Baseline],
) -> list[Start]:
    """The best candidate and baselines by name, which are tried as they are, then the others that are varied.

    `bounds` are those of values, or values where they are known; infinite for what cannot be priced. `values` gives
    exact ones, whether a candidate fits as it is or not. `others` are better than their bounds say, the best first.
    """
    names = {best: BEST}
    for one in baselines:
        names.setdefault(one.index, one.name)
    most = values([best])[0] * (1 + NEARLY)
    staged = (bounds <= most) & (found.pp > 1)
    near = np.flatnonzero(staged & (np.arange(len(bounds)) != best))
    kinds = kinds_of(found)
    by_bound = near[np.argsort(bounds[near], kind="stable")].tolist()
    likely = list(dict.fromkeys([*_first_of_kinds(kinds, by_bound), *_first_of_kinds(kinds, others)]))
    near_enough = sorted((value, index) for value, index in zip(values(likely), likely, strict=True) if value <= most)
    varied = [*([best] if found.pp[best] > 1 else []), *_first_of_kinds(kinds, [index for _, index in near_enough])]
    return [
        Start(index=i, text=found.text(i), name=names.get(i, ""), is_varied=i in varied)
        for i in dict.fromkeys([*names, *varied])
    ]


def kinds_of(found: Candidates, columns: Sequence[str] = KIND) -> NDArray[np.int64]:
    """A number for all candidates that are equal in those columns: by default, with the same kind of pipeline."""
    kinds = distinct([numbered(getattr(found, name)) for name in columns], len(found)).index
    return np.zeros(len(found), dtype=np.int64) if kinds is None else kinds


def _first_of_kinds(kinds: NDArray[np.int64], indices: Sequence[int]) -> list[int]:
    """The first candidate of each kind, of as many kinds as are varied beside the best."""
    first: dict[int, int] = {}
    for index in indices:
        first.setdefault(int(kinds[index]), index)
    return list(first.values())[: _MOST - 1]
