"""Predicted against measured order of five plans of one model: python benchmarks/plan_order.py [--profile FILE]

A small Llama runs whole training steps (forward, backward, AdamW) of one global batch on four gloo ranks of this
machine. Every round runs every plan. `autopar.estimate` prices each plan with a measured profile: the file of
`--profile`, or the profile that `autopar calibrate --ranks 4` measures now.

Two plans are ordered if the 95 % interval of the ratio of paired rounds does not contain 1. The plan that is predicted
faster must then be faster. Exits with 1 if it is not.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from paired import Ratio, Step, block, ratio, slowest

if TYPE_CHECKING:
    from autopar.cost_model.estimate import Estimate
    from autopar.cost_model.machine.profile import DeviceProfile

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
RANKS, BATCH, SEQUENCE = 4, 8, 256  # sequences of a step over all ranks, tokens of one
PLANS: Mapping[str, Mapping[str, Any]] = {
    "dp 4, ZeRO 1": {"dp": 4, "zero": 1},
    "dp 4, ZeRO 3, recomputed": {"dp": 4, "zero": 3, "accumulate": 2, "recompute": "full"},
    "tp 4": {"tp": 4},
    "tp 2 × dp 2, ZeRO 1": {"tp": 2, "dp": 2, "zero": 1},
    "pp 2 × dp 2": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 4},
}
# plans that the cost model was not adjusted to, other than the five above
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "dp 4, ZeRO 0": {"dp": 4, "zero": 0},
    "dp 4, ZeRO 2, 2 micro-batches": {"dp": 4, "zero": 2, "accumulate": 2},
    "tp 2 × dp 2, ZeRO 3": {"tp": 2, "dp": 2, "zero": 3},
    "pp 2 × tp 2": {"pp": 2, "tp": 2, "micro_batches": 4},
    "pp 4, 4 micro-batches": {"pp": 4, "micro_batches": 4},
}
SETS = {"five": PLANS, "others": OTHERS, "all": {**PLANS, **OTHERS}}
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One plan: predicted seconds of a step with their parts, and the measured seconds of every round.

    `processor_s` are the processor seconds of all ranks in a step over the number of cores, a lower bound of the step.
    """

    plan: str
    predicted_s: float
    parts: Mapping[str, float]
    rounds_s: Sequence[float]
    processor_s: float

    @property
    def measured_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def spread(self) -> float:
        """The relative difference of the slowest tenth of rounds and the fastest: the noise of the machine."""
        ordered = sorted(self.rounds_s)
        return ordered[int(0.9 * (len(ordered) - 1))] / ordered[int(0.1 * len(ordered))] - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two plans: the measured ratio of paired rounds, the predicted one, and whether the order is predicted.

    `agrees` is None if the interval of the measured ratio contains 1, because no plan is shown to be faster.
    """

    first: str
    second: str
    measured: Ratio
    predicted: float

    @property
    def agrees(self) -> bool | None:
        if self.measured.low <= 1 <= self.measured.high:
            return None
        is_slower: bool = self.measured.median > 1
        return is_slower == (self.predicted > 1)


def model() -> Any:
    """The same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, use_cache=False))


