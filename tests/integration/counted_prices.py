"""Calls and bytes of the collectives that the time model prices for a plan.

The time model runs as in a search or an estimate, on a machine for counting. Computation takes no time. One kind of
collective over one group of ranks takes a second for every call, or for every byte that a rank sends. No two
collectives overlap. The seconds of a step are then a number of calls, or of bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.capture.analysis import Analysis
from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.collectives import sent_bytes
from autopar.cost_model.machine.engine import engine_named, with_sums_in
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.links import Links
from autopar.cost_model.pipeline.stages import Stages, recomputed_roles
from autopar.cost_model.pricing import Pricing, Question, layout_of, level_shares
from autopar.cost_model.step.assembly import PipelineTimes
from autopar.cost_model.step.context import Passes
from autopar.cost_model.step.step import step_seconds
from autopar.cost_model.work.program_costs import program_works
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.program import Program

_AT_ONCE = 1e300  # FLOP/s or bytes/s of a device that computes in no time
Key = tuple[str, int, int]  # kind, ranks of a group, and how far apart they lie
MESSAGE: Key = ("send", 2, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingLinks(Links):
    """Links on which only the collectives of `counted` take time: a second for each call or for each byte."""

    counted: Key | None = None
    in_bytes: bool = False
    seen: set[Key]

    def seconds(self, kind: Any, whole_bytes: Any, ranks: Any, stride: Any, *, num_calls: Any = 1.0) -> Any:
        whole_bytes, ranks, stride, num_calls = np.broadcast_arrays(whole_bytes, ranks, stride, num_calls)
        self.seen.update((kind, int(n), int(by)) for n, by in zip(ranks.flat, stride.flat, strict=True) if n > 1)
        sizes = np.array([sent_bytes(kind, w, n) for w, n in zip(whole_bytes.flat, ranks.flat, strict=True)])
        counts = sizes.reshape(ranks.shape) if self.in_bytes else num_calls
        same = [(kind, int(n), int(by)) == self.counted for n, by in zip(ranks.flat, stride.flat, strict=True)]
        return np.where(np.array(same).reshape(ranks.shape), counts, 0.0)

    def message_s(self, message_bytes: Any, is_inside: Any) -> Any:
        self.seen.add(MESSAGE)
        counts = message_bytes if self.in_bytes else np.ones_like(message_bytes)
        return counts if self.counted == MESSAGE else 0.0 * counts


def priced_collectives(program: Program, analysis: Analysis, plan: Plan, rank: int) -> dict[Key, tuple[float, float]]:
    """Calls, and bytes that one rank sends, by kind and group, of a step of a pipeline rank."""
    works = program_works(
        program, analysis, plan.blocks, plan.mesh, regather=plan.regather, loss_chunks=plan.degrees.loss_chunks
    )
    cluster = ClusterSpec.preset("4xh100")
    works = works.with_state_of(plan.degrees)
    engine = with_sums_in(engine_named("autopar"), plan.degrees.reduce_dtype, works.stored_bytes)
    question = Question(cluster=cluster, degrees=plan.degrees, engine=engine, cuts=plan.cuts)
    machine = cluster_machine(cluster, question.engine, mechanisms(), precision="bf16")
    seen: set[Key] = set()
    _counted(works, question, machine, CountingLinks(**_fields(machine.links), seen=seen), rank)
    found = {}
    for key in seen:
        counts = [
            _counted(
                works, question, machine,
                CountingLinks(**_fields(machine.links), seen=set(), counted=key, in_bytes=in_bytes), rank,
            )
            for in_bytes in (False, True)
        ]  # fmt: skip
        if counts[0] > 1e-9:  # what computing takes all the same
            found[key] = (counts[0], counts[1])
    return found


def _fields(links: Links) -> Mapping[str, Any]:
    return {name: getattr(links, name) for name in Links.__slots__}


def _counted(works: Any, question: Question, machine: Any, links: CountingLinks, rank: int) -> float:
    at_once = replace(
        machine.speeds,
        peak_flops_per_s=_AT_ONCE,
        product_flops_per_s=_AT_ONCE,
        bytes_per_s=_AT_ONCE,
        launch_s=0.0,
        host_s=0.0,
        in_one_thread=True,  # nothing is hidden
    )
    profile = replace(machine.profile, overlap_slowdown=2.0)
    none_hidden = replace(
        mechanisms(), straggler=0.0, step_s=0.0, async_hidden=0.0, pipelined_hidden=0.0, message_exposed=1.0,
        gradient_window=1.0, broadcast_s=0.0,
    )  # fmt: skip
    counting = replace(machine, speeds=at_once, links=links, profile=profile, mechanisms=none_hidden)
    pricing = Pricing(works, question, counting)
    stages = pricing.stages()

    def summed(passes: Mapping[str, Passes], message: Any) -> PipelineTimes:
        """The calls of a rank's stages one after the other, instead of what overlaps in a pipeline."""
        assert stages is not None
        return _rank_alone(stages, passes, float(np.max(message)), rank)

    pipeline = None if stages is None else summed
    shares = level_shares(works, question.degrees, question.cuts).values()
    layouts = layout_of(works, question.degrees)
    found = [
        float(step_seconds(pricing.family(one), pricing.basis, one, pipeline).seconds[0])
        for one in pricing.at_levels(layouts)
    ]
    return sum(share * seconds for share, seconds in zip(shares, found, strict=True))


def _rank_alone(stages: Stages, passes: Mapping[str, Passes], message: float, rank: int) -> PipelineTimes:
    own = [i for i, of in enumerate(stages.ranks) if of == rank]
    busy = sum(float(np.max(passes[role].both)) for i in own for role in stages.roles[i])
    fully, partly = recomputed_roles(stages)
    again = sum(float(np.max(passes[role].forward)) for i in own for role in fully[i])
    again += sum(float(np.max(passes[role].selective)) for i in own for role in partly[i])
    others = [[near for near in (i - 1, i + 1) if 0 <= near < len(stages.roles)] for i in own]
    sends = sum(stages.ranks[near] != rank for neighbours in others for near in neighbours)
    n = stages.micro_batches * stages.runs
    return PipelineTimes(
        busy=np.array([busy + again]),
        blocks=np.array([float(sum(len(stages.repeated[i]) for i in own))]),
        idle=np.zeros(1),
        messages=np.array([n * sends * message]),
        again=np.array([again]),
    )
