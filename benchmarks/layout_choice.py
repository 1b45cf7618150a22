"""The quality of the layout that a search would pick among measured layouts: `python benchmarks/layout_choice.py`.

A group has at least five measured layouts of the same work (`autopar.cost_model.published.ranking`), from the published
runs and vTrain's sweep. The layout with the fastest prediction is picked. Its regret is its measured time over the best
measured time, less 1. All layouts ran, so all of them fit. Other ways to pick, on the same rows:

    autopar, of what fits            only layouts that are predicted to fit, as in a search (all layouts if none is)
    boosted trees, source left out   fitted on the rows of all other sources (`benchmarks/baselines.py`)
    boosted trees, work left out     fitted on nine tenths of all works, also of the groups' own sources
    random choice                    any layout of the group; the median of `DRAWS` draws

autopar's constants were fitted on the rows of tier core: some of the published layouts, and few of the sweep.
Needs ``pip install '.[benchmark]'``.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from baselines import RUNS, Run, boosted_trees, folds, timed_runs

from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.ranking import WORK, RankedGroup, RowTimes, ranked_groups
from autopar.cost_model.published.row import Row, RowEstimate, read_rows

SWEEP = Path(__file__).parent / "data" / "sweep_vtrain_single_a100.csv"
DRAWS, PARTS = 200, 10
SURELY_SLOWER = 1e6  # seconds of a layout that does not fit count this many times
Seconds = Mapping[str, float]


def main() -> None:
    sets = {"published runs": timed_runs(read_rows(RUNS)), "vTrain's sweep": timed_runs(read_rows(SWEEP))}
    every = [run for runs in sets.values() for run in runs]
    ways: dict[str, Seconds] = {
        "**autopar**": estimated(every),
        "autopar, of what fits": estimated(every, only_fitting=True),
        "boosted trees, source left out": source_left_out(every),
        "boosted trees, work left out": work_left_out(every),
    }
    sets["both"] = every
    print("| groups of | groups | layouts | picked by | regret, median group | p90 | worst | best layout picked |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for name, runs in sets.items():
        for way, seconds in ways.items():
            show(name, way, [grouped(runs, seconds)])
        show(name, "random choice", [grouped(runs, drawn(runs, seed)) for seed in range(DRAWS)])


def grouped(runs: Sequence[Run], seconds: Seconds) -> tuple[RankedGroup, ...]:
    return ranked_groups(RowTimes(row=r.row, measured_s=r.seconds, predicted_s=seconds[r.row.id]) for r in runs)


def show(name: str, way: str, draws: Sequence[Iterable[RankedGroup]]) -> None:
    """One line: figures over groups, the median over draws."""
    groups = [list(one) for one in draws]
    regrets = np.array([[group.regret for group in one] for one in groups])
    figures = [*(np.median(np.quantile(regrets, q, axis=1)) for q in (0.5, 0.9, 1.0))]
    picked = np.median(np.mean(regrets == 0, axis=1))
    layouts = sum(group.layouts for group in groups[0])
    cells = " | ".join(f"{100 * value:.1f} %" for value in figures)
    print(f"| {name} | {len(groups[0])} | {layouts} | {way} | {cells} | {100 * picked:.0f} % |", flush=True)


def estimated(runs: Sequence[Run], *, only_fitting: bool = False) -> Seconds:
    """autopar's predictions, of rows without their results."""
    found: dict[str, float] = {}
    for one in estimate_rows([run.row.without_result() for run in runs]):
        assert isinstance(one, RowEstimate), one
        found[one.id] = one.seconds * (SURELY_SLOWER if only_fitting and not one.fits else 1.0)
    return found


def source_left_out(runs: Sequence[Run]) -> Seconds:
    """Boosted trees fitted on every other source."""
    found: dict[str, float] = {}
    for fold in folds([run.row for run in runs], elsewhere=()):
        test = [runs[i] for i in fold.test]
        found |= by_id(test, boosted_trees([runs[i] for i in fold.train], test))
    return found


def work_left_out(runs: Sequence[Run]) -> Seconds:
    """Boosted trees fitted on nine of ten parts of the works, and used for the tenth part."""
    works = {work: i for i, work in enumerate(dict.fromkeys(work_of(run.row) for run in runs))}
    parts = np.random.default_rng(0).permutation(len(works)) % PARTS
    found: dict[str, float] = {}
    for part in range(PARTS):
        test = [run for run in runs if parts[works[work_of(run.row)]] == part]
        train = [run for run in runs if parts[works[work_of(run.row)]] != part]
        found |= by_id(test, boosted_trees(train, test))
    return found


def work_of(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in WORK)


def drawn(runs: Sequence[Run], seed: int) -> Seconds:
    """Random seconds, which pick a random layout."""
    return by_id(runs, np.random.default_rng(seed).random(len(runs)).tolist())


def by_id(runs: Sequence[Run], seconds: Sequence[float]) -> dict[str, float]:
    return {run.row.id: value for run, value in zip(runs, seconds, strict=True)}


if __name__ == "__main__":
    main()
