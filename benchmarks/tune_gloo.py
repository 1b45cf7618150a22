"""Measured search on four gloo ranks: python benchmarks/tune_gloo.py [--json FILE] [--measured FILE] [--trials]

For each of three models, every plan that `autopar.tune` considers is measured: the ranks of all plans stay alive, and
the plans step in turns. Then strategies choose plans among them, with ten seeds. A trial of a plan is a draw of rounds:
the median ratio to another plan in the same rounds, as in `autopar.tune`.

- tune: the fastest by `autopar.search.measured.tuning`, at most five trials
- predicted: the plan that is predicted to be fastest, with a calibrated profile
- random, TPE, GP: as many trials; Optuna's samplers choose degrees, and the nearest plan is measured

The regret of a strategy is the measured time of its choice over the best plan's, less 1. The last table leaves plans
out: the error of the prediction of the plans that were not measured, and whether the 80 % interval has their time.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch

from autopar.capture.request import Request
from autopar.commands.calibrate import calibrate
from autopar.commands.given import Given
from autopar.commands.trial_world import ROUNDS, WARM_UP, World
from autopar.commands.tune import tune
from autopar.commands.tune_candidates import opened_study, subject_of
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.ir.cluster import ClusterSpec
from autopar.planning.options import PlanOptions
from autopar.search.measured.rounds import median_interval
from autopar.search.measured.study import TrialStudy, params_of
from autopar.search.measured.tuning import Candidate, Outcome, best_of, decide, known_after
from autopar.search.result.format import plan_in_words

RANKS, BATCH, TOKENS = 4, 8, 256
SEEDS, TRIALS, TURNS = 10, 5, 12
AFTER = (1, 2, 3, 5)
MOST = {"llama": 14, "gpt2": 14, "qwen3-moe": 10}  # plans whose ranks 24 GB hold at once
NORMAL_80 = 1.2816  # deviations that enclose 80 % of a normal distribution


def models() -> dict[str, torch.nn.Module]:
    """Three small models of three architectures, on meta."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 4096, "num_attention_heads": 8}
    more = {"num_key_value_heads": 8, "use_cache": False}
    with torch.device("meta"):
        return {
            "llama": LlamaForCausalLM(LlamaConfig(**sizes, **more, intermediate_size=704)),
            "gpt2": GPT2LMHeadModel(
                GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=4096, use_cache=False, attn_pdrop=0.0,
                           embd_pdrop=0.0, resid_pdrop=0.0)
            ),
            "qwen3-moe": Qwen3MoeForCausalLM(
                Qwen3MoeConfig(
                    **sizes, **more, intermediate_size=704, num_experts=8, num_experts_per_tok=2,
                    moe_intermediate_size=352, head_dim=32, experts_implementation="grouped_mm",
                )
            ),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """All plans of a model, and the seconds of each plan in each turn."""

    model: str
    candidates: tuple[Candidate, ...]
    seconds: tuple[tuple[float, ...], ...]
    building_s: tuple[float, ...]


def swept(name: str, model: torch.nn.Module, profile: DeviceProfile, most: int) -> Swept:
    """Measure `most` plans that may be measured, in turns. All their ranks are in memory at once."""
    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    cluster = ClusterSpec.preset(f"{RANKS}xcpu")
    given = Given(request=Request.of(model, {"input_ids": ids, "labels": ids}), name=name)
    asked = PlanOptions(global_batch=BATCH, top=19)
    subject = subject_of(given, cluster, asked, lambda _: None)
    study, _, _ = opened_study(subject, None, profile, lambda _: None, calibrate=False)
    kept, building = list[Candidate](), list[float]()
    with ExitStack() as stack:
        worlds = list[World]()
        for candidate in study.candidates[:most]:
            world = World(subject.job(candidate), candidate.num_devices, within_s=600)
            stack.callback(world.close)
            worlds.append(world)
            kept.append(candidate)
            building.append(world.building_s)
            for _ in range(WARM_UP):
                world.step()
        turns = []
        for turn in range(TURNS):
            order = range(len(worlds)) if turn % 2 else reversed(range(len(worlds)))
            found = {at: worlds[at].step() for at in order}
            turns.append([found[at] for at in range(len(worlds))])
            print(f"{name}: turn {turn + 1} of {TURNS}, {len(worlds)} plans", flush=True)
    return Swept(
        model=name,
        candidates=tuple(kept),
        seconds=tuple(zip(*turns, strict=True)),
        building_s=tuple(building),
    )


