"""The best plan's step as formulas with their numbers: the terms that `autopar.cost_model.step.step` adds up.

A term's formula with its values gives its seconds. A symbol means the same in all terms.

    n   micro-batches of a step         L   repeated blocks of the slowest rank       N   devices
"""

import re
from collections.abc import Iterator

import numpy as np

from autopar.cost_model.pipeline.stages import (
    ENDS,
    recomputed_roles,
    seconds_of_roles,
    seconds_of_stages,
)
from autopar.cost_model.pricing import Pricing, layout_of
from autopar.search.pricing.exact import PricedPlan
from autopar.search.result.report_data import FormulaTerm, FormulaValue

BACKWARD = 2  # products backward for one forward
_STEP, _FITTED = "cost_model/step", "cost_model/machine/fitted_constants.yaml"
_SYMBOLS = {  # the meanings and the units of symbols
    "n": ("micro-batches of a step", ""),
    "L": ("repeated blocks of the slowest rank", ""),
    "t": ("{}", "s"),
    "F": ("work of a block and micro-batch, both passes", "FLOP"),
    "r": ("reached, {} of the peak", "FLOP/s"),
    "c": ("recomputed part of the blocks", ""),
    "R": ("runs of the schedule in a step", ""),
    "T": ("one run, its {} list replayed", "s"),
    "m": ("micro-batches of a run", ""),
    "u": ("a micro-batch on the slowest rank", "s"),
    "w": ("waiting for its own messages", "s"),
    "k": ("exposed messages", ""),
    "q": ("one message", "s"),
    "g": ("bytes read and written to add a gradient", "bytes"),
    "W": ("bytes/s of device memory", "bytes/s"),
    "o": ("bytes moved to update a parameter", "bytes"),
    "P": ("parameters that the rank updates", ""),
    "s": ("fixed seconds of a step", "s"),
    "B": ("the step without this part", "s"),
    "d": ("deviation of one rank's step", ""),
    "N": ("devices", ""),
}


def terms_of(best: PricedPlan, pricing: Pricing) -> Iterator[FormulaTerm]:
    """The terms that are not zero, in the order of `autopar.search.result.result.PARTS`."""
    parts = {name: float(np.max(part)) for name, part in best.step.parts.items()}
    terms = _Terms(best, pricing, parts)
    for term in (*terms.blocks(), *terms.pipeline(), *terms.end_of_step()):
        if term.seconds > 0:
            yield term


