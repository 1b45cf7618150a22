"""The worth of Optuna in the search: `python benchmarks/optuna_worth.py OUT.json OUT.svg`.

Three ways are compared at equal numbers of prices, with 20 seeds each: TPE as in
`autopar.search.driver.optuna_refine`, random sampling, and screening alone. There are two spaces.

*Refining* has the nearly best candidates of a search, with blocks moved out of end stages and recomputation by stage.
The search prices every point, so the regret is exact. Screening alone takes the best candidate without changes.

*Whole* has every combination of degrees, micro-batch, ZeRO stage and schedule, without bounds. Optuna samples each
word, and illegal combinations cost no price. Random sampling draws legal candidates. Screening prices the baselines,
and then the smallest bound first, as the search does.

Regret is the best price so far over the best price of the space (proven by the search), less 1. Plans that do not fit
do not count. Regret is capped at `CAP`.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import optuna
from search_problem import Problem

from autopar.ir.rank_order import ORDERS
from autopar.ir.schedules.registry import SCHEDULE_NAMES
from autopar.search.driver.optuna_refine import MISSING, MOST_MOVED, STARTUP
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import PricedPlan, priced
from autopar.search.space.candidates import Candidates, candidates
from autopar.search.space.dimensions import Constraints

SEEDS = 20
REFINING_TRIALS, WHOLE_TRIALS = 40, 150
CAP = 10.0
SHOWN = (1, 10, 20, 30, 40, 80, 150)
EVERY = 10_000  # trials: more than there are variations, so that all are priced
LEGAL_ASKS = 20  # a sampler may name illegal combinations this many times per trial


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of a point. `missing_bytes` is at most 0 if the plan fits."""

    seconds: float
    missing_bytes: float

    @classmethod
    def of(cls, one: PricedPlan, capacity_bytes: float) -> "Price":
        return cls(seconds=one.seconds, missing_bytes=one.peak_bytes - capacity_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, and words that narrow it."""

    name: str
    problem: Problem
    fix: dict[str, Any]


def case(model: str, cluster: str, sequence: int, batch: int, layers: int | None = None, **fix: Any) -> Case:
    problem = Problem(model=model, cluster=cluster, sequence=sequence, global_batch=batch, layers=layers)
    size = f"{model} ({layers} layers)" if layers else model
    return Case(name=f"{size}, {cluster}, batch {batch}", problem=problem, fix={"tp": (1, 2, 4, 8), **fix})


REFINING = (
    case("llama3-8b", "64xv100-32gb", 8192, 128, layers=16, pp=(8, 16)),
    case("llama3-70b", "64xh100", 8192, 64, layers=30, pp=(8, 16)),
    case("llama3-8b", "64xv100-32gb", 8192, 128, pp=(4, 8)),
    case("gpt3-175b", "256xa100-80gb", 2048, 512),
    case("llama3-70b", "64xa100-40gb", 4096, 512),
)
WHOLE = (case("llama3-8b", "64xv100-32gb", 8192, 128), case("gpt3-175b", "256xa100-80gb", 2048, 512))

Curve = list[float]
Point = tuple[str | int, ...]


def main(out: Path, chart: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found: dict[str, dict[str, dict[str, Curve]]] = {"refining": {}, "whole": {}}
    for one in REFINING:
        found["refining"][one.name] = refining(one)
        show("refining", one.name, found["refining"][one.name])
    for one in WHOLE:
        found["whole"][one.name] = whole(one)
        show("whole", one.name, found["whole"][one.name])
    out.write_text(json.dumps({"seeds": SEEDS, "regret": found}, indent=1) + "\n")
    draw(found, chart)


def searched(one: Case, narrowed: Constraints, trials: int = 0) -> SearchState:
    problem = one.problem
    return search_degrees(problem.works, problem.spec, narrowed, problem.on, most_exact=2000, trials=trials)


def refining(one: Case) -> dict[str, Curve]:
    """Median regret by trials of each way over the refinement's points."""
    found = searched(one, one.problem.constraints.narrowed(one.fix), trials=EVERY)
    assert found.proof.best is not None
    prices: dict[Point, Price] = {}
    named: list[Point] = []
    for trial in found.refined.trials:
        assert trial.value is not None and trial.missing_bytes is not None
        point = tuple(trial.params[name] for name in ("candidate", "out_of_first", "out_of_last"))
        prices[point] = Price(seconds=trial.value, missing_bytes=trial.missing_bytes)
        if trial.source.startswith("enqueued"):
            named.append(point)
    space = {
        "candidate": optuna.distributions.CategoricalDistribution(list(dict.fromkeys(point[0] for point in prices))),
        "out_of_first": optuna.distributions.IntDistribution(-MOST_MOVED, MOST_MOVED),
        "out_of_last": optuna.distributions.IntDistribution(-MOST_MOVED, MOST_MOVED),
    }
    optimum = min(price.seconds for price in prices.values() if price.fits)

    def price(point: Point) -> Price:
        return prices.get(point) or prices[point[0], 0, 0]  # a plan without a pipeline has no blocks to move

    def sampled(sampler: optuna.samplers.BaseSampler) -> Curve:
        return curve(sampler, space, price, named, optimum, REFINING_TRIALS)

    return over_seeds(sampled) | {"screening alone": [found.proof.best.value / optimum - 1] * REFINING_TRIALS}


def whole(one: Case) -> dict[str, Curve]:
    """Median regret by trials of each way over all candidates."""
    problem = one.problem
    narrowed = problem.constraints.narrowed(one.fix)
    every = candidates(narrowed)
    found = searched(one, narrowed)
    assert found.proof.best is not None
    capacity = problem.on.capacity_bytes
    known = {index: Price.of(price, capacity) for index, price in found.exact.items()}
    in_order = list(known.values())[:WHOLE_TRIALS]  # baselines, then the smallest bound first
    optimum = found.proof.best.value

    def price(index: int) -> Price:
        if index not in known:
            degrees = every.degrees(index)
            known[index] = Price.of(priced(problem.works(degrees.tp), degrees, problem.on), capacity)
        return known[index]

    columns = words(every)
    place = {point: index for index, point in enumerate(zip(*columns.values(), strict=True))}
    space = {
        name: optuna.distributions.CategoricalDistribution(sorted(set(values), key=str))
        for name, values in columns.items()
    }

    def sampled(sampler: optuna.samplers.BaseSampler) -> Curve:
        def priced_at(point: Point) -> Price | None:
            return price(place[point]) if point in place else None

        return curve(sampler, space, priced_at, [], optimum, WHOLE_TRIALS)

    def drawn(seed: int) -> Curve:
        order = np.random.default_rng(seed).permutation(len(every))[:WHOLE_TRIALS]
        return so_far([price(int(index)) for index in order], optimum)

    return {
        "TPE": medians([sampled(tpe(seed)) for seed in range(SEEDS)]),
        "random": medians([drawn(seed) for seed in range(SEEDS)]),
        "screening alone": so_far(in_order + in_order[-1:] * (WHOLE_TRIALS - len(in_order)), optimum),
    }


def words(found: Candidates) -> dict[str, list[Any]]:
    """The values of every word of the space, without words that follow from the others."""
    return {
        "tp": found.tp.tolist(),
        "pp": found.pp.tolist(),
        "dp_shard": found.dp_shard.tolist(),
        "order": [ORDERS[position] for position in found.order.tolist()],
        "zero": found.zero.tolist(),
        "micro_batch": found.micro_batch.tolist(),
        "schedule": [SCHEDULE_NAMES[position] for position in found.schedule.tolist()],
        "virtual": found.virtual.tolist(),
    }


def curve(
    sampler: optuna.samplers.BaseSampler,
    space: dict[str, Any],
    price: Callable[[Any], Price | None],
    first: Sequence[Point],
    optimum: float,
    trials: int,
) -> Curve:
    """Regret after each price. An illegal combination is reported to the sampler, and costs no price."""
    study = optuna.create_study(sampler=sampler)
    for point in first:
        study.enqueue_trial(dict(zip(space, point, strict=True)))
    found: list[Price] = []
    for _ in range(LEGAL_ASKS * trials):
        trial = study.ask(space)
        one = price(tuple(trial.params[name] for name in space))
        if one is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        trial.set_constraint(MISSING, one.missing_bytes)
        study.tell(trial, one.seconds)
        found.append(one)
        if len(found) == trials:
            break
    regret = so_far(found, optimum)
    return regret + [regret[-1] if regret else CAP] * (trials - len(regret))


def so_far(found: Sequence[Price], optimum: float) -> Curve:
    values = [one.seconds if one.fits else np.inf for one in found]
    return [min(CAP, float(value) / optimum - 1) for value in np.minimum.accumulate(values)]


def over_seeds(sampled: Callable[[optuna.samplers.BaseSampler], Curve]) -> dict[str, Curve]:
    return {
        "TPE": medians([sampled(tpe(seed)) for seed in range(SEEDS)]),
        "random": medians([sampled(optuna.samplers.RandomSampler(seed=seed)) for seed in range(SEEDS)]),
    }


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)


