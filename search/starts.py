"""Which candidates Optuna varies: the best, the baselines, and what is nearly as fast as the best.

Of every kind of pipeline (degrees, schedule, stages, micro-batch) there is one, the fastest by its exact price or,
where it has none, by its bound: those that differ in how state is held or in the order of ranks alone mostly gain the
same from the same cuts. Of the best one's kind there is another one too, which may have more room. Bounds choose which
are priced exactly, and exact prices which of these are varied.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.search.baselines import Baseline
from autopar.search.refine import Start
from autopar.search.space import Candidates

NEARLY = 0.03  # slower than the best: moving a block has been seen to gain 2 %
MOST = 8  # of all: with blocks moved, and baselines as they are, no more than the trials of a search
BEST = "best of screening"


def starts_of(
    found: Candidates,
    bounds: NDArray[np.float64],
    values: Callable[[Sequence[int]], Sequence[float]],
    best: int,
    baselines: Sequence[Baseline],
) -> list[Start]:
    """The best candidate and baselines by name, which are tried as they are, then the others that are varied.

    `bounds` are those of values, or values where they are known; infinite for what cannot be priced. `values` gives
    exact ones, whether a candidate fits as it is or not.
    """
    names = {best: BEST}
    for one in baselines:
        names.setdefault(one.index, one.name)
    most = values([best])[0] * (1 + NEARLY)
    staged = (bounds <= most) & (found.pp > 1)
    near = np.flatnonzero(staged & (np.arange(len(bounds)) != best))
    kinds: dict[tuple[int, ...], int] = {}
    columns = (found.tp, found.pp, found.schedule, found.virtual, found.micro_batch)
    for index in near[np.argsort(bounds[near], kind="stable")].tolist():
        kinds.setdefault(tuple(int(column[index]) for column in columns), index)
        if len(kinds) == MOST - 1:
            break
    likely = [*([best] if staged[best] else []), *kinds.values()]
    varied = [index for index, value in zip(likely, values(likely), strict=True) if value <= most]
    return [
        Start(index=i, text=found.text(i), name=names.get(i, ""), is_varied=i in varied)
        for i in dict.fromkeys([*names, *varied])
    ]