class _Terms:
    """The values that all terms of one plan share."""

    def __init__(self, best: PricedPlan, pricing: Pricing, parts: dict[str, float]) -> None:
        self.best, self.pricing, self.parts = best, pricing, parts
        self.degrees, self.machine, self.profile = best.degrees, pricing.machine, pricing.machine.profile.name
        self.passes, self.message_s = pricing.mean_passes_and_message()
        busy_s, num_blocks, share = self._slowest()
        of_step = {"n": float(self.degrees.num_micro_batches), "W": pricing.machine.speeds.bytes_per_s}
        self.numbers: dict[str, float] = {**of_step, "L": num_blocks, "c": share, "u": busy_s}

    def _slowest(self) -> tuple[float, float, float]:
        """The slowest rank: seconds of one micro-batch, number of repeated blocks, recomputed fraction of its blocks.

        If all stages recompute the same number of blocks, the fraction is the fraction of all blocks. If ranks share
        cores, the figures are of the mean rank, as in `autopar.cost_model.pipeline.stages`.
        """
        stages, works = self.pricing.stages(), self.pricing.works
        if stages is None:
            whole = sum(float(np.max(self.passes[role].both)) for role in works.calls if role)
            return (
                whole,
                float(sum(bool(role) and role not in ENDS for role in works.calls)),
                self.pricing.recomputed_share(),
            )
        forward, backward, _, _ = seconds_of_stages(stages, seconds_of_roles(self.passes))
        again_of = zip(*recomputed_roles(stages), strict=True)
        counts = [len(fully) + len(partly) for fully, partly in again_of]
        of_stages = zip(forward + backward, map(len, stages.repeated), counts, strict=True)
        of_ranks = np.zeros((stages.pp, 3))
        for rank, seconds in zip(stages.ranks, of_stages, strict=True):
            of_ranks[rank] += seconds
        busy, blocks, more = of_ranks.mean(axis=0) if self.machine.ranks_per_core > 1 else max(of_ranks.tolist())
        return busy, blocks, self.pricing.recomputed_share() if stages.full is None else more / max(blocks, 1)

    def term(self, part: str, formula: str, source: str, says: str = "", **values: float) -> FormulaTerm:
        """A term with the values of the symbols in its formula. A meaning with a blank says more about the value."""
        numbers = self.numbers | values
        symbols = ((symbol, *_SYMBOLS[symbol]) for symbol in re.findall(r"\b[a-zA-Z]\b", formula))
        of_formula = tuple(
            FormulaValue(symbol=symbol, meaning=meaning.format(says), value=numbers[symbol], unit=unit)
            for symbol, meaning, unit in symbols
        )
        return FormulaTerm(part=part, formula=formula, values=of_formula, seconds=self.parts[part], source=source)

    # ---- blocks ----

    def blocks(self) -> Iterator[FormulaTerm]:
        part, says = "embedding, head, loss", "embedding, head and loss of a micro-batch on the slowest rank"
        yield self.term(part, "n * t", f"{_STEP}/block_prices.py", says, t=self.parts[part] / self.numbers["n"])
        if self.numbers["L"]:
            yield from self.repeated_blocks()

    def repeated_blocks(self) -> Iterator[FormulaTerm]:
        for part, kind in (("products", "matmul"), ("attention", "attention")):
            yield self._computed(part, kind)
        yield self._each_block("memory-bound", "memory-bound kernels of a block, both passes", f"{_STEP}/block_time.py")
        yield self._each_block("host", "seconds in which a block waits for the host", f"{_STEP}/block_time.py")
        waits = "seconds in which a block waits for the counts of its experts' rows"
        yield self._each_block("expert counts", waits, f"{_STEP}/experts.py")
        each = self.parts["recomputation"] / (self.numbers["n"] * self.numbers["L"] * (self.numbers["c"] or 1.0))
        yield self.term(
            "recomputation", "n * L * c * t", f"{_STEP}/assembly.py", "recomputation of such a block", t=each
        )
        sent = "a block's exposed collectives: bytes over bandwidth plus latency, minus hidden seconds"
        for part in ("tensor collectives", "context collectives", "expert collectives"):
            yield self._each_block(part, sent, f"{_STEP}/block_prices.py, cost_model/machine/collectives.py")
        longer = "exposed seconds of gathering a block's weights and scattering its gradients"
        yield self._each_block("shard collectives", longer, f"{_STEP}/data_parallel.py")

    def _computed(self, part: str, kind: str) -> FormulaTerm:
        """FLOP over the rate that the kernels reach."""
        per_block, flops, file = self._of_block(part), self._flops(kind), f"{_STEP}/block_time.py"
        if not flops or not per_block:
            return self._each_block(part, "of a block", file)
        rate = flops / per_block
        reached, source = f"{rate / self.machine.peak_flops_per_s:.0%}", f"{file}, profile {self.profile}"
        return self.term(part, "n * L * F / r", source, reached, F=flops, r=rate)

    def _flops(self, kind: str) -> float:
        """FLOP of one micro-batch in the mean repeated block of a rank, forward and backward."""
        works = self.pricing.works
        family = self.pricing.family(layout_of(works, self.degrees))
        total = sum(count for _, count in works.counts)
        return (1 + BACKWARD) * sum(
            count / total * float(np.max(product.flops))
            for role, count in works.counts
            for product in family.block(role, "tp").products
            if product.kind == kind
        )

    def _of_block(self, part: str) -> float:
        return self.parts[part] / (self.numbers["n"] * self.numbers["L"])

    def _each_block(self, part: str, meaning: str, files: str) -> FormulaTerm:
        return self.term(part, "n * L * t", f"{files}, profile {self.profile}", meaning, t=self._of_block(part))

    # ---- pipeline ----

    def pipeline(self) -> Iterator[FormulaTerm]:
        degrees, parts, u = self.degrees, self.parts, self.numbers["u"]
        runs = degrees.accumulate if degrees.pp > 1 else 1
        m, w = self.numbers["n"] / runs, parts["messages"] / runs
        source = "cost_model/pipeline/simulator.py, autopar/ir/schedules"
        run = {"R": float(runs), "T": parts["bubble"] / runs + m * u + w, "m": m, "w": w}
        yield self.term("bubble", "R * (T - m * u - w)", source, degrees.schedule, **run)
        one_message_s = self.message_s or 1.0
        source = f"{_STEP}/assembly.py, cost_model/machine/links.py"
        yield self.term("messages", "k * q", source, k=parts["messages"] / one_message_s, q=one_message_s)

    # ---- the end of a step ----

    def end_of_step(self) -> Iterator[FormulaTerm]:
        engine, constants, parts = self.pricing.question.engine, self.pricing.machine.mechanisms, self.parts
        moved, each = self.numbers["W"], float(engine.optimizer_bytes)
        sums = f"exposed sums of gradients and gathers of parameters over {self.degrees.dp} ranks"
        source = f"{_STEP}/data_parallel.py, {_STEP}/assembly.py"
        yield self.term("data collectives", "t", source, sums, t=parts["data collectives"])
        added = parts["gradient accumulation"] * moved / max(1.0, self.numbers["n"] - 1)
        yield self.term("gradient accumulation", "(n - 1) * g / W", f"{_STEP}/assembly.py", g=added)
        source = f"cost_model/machine/engines/{engine.name}.yaml"
        yield self.term("optimizer", "o * P / W", source, o=each, P=parts["optimizer"] * moved / each)
        yield self.term("fixed", "s", _FITTED, s=constants.step_s)
        before, source = self.best.seconds - parts["stragglers"], f"{_FITTED}; Fisher, Tippett 1928"
        deviation, devices = constants.straggler, float(self.degrees.world_size)
        yield self.term("stragglers", "B * d * sqrt(2 * log(N))", source, B=before, d=deviation, N=devices)
