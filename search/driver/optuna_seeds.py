"""The candidates that Optuna varies: the best one, and candidates that are nearly as fast.

Every kind of pipeline (`KIND`) has one candidate, because candidates of one kind mostly gain the same from the same
cuts. The best candidate's kind has a second one, which may have more room.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.step.unique_rows import distinct, numbered
from autopar.search.driver.optuna_refine import Start
from autopar.search.space.candidates import Candidates

NEARLY = 0.03  # slower than the best: moving a block was seen to gain 2 %
_MOST = 8  # varied candidates: their variations and the baselines do not exceed the trials of a search
KIND = ("tp", "cp", "ep", "pp", "schedule", "virtual", "micro_batch")
BEST = "best of screening"


def starts_of(
    space: Candidates,
    bounds: NDArray[np.float64],
    values: Callable[[Sequence[int]], Sequence[float]],
    best: int,
    others: Sequence[int],
    baselines: Mapping[int, str],
) -> list[Start]:
    """The best candidate and the baselines by name, which are tried as they are, then the other varied candidates."""
    names = {best: BEST} | {index: name for index, name in baselines.items() if index != best}
    most = values([best])[0] * (1 + NEARLY)
    staged = (bounds <= most) & (space.pp > 1)
    near = np.flatnonzero(staged & (np.arange(len(bounds)) != best))
    kinds = kinds_of(space)
    by_bound = near[np.argsort(bounds[near], kind="stable")].tolist()
    likely = list(dict.fromkeys([*_first_of_kinds(kinds, by_bound), *_first_of_kinds(kinds, others)]))
    near_enough = sorted((value, index) for value, index in zip(values(likely), likely, strict=True) if value <= most)
    varied = [*([best] if space.pp[best] > 1 else []), *_first_of_kinds(kinds, [index for _, index in near_enough])]
    return [
        Start(index=i, text=space.text(i), name=names.get(i, ""), is_varied=i in varied)
        for i in dict.fromkeys([*names, *varied])
    ]


def kinds_of(candidates: Candidates, columns: Sequence[str] = KIND) -> NDArray[np.int64]:
    """The kind of every candidate, as a number. Candidates of one kind are equal in all `columns`."""
    return distinct([numbered(getattr(candidates, name)) for name in columns]).numbers(len(candidates))


def _first_of_kinds(kinds: NDArray[np.int64], indices: Sequence[int]) -> list[int]:
    """The first candidate of each kind, for the kinds that are varied beside the best candidate."""
    first: dict[int, int] = {}
    for index in indices:
        first.setdefault(int(kinds[index]), index)
    return list(first.values())[: _MOST - 1]
