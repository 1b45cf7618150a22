"""Measured search replayed on published sweeps: python benchmarks/tune_replay.py [--json]

Every layout of a sweep was measured, so a trial is a look-up. A group has at least five layouts of the same work
(`autopar.cost_model.published.ranking`). Trials go on in the order of an order:

- predicted: the fastest by prediction, with the shipped constants, which were partly fitted on these rows;
- believed: the fastest by `autopar.search.measured.belief` after the trials before;
- random: the median of 200 draws.

The regret is the measured time of the best layout tried over the best of the group, less 1. The stop rule is
`worth_measuring`. It is right if the best layout tried is within 2 % of the best.
"""

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.ranking import RowTimes, same_work
from autopar.cost_model.published.row import Row, read_rows
from autopar.cost_model.published.validation import compared_rows, timed_rows
from autopar.search.measured.belief import NOTABLE, OWN, Belief, belief, worth_measuring

DATA = Path(__file__).parent / "data"
FILES = {"published runs": "published_runs.csv", "vTrain's sweep": "sweep_vtrain_single_a100.csv"}
AFTER = (1, 2, 3, 5)
DRAWS = 200
LEVELS = {"none": 1.0, "selective": 2.0, "full": 4.0}
Order = Callable[[Belief, Sequence[RowTimes], random.Random], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One group: the regret after each trial, and the number of trials at which the rule stopped."""

    regrets: tuple[float, ...]
    stopped: int


def degrees_of(row: Row) -> list[float]:
    """The degrees of a layout, each at least 1."""
    counts = (row.tp, row.pp, row.dp, row.micro_batch, row.vpp)
    return [*(float(one or 1) for one in counts), LEVELS[row.recompute or "none"]]


def by_prediction(found: Belief, layouts: Sequence[RowTimes], _: random.Random) -> int:
    left = np.flatnonzero(~found.is_measured).tolist()
    return int(min(left, key=lambda at: layouts[at].predicted_s))


def by_belief(found: Belief, _: Sequence[RowTimes], __: random.Random) -> int:
    return int(np.argmin(np.where(found.is_measured, np.inf, found.mean)))


def at_random(found: Belief, _: Sequence[RowTimes], generator: random.Random) -> int:
    return int(generator.choice(np.flatnonzero(~found.is_measured).tolist()))


ORDERS: Mapping[str, Order] = {"predicted": by_prediction, "believed": by_belief, "random": at_random}


def replay(layouts: Sequence[RowTimes], order: Order, *, seed: int = 0, own: float = OWN) -> Replayed:
    """All trials of a group."""
    predicted = [one.predicted_s for one in layouts]
    degrees: NDArray[np.float64] = np.array([degrees_of(one.row) for one in layouts])
    best, generator = min(one.measured_s for one in layouts), random.Random(seed)
    measured: dict[int, float] = {}
    regrets, stopped = [], None
    while len(measured) < len(layouts):
        found = belief(predicted, degrees, measured, own_s=own)
        if measured and stopped is None and not worth_measuring(found):
            stopped = len(measured)
        at = order(found, layouts, generator)
        measured[at] = layouts[at].measured_s
        regrets.append(min(measured.values()) / best - 1)
    return Replayed(regrets=tuple(regrets), stopped=stopped or len(layouts))


def groups_of(file: str) -> list[list[RowTimes]]:
    """The layouts of a file with a measured and a predicted time, by work."""
    return same_work(timed_rows(compared_rows(read_rows(DATA / file), estimate_rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The trials of one order on one file."""

    groups: str
    order: str
    p90_regret: tuple[float, ...]  # after `AFTER` trials
    trials_mean: float  # until the best layout tried is within 2 % of the best
    trials_worst: int
    stopped_mean: float
    layouts_mean: float
    right: float  # part of the groups in which the rule stopped within 2 % of the best


def summary(name: str, order: str, groups: Sequence[Sequence[RowTimes]], own: float = OWN) -> Summary:
    """The trials of one order, the median of draws if it is random."""
    draws = DRAWS if order == "random" else 1
    every = [[replay(group, ORDERS[order], seed=seed, own=own) for seed in range(draws)] for group in groups]

    def after(count: int) -> list[float]:
        return [median(one.regrets[min(count, len(one.regrets)) - 1] for one in runs) for runs in every]

    needed = [median(next(i + 1 for i, r in enumerate(one.regrets) if r <= NOTABLE) for one in runs) for runs in every]
    last = [one.regrets[one.stopped - 1] for runs in every for one in runs]
    return Summary(
        groups=name,
        order=order,
        p90_regret=tuple(float(np.quantile(after(count), 0.9)) for count in AFTER),
        trials_mean=fmean(needed),
        trials_worst=int(max(needed)),
        stopped_mean=fmean(one.stopped for runs in every for one in runs),
        layouts_mean=fmean(len(group) for group in groups),
        right=fmean(regret <= NOTABLE for regret in last),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="plain data")
    given = parser.parse_args()
    files = {name: groups_of(file) for name, file in FILES.items()}
    found = [summary(name, order, groups) for name, groups in files.items() for order in ORDERS]
    if given.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    after = " | ".join(f"{count}" for count in AFTER)
    print(f"| groups | order | p90 of regret after {after} trials | within 2 % after, mean | worst | stopped | right |")
    print("|---|---|" + "---:|" * (len(AFTER) + 4))
    for one in found:
        regrets = " | ".join(f"{value:.1%}" for value in one.p90_regret)
        stop = f"{one.stopped_mean:.1f} of {one.layouts_mean:.1f} | {one.right:.0%}"
        print(f"| {one.groups} | {one.order} | {regrets} | {one.trials_mean:.2f} | {one.trials_worst} | {stop} |")


if __name__ == "__main__":
    main()