def batch(plan: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One data-parallel rank's part of a step."""
    shape, generator = (BATCH // plan.get("dp", 1), SEQUENCE), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], shape, generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def step_of(plan: Mapping[str, Any]) -> Step:
    """A training step as the README has it."""
    import autopar

    data = batch(plan)
    parallel = autopar.parallelize(model(), f"{RANKS}xcpu", example_inputs=data, plan=plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        loss = parallel.forward_backward(data)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def race(rank: int, which: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step of every plan and round: the slowest rank's, and the processors'."""
    steps = {name: step_of(plan) for name, plan in SETS[which].items()}
    for step in steps.values():  # first steps allocate and connect
        block(step, 2)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for index in range(rounds):
        for name in list(steps) if index % 2 else reversed(list(steps)):
            found[name].append(once(steps[name]))
    return found


def once(step: Step) -> tuple[float, float]:
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    step()
    spent, used = time.perf_counter() - start, time.process_time() - used
    total = torch.tensor(used, dtype=torch.float64)
    dist.all_reduce(total)
    return slowest(spent), float(total) / (os.cpu_count() or 1)


def predicted(plan: Mapping[str, Any], profile: "DeviceProfile") -> "Estimate":
    import autopar

    return autopar.estimate(
        model(), f"{RANKS}xcpu", plan, example_inputs=batch(plan), global_batch=BATCH, profile=profile, precision="fp32"
    )


def parts_of(made: "Estimate") -> dict[str, float]:
    """Seconds by part of a step; they add up to the step."""
    moved = {f"{one.mesh_dim}: {one.what}": one.exposed_s for one in made.collectives}
    return {name: s for name, s in {**made.compute_s, **moved, **made.other_s}.items() if s > 0}


def profile_from(path: Path | None, minutes: float) -> "DeviceProfile":
    """The profile of a file, or of this machine, measured now."""
    if path is not None:
        from autopar.cost_model.machine.profile_io import load_profile

        return load_profile(path)
    from autopar.commands.calibrate import calibrate

    return calibrate(ranks=RANKS, minutes=minutes).profile


def pairs_of(plans: Sequence[Priced]) -> list[Pair]:
    return [
        Pair(
            first=one.plan,
            second=other.plan,
            measured=ratio(list(one.rounds_s), list(other.rounds_s)),
            predicted=one.predicted_s / other.predicted_s,
        )
        for one, other in combinations(plans, 2)
    ]


# ---- printing ----


def machine() -> str:
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}, gloo, one thread per rank"


def tables(plans: Sequence[Priced], pairs: Sequence[Pair]) -> list[str]:
    """Both tables in Markdown."""
    lines = [
        "| plan | predicted s | measured s | predicted / measured | rounds differ by | processors s |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(plans, key=lambda each: each.measured_s):
        off = f"{one.predicted_s / one.measured_s:.2f}"
        seconds = f"{one.predicted_s:.3f} | {one.measured_s:.3f}"
        lines.append(f"| {one.plan} | {seconds} | {off} | {one.spread:.0%} | {one.processor_s:.3f} |")
    lines += ["", "| plan | over | measured ratio | predicted ratio | order |", "|---|---|---|---|---|"]
    says = {True: "agrees", False: "**differs**", None: "not decided"}
    lines += [f"| {p.first} | {p.second} | {p.measured} | {p.predicted:.3f} | {says[p.agrees]} |" for p in pairs]
    return lines


def verdict(pairs: Sequence[Pair]) -> str:
    decided = [pair for pair in pairs if pair.agrees is not None]
    agreeing = sum(pair.agrees is True for pair in decided)
    return f"{agreeing} of the {len(decided)} pairs that the measured rounds decide are predicted in their order"


def report(plans: Sequence[Priced], pairs: Sequence[Pair], profile: "DeviceProfile", command: str, note: str) -> str:
    """The file of results; `note` states facts about the machine."""
    day, measured = datetime.now(UTC).date().isoformat(), profile.measured
    width, layers, words = (SIZES[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    how = f"{measured.date}, {measured.how}, {measured.seconds:.0f} s" if measured is not None else "not measured"
    rounds = len(plans[0].rounds_s)
    texts = (
        f"Device: {machine()}. Step: forward, backward and AdamW of a Llama ({layers} layers, width {width}, "
        f"vocabulary {words:,}) on {BATCH} × {SEQUENCE} tokens in float32 over {RANKS} ranks. {rounds} rounds run "
        "every plan in turn; a step is the slowest rank's, measured figures are medians. Ratios are of paired "
        "rounds, medians with their 95 % bootstrap interval; where that holds 1, no order is claimed. *Processors*: "
        "the ranks' processor time over the cores, what a step takes at least; what it takes beyond that is waiting, "
        "for messages and for whatever else ran on the machine.",
        f"Profile: `autopar calibrate --ranks {RANKS}`: {how}.",
        f"`python {command}`. {note}",
    )
    title = f"# Predicted and measured order of {len(plans)} plans, CPU and gloo, {day}"
    paragraphs = "\n\n".join(textwrap.fill(text, 125) for text in (title, *texts))
    return "\n".join([paragraphs, "", *tables(plans, pairs), "", verdict(pairs) + ".", ""])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="of `autopar calibrate --ranks 4`; without it, measured first")
    parser.add_argument("--minutes", type=float, default=3.0, help="of calibration")
    parser.add_argument("--plans", choices=tuple(SETS), default="five")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="plain data, with the parts of every prediction")
    parser.add_argument("--write", action="store_true", help="write the tables into benchmarks/results, too")
    parser.add_argument("--note", default="", help="a sentence for the file, such as what else ran on the machine")
    return parser.parse_args()


def _command(given: argparse.Namespace) -> str:
    return f"benchmarks/plan_order.py --plans {given.plans} --rounds {given.rounds}"


def main() -> int:
    from autopar.runtime.distributed.launch import Ranks

    given = arguments()
    profile = profile_from(given.profile, given.minutes)
    with Ranks(RANKS, timeout_s=1200, checked=False) as ranks:
        times = ranks.run("plan_order:race", given.plans, given.rounds)[0]
    plans = []
    for name, plan in SETS[given.plans].items():
        made = predicted(plan, profile)
        rounds, processors = zip(*times[name], strict=True)
        plans.append(
            Priced(
                plan=name,
                predicted_s=made.step_s,
                parts=parts_of(made),
                rounds_s=rounds,
                processor_s=statistics.median(processors),
            )
        )
    pairs = pairs_of(plans)
    if given.json:
        found = [asdict(p) | {"measured_s": p.measured_s, "spread": p.spread} for p in plans]
        print(json.dumps({"plans": found, "pairs": [asdict(p) | {"agrees": p.agrees} for p in pairs]}, indent=2))
    else:
        print("\n".join([*tables(plans, pairs), "", verdict(pairs)]))
    if given.write:
        other = "" if given.plans == "five" else f"-{given.plans}"
        path = RESULTS / f"{datetime.now(UTC).date().isoformat()}-cpu-gloo-plan-order{other}.md"
        path.write_text(report(plans, pairs, profile, _command(given), given.note), encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)
    return 1 if any(pair.agrees is False for pair in pairs) else 0


if __name__ == "__main__":
    sys.exit(main())
