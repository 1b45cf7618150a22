"""The best plan's step as formulas with their numbers: the terms that `autopar.cost_model.step.step` adds up.

A term's formula with its values gives its seconds. A symbol means the same in all terms.

    n   micro-batches of a step         L   repeated blocks of the slowest rank       N   devices
"""

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
        self.degrees, self.machine = best.degrees, pricing.machine
        self.speeds, self.profile = pricing.machine.speeds, pricing.machine.profile.name
        self.passes, self.message_s = pricing.mean_passes_and_message()
        self.num_micro_batches = float(self.degrees.num_micro_batches)
        self.busy_s, self.num_blocks, self.share = self._slowest()

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

    @property
    def n(self) -> FormulaValue:
        return FormulaValue(symbol="n", meaning="micro-batches of a step", value=self.num_micro_batches, unit="")

    @property
    def own_blocks(self) -> FormulaValue:
        return FormulaValue(symbol="L", meaning="repeated blocks of the slowest rank", value=self.num_blocks, unit="")

    def term(self, part: str, formula: str, values: tuple[FormulaValue, ...], source: str) -> FormulaTerm:
        return FormulaTerm(part=part, formula=formula, values=values, seconds=self.parts[part], source=source)

    # ---- blocks ----

    def blocks(self) -> Iterator[FormulaTerm]:
        ends = FormulaValue(
            symbol="t",
            meaning="embedding, head and loss of a micro-batch on the slowest rank",
            value=self.parts["embedding, head, loss"] / self.num_micro_batches,
            unit="s",
        )
        yield self.term("embedding, head, loss", "n * t", (self.n, ends), "cost_model/step/block_prices.py")
        if self.num_blocks:
            yield from self.repeated_blocks()

    def repeated_blocks(self) -> Iterator[FormulaTerm]:
        for part, kind in (("products", "matmul"), ("attention", "attention")):
            yield self._computed(part, kind)
        yield self._each_block(
            "memory-bound", "memory-bound kernels of a block, both passes", "cost_model/step/block_time.py"
        )
        yield self._each_block("host", "seconds in which a block waits for the host", "cost_model/step/block_time.py")
        waits = "seconds in which a block waits for the counts of its experts' rows"
        yield self._each_block("expert counts", waits, "cost_model/step/experts.py")
        yield self._recomputation()
        sent = "a block's exposed collectives: bytes over bandwidth plus latency, minus hidden seconds"
        for part in ("tensor collectives", "context collectives", "expert collectives"):
            yield self._each_block(part, sent, "cost_model/step/block_prices.py, cost_model/machine/collectives.py")
        longer = "exposed seconds of gathering a block's weights and scattering its gradients"
        yield self._each_block("shard collectives", longer, "cost_model/step/data_parallel.py")

    def _computed(self, part: str, kind: str) -> FormulaTerm:
        """FLOP over the rate that the kernels reach."""
        per_block = self.parts[part] / (self.num_micro_batches * self.num_blocks)
        flops = self._flops(kind)
        if not flops or not per_block:
            return self._each_block(part, "of a block", "cost_model/step/block_time.py")
        rate, peak = flops / per_block, self.machine.peak_flops_per_s
        reached = f"reached, {rate / peak:.0%} of the peak"
        values = (
            self.n,
            self.own_blocks,
            FormulaValue(symbol="F", meaning="work of a block and micro-batch, both passes", value=flops, unit="FLOP"),
            FormulaValue(symbol="r", meaning=reached, value=rate, unit="FLOP/s"),
        )
        return self.term(part, "n * L * F / r", values, f"cost_model/step/block_time.py, profile {self.profile}")

    def _flops(self, kind: str) -> float:
        """FLOP of one micro-batch in the mean repeated block of a rank, forward and backward."""
        works = self.pricing.works
        family = self.pricing.family(layout_of(works, self.pricing.question))
        total = sum(count for _, count in works.counts)
        return (1 + BACKWARD) * sum(
            count / total * float(np.max(product.flops))
            for role, count in works.counts
            for product in family.block(role, "tp").products
            if product.kind == kind
        )

    def _each_block(self, part: str, meaning: str, files: str) -> FormulaTerm:
        each = self.parts[part] / (self.num_micro_batches * self.num_blocks)
        values = (self.n, self.own_blocks, FormulaValue(symbol="t", meaning=meaning, value=each, unit="s"))
        return self.term(part, "n * L * t", values, f"{files}, profile {self.profile}")

    def _recomputation(self) -> FormulaTerm:
        each = self.parts["recomputation"] / (self.num_micro_batches * self.num_blocks * (self.share or 1.0))
        values = (
            self.n,
            self.own_blocks,
            FormulaValue(symbol="c", meaning="recomputed part of the blocks", value=self.share, unit=""),
            FormulaValue(symbol="t", meaning="recomputation of such a block", value=each, unit="s"),
        )
        return self.term("recomputation", "n * L * c * t", values, "cost_model/step/assembly.py")

    # ---- pipeline ----

    def pipeline(self) -> Iterator[FormulaTerm]:
        runs = self.degrees.accumulate if self.degrees.pp > 1 else 1
        per_run = self.num_micro_batches / runs
        waits = self.parts["messages"] / runs
        whole = self.parts["bubble"] / runs + per_run * self.busy_s + waits
        values = (
            FormulaValue(symbol="R", meaning="runs of the schedule in a step", value=float(runs), unit=""),
            FormulaValue(
                symbol="T", meaning=f"one run, its {self.degrees.schedule} list replayed", value=whole, unit="s"
            ),
            FormulaValue(symbol="m", meaning="micro-batches of a run", value=per_run, unit=""),
            FormulaValue(symbol="u", meaning="a micro-batch on the slowest rank", value=self.busy_s, unit="s"),
            FormulaValue(symbol="w", meaning="waiting for its own messages", value=waits, unit="s"),
        )
        yield self.term(
            "bubble", "R * (T - m * u - w)", values, "cost_model/pipeline/simulator.py, autopar/ir/schedules"
        )
        one_message_s = self.message_s or 1.0
        sends = FormulaValue(
            symbol="k", meaning="exposed messages", value=self.parts["messages"] / one_message_s, unit=""
        )
        lasting = FormulaValue(symbol="q", meaning="one message", value=one_message_s, unit="s")
        yield self.term(
            "messages", "k * q", (sends, lasting), "cost_model/step/assembly.py, cost_model/machine/links.py"
        )

    # ---- the end of a step ----

    def end_of_step(self) -> Iterator[FormulaTerm]:
        degrees, engine, constants = self.degrees, self.pricing.question.engine, self.pricing.machine.mechanisms
        bandwidth = FormulaValue(
            symbol="W", meaning="bytes/s of device memory", value=self.speeds.bytes_per_s, unit="bytes/s"
        )
        sums = f"exposed sums of gradients and gathers of parameters over {degrees.dp} ranks"
        yield self.term(
            "data collectives",
            "t",
            (FormulaValue(symbol="t", meaning=sums, value=self.parts["data collectives"], unit="s"),),
            "cost_model/step/data_parallel.py, cost_model/step/assembly.py",
        )
        moved = self.parts["gradient accumulation"] * self.speeds.bytes_per_s / max(1.0, self.num_micro_batches - 1)
        added = FormulaValue(symbol="g", meaning="bytes read and written to add a gradient", value=moved, unit="bytes")
        yield self.term(
            "gradient accumulation", "(n - 1) * g / W", (self.n, added, bandwidth), "cost_model/step/assembly.py"
        )
        each = float(engine.optimizer_bytes)
        updated = self.parts["optimizer"] * self.speeds.bytes_per_s / each
        values = (
            FormulaValue(symbol="o", meaning="bytes moved to update a parameter", value=each, unit="bytes"),
            FormulaValue(symbol="P", meaning="parameters that the rank updates", value=updated, unit=""),
            bandwidth,
        )
        yield self.term("optimizer", "o * P / W", values, f"cost_model/machine/engines/{engine.name}.yaml")
        fixed = FormulaValue(symbol="s", meaning="fixed seconds of a step", value=constants.step_s, unit="s")
        yield self.term("fixed", "s", (fixed,), "cost_model/machine/fitted_constants.yaml")
        before = self.best.seconds - self.parts["stragglers"]
        slow = (
            FormulaValue(symbol="B", meaning="the step without this part", value=before, unit="s"),
            FormulaValue(symbol="d", meaning="deviation of one rank's step", value=constants.straggler, unit=""),
            FormulaValue(symbol="N", meaning="devices", value=float(degrees.world_size), unit=""),
        )
        yield self.term(
            "stragglers",
            "B * d * sqrt(2 * log(N))",
            slow,
            "cost_model/machine/fitted_constants.yaml; Fisher, Tippett 1928",
        )