# ---- strategies ----


class Trials:
    """Trials of measured plans: each is a draw of rounds with the best plan so far."""

    def __init__(self, sweep: Swept, seed: int) -> None:
        self.sweep, self.generator = sweep, random.Random(seed)
        self.outcomes: dict[int, Outcome] = {}

    def measure(self, at: int) -> float:
        """The seconds of a plan on the scale of the first trial."""
        if at not in self.outcomes:
            best = best_of(self.sweep.candidates, self.outcomes)
            rounds = [self.generator.randrange(TURNS) for _ in range(ROUNDS)]
            own = [self.sweep.seconds[at][turn] for turn in rounds]
            if best is None:
                found = median_interval(own)
            else:
                beside, scale = self.sweep.seconds[best], self.outcomes[best].seconds
                assert scale is not None
                ratios = [mine / beside[turn] for mine, turn in zip(own, rounds, strict=True)]
                found = median_interval(ratios).times(scale.median)
            self.outcomes[at] = Outcome(state="complete", seconds=found)
        measured = self.outcomes[at].seconds
        assert measured is not None
        return measured.median


def by_tune(ranks: Trials, trials: int) -> None:
    while (found := decide(ranks.sweep.candidates, ranks.outcomes, most=trials)).next is not None:
        ranks.measure(found.next)


def by_prediction(ranks: Trials, trials: int) -> None:
    ranks.measure(min(range(len(ranks.sweep.candidates)), key=lambda at: ranks.sweep.candidates[at].predicted_s))


def at_random(ranks: Trials, trials: int) -> None:
    for at in ranks.generator.sample(range(len(ranks.sweep.candidates)), k=trials):
        ranks.measure(at)


def by_sampler(sampler: Callable[[int], optuna.samplers.BaseSampler]) -> Callable[[Trials, int], None]:
    """Optuna's sampler over the degrees of the plans. The nearest plan that was not measured is measured."""

    def run(ranks: Trials, trials: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space = TrialStudy(ranks.sweep.candidates, None, objective="time").space()
        params = [params_of(one.degrees) for one in ranks.sweep.candidates]
        study = optuna.create_study(sampler=sampler(ranks.generator.randrange(10**6)))
        while len(ranks.outcomes) < trials:
            asked = study.ask(space).params
            left = [at for at in range(len(params)) if at not in ranks.outcomes]
            at = min(left, key=lambda one: sum(asked[name] != value for name, value in params[one].items()))
            study.add_trial(optuna.trial.create_trial(params=params[at], distributions=space, value=ranks.measure(at)))

    return run


STRATEGIES: Mapping[str, Callable[[Trials, int], None]] = {
    "tune": by_tune,
    "predicted": by_prediction,
    "random": at_random,
    "TPE": by_sampler(lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=2)),
    "GP": by_sampler(lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=2)),
}


def regrets(sweep: Swept, strategy: str, trials: int) -> list[tuple[float, int]]:
    """The regret of each seed, and the number of trials."""
    truth = [statistics.median(one) for one in sweep.seconds]
    found = []
    for seed in range(SEEDS):
        ranks = Trials(sweep, seed)
        STRATEGIES[strategy](ranks, trials)
        best = best_of(sweep.candidates, ranks.outcomes)
        assert best is not None
        found.append((truth[best] / min(truth) - 1, len(ranks.outcomes)))
    return found


