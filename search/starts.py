"""Which candidates Optuna varies: the best, the baselines, and what may be nearly as fast as the best.

Of every kind of pipeline (degrees, schedule, stages, micro-batch) there is one, the fastest by its exact price or,
where it has none, by its bound: those that differ in how state is held alone gain the same from the same cuts.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.search.baselines import Baseline
from autopar.search.refine import Start
from autopar.search.space import Candidates

NEARLY = 0.03  # slower than the best: moving a block has been seen to gain 2 %
MOST = 8
BEST = "best of screening"


def starts_of(
    found: Candidates,
    bounds: NDArray[np.float64],
    exact: Mapping[int, float],
    best: int,
    baselines: Sequence[Baseline],
) -> list[Start]:
    """The best candidate and baselines by name, which are tried as they are, then the others.

    `bounds` are seconds, infinite for what cannot be priced; `exact` prices by candidate, infinite where one does not
    fit.
    """
    names = {best: BEST}
    for one in baselines:
        names.setdefault(one.index, one.name)
    seconds = bounds.copy()
    seconds[list(exact)] = list(exact.values())
    near = np.flatnonzero((seconds <= exact[best] * (1 + NEARLY)) & (found.pp > 1))
    kinds: dict[tuple[int, ...], int] = {}
    columns = (found.tp, found.pp, found.schedule, found.virtual, found.micro_batch)
    for index in near[np.argsort(seconds[near], kind="stable")].tolist():
        kinds.setdefault(tuple(int(column[index]) for column in columns), index)
    return [
        Start(index=i, text=found.text(i), name=names.get(i, ""), has_stages=bool(found.pp[i] > 1))
        for i in dict.fromkeys([*names, *list(kinds.values())[:MOST]])
    ]