def medians(curves: Sequence[Curve]) -> Curve:
    return [median(values) for values in zip(*curves, strict=True)]


def show(space: str, name: str, found: dict[str, Curve]) -> None:
    print(f"\n{space}: {name} (median regret of {SEEDS} seeds, %)")
    shown = [count for count in SHOWN if count <= min(map(len, found.values()))]
    print("| prices |" + "".join(f" {count} |" for count in shown))
    for way, values in found.items():
        print(f"| {way} |" + "".join(f" {100 * values[count - 1]:.2f} |" for count in shown), flush=True)


def draw(found: dict[str, dict[str, dict[str, Curve]]], chart: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "optuna_worth"
    from matplotlib import pyplot

    cases = [(f"{space}\n{name}", one) for space, named in found.items() for name, one in named.items()]
    figure, axes = pyplot.subplots(2, -(-len(cases) // 2), figsize=(4 * -(-len(cases) // 2), 6), squeeze=False)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for axis, (name, one) in zip(axes.flat, cases, strict=False):
        for way, values in one.items():
            axis.step(range(1, len(values) + 1), [100 * value for value in values], where="post", label=way)
        axis.set(title=name, xlabel="prices", ylabel="median regret, %")
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set_ylim(bottom=0)
        axis.title.set_fontsize(8)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(chart, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