def learnt(sweep: Swept, count: int) -> tuple[float, float, float]:
    """After `count` trials of `tune`: errors of the other plans before and after, and the part inside the interval."""
    truth = np.array([statistics.median(one) for one in sweep.seconds])
    before, after, inside = list[float](), list[float](), list[float]()
    for seed in range(SEEDS):
        ranks = Trials(sweep, seed)
        by_tune(ranks, count)
        known = known_after(sweep.candidates, ranks.outcomes).belief
        left = [at for at in range(len(truth)) if at not in ranks.outcomes]
        off = np.log(known.seconds[left] / truth[left])
        before += [abs(sweep.candidates[at].predicted_s / truth[at] - 1) for at in left]
        after += np.abs(np.expm1(off)).tolist()
        inside += (np.abs(off) < NORMAL_80 * known.deviation[left]).tolist()
    return statistics.median(before), statistics.median(after), float(np.mean(inside))


def show(sweeps: Sequence[Swept]) -> None:
    for sweep in sweeps:
        truth = [median_interval(list(one)).times(1e3) for one in sweep.seconds]
        print(f"\n{sweep.model}: {len(truth)} plans\n")
        print("| plan | predicted, ms | measured, ms | 95 % interval |\n|---|---:|---:|---|")
        for at in sorted(range(len(truth)), key=lambda at: truth[at].median):
            one, found = sweep.candidates[at], truth[at]
            figures = f"{1e3 * one.predicted_s:.0f} | {found.median:.0f} | {found.low:.0f} to {found.high:.0f}"
            print(f"| {plan_in_words(one.degrees)} | {figures} |")
    print("\n| model | strategy | trials, mean | regret, median | regret, worst |\n|---|---|---:|---:|---:|")
    for sweep in sweeps:
        for name in STRATEGIES:
            results = regrets(sweep, name, TRIALS)
            each = [regret for regret, _ in results]
            count = statistics.fmean(trials for _, trials in results)
            print(f"| {sweep.model} | {name} | {count:.1f} | {statistics.median(each):.1%} | {max(each):.1%} |")
    print("\n| model | trials | error before | error after | inside the 80 % interval |\n|---|---:|---:|---:|---:|")
    for sweep in sweeps:
        for count in AFTER:
            before, after, inside = learnt(sweep, count)
            print(f"| {sweep.model} | {count} | {before:.1%} | {after:.1%} | {inside:.0%} |")


def overhead() -> None:
    """Run `autopar.tune` on each model, and print what a trial costs beside its steps."""
    print("| model | trial | steps, s | beside steps, s |\n|---|---:|---:|---:|")
    for name, model in models().items():
        ids = torch.zeros(2, TOKENS, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        found = tune(model, f"{RANKS}xcpu", example_inputs=batch, global_batch=BATCH, calibrate=False)
        for one in found.tried:
            rest = one.outcome.whole_s - one.outcome.stepping_s
            print(f"| {name} | {one.number + 1} | {one.outcome.stepping_s:.1f} | {rest:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the measured seconds to this file")
    parser.add_argument("--trials", action="store_true", help="only run `autopar.tune`, and print what its trials cost")
    parser.add_argument("--measured", type=Path, help="a file of --json: measure nothing")
    given = parser.parse_args()
    if given.measured is not None:
        show([_from(one) for one in json.loads(given.measured.read_text())])
        return
    if given.trials:
        overhead()
        return
    profile = calibrate(ranks=RANKS, minutes=1.5).profile
    sweeps = list[Swept]()
    for name, model in models().items():
        sweeps.append(swept(name, model, profile, MOST[name]))
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(one) for one in sweeps], indent=1))
    show(sweeps)


def _from(data: Mapping[str, Any]) -> Swept:
    return Swept(
        model=data["model"],
        candidates=tuple(Candidate(**one) for one in data["candidates"]),
        seconds=tuple(tuple(one) for one in data["seconds"]),
        building_s=tuple(data["building_s"]),
    )


if __name__ == "__main__":
    main()
