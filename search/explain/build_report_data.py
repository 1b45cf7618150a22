"""The numbers that a report draws: the best plan rank by rank, its time line, and all candidates.

The functions that priced the plans price everything here. This module decides nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.parts import MEMORY
from autopar.cost_model.pipeline.simulator import replay_of, replayed
from autopar.cost_model.pipeline.stages import (
    ENDS,
    MOST_ACTIONS,
    Stages,
    seconds_of_roles,
    seconds_of_stages,
    stage_seconds,
)
from autopar.cost_model.pricing import Pricing, layout_of
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.cluster import ClusterSpec
from autopar.ir.schedules.registry import SCHEDULE_NAMES
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.bounds.memory import MOST_LEVEL
from autopar.search.driver.search import SearchState, raised_seconds
from autopar.search.explain.step_formulas import terms_of
from autopar.search.pricing.exact import PricedPlan, pricing_of
from autopar.search.result.report_data import WAITING, Details, Points, RankCost, Rates, Timeline

MOST_PASSES = 4000  # of a time line that is kept whole
MOST_POINTS = 1500
_SECONDS_PER_HOUR = 3600.0


def details_of(best: PricedPlan, works: ProgramWorks, cluster: ClusterSpec, on: Machinery) -> Details:
    """The best plan, rank by rank, on the part of the cluster that it uses."""
    pricing = pricing_of(works, best, cluster, on)
    stages, batch, price = pricing.stages(), best.degrees.global_batch, cluster.price_usd_per_hour
    used = pricing.utilisation(batch, best.seconds, best.degrees.world_size)
    per_s = batch * works.sequence / best.seconds
    return Details(
        rates=Rates(
            tokens_per_s=per_s,
            mfu=used.mfu,
            hfu=used.hfu,
            peak_flops_per_s=on.machine.peak_flops_per_s,
            usd_per_billion_tokens=None if price is None else price / _SECONDS_PER_HOUR / per_s * 1e9,
        ),
        ranks=tuple(_ranks(pricing, stages)),
        timeline=None if stages is None or stages.num_actions > MOST_ACTIONS else timeline_of(pricing, stages),
        terms=tuple(terms_of(best, pricing)),
    )


# ---- rank by rank ----


def _ranks(pricing: Pricing, stages: Stages | None) -> Iterator[RankCost]:
    layouts = layout_of(pricing.works, pricing.question.degrees)
    step, memory = pricing.step(layouts, every_rank=True), pricing.memory(layouts, every_rank=True)
    slowest = float(np.max(step.seconds))
    for rank in range(memory.peak_bytes.size):
        roles = pricing.works.calls if stages is None else stages.of_rank(rank)
        parts = _of_rank(step.parts, rank)
        yield RankCost(
            rank=rank,
            stages=(0,) if stages is None else tuple(s for s, of_stage in enumerate(stages.ranks) if of_stage == rank),
            num_blocks=sum(bool(role) and role not in ENDS for role in roles),
            has_first="first" in roles,
            has_last="last" in roles,
            seconds=parts | {WAITING: max(0.0, slowest - sum(parts.values()))},
            bytes=_of_rank({name: memory.parts[name] for name in MEMORY}, rank),
        )


def _of_rank(parts: Mapping[str, NDArray[Any]], rank: int) -> dict[str, float]:
    return {name: float(part[rank] if part.size > 1 else part.reshape(-1)[0]) for name, part in parts.items()}


# ---- the time line ----


def timeline_of(pricing: Pricing, stages: Stages, most: int = MOST_PASSES) -> Timeline:
    """One run of the schedule, replayed with the seconds of the plan's blocks."""
    of_roles, message = pricing.mean_passes_and_message()
    forward, backward, weight, _ = seconds_of_stages(stages, seconds_of_roles(of_roles))
    replay = replay_of(stages.schedule, stages.pp, stages.virtual, stages.micro_batches)
    seconds = stage_seconds(forward, backward, weight, message)
    run = replayed(replay, seconds, messages=pricing.question.engine.messages)
    passes = sorted(run.timeline(), key=lambda event: (event.start_s, event.rank))
    messages = list(run.messages())
    gap = None
    if len(passes) > most:
        gap = (passes[most // 2].start_s, passes[len(passes) - most // 2].start_s)
        passes = [event for event in passes if _is_outside(event.start_s, gap)]
        messages = [message for message in messages if _is_outside(message.start_s, gap)]
    return Timeline(
        num_ranks=stages.pp,
        num_stages=len(stages.roles),
        micro_batches=stages.micro_batches,
        runs=stages.runs,
        seconds=run.step_s,
        passes=tuple(
            (p.rank, p.action.kind, p.action.stage, p.action.micro_batch, _short(p.start_s), _short(p.end_s))
            for p in passes
        ),
        messages=tuple(
            (m.from_rank, m.to_rank, m.from_stage, m.micro_batch, _short(m.start_s), _short(m.end_s)) for m in messages
        ),
        left_out=sum(map(len, run.starts_s)) - len(passes),
        gap=gap,
    )


def _is_outside(start: float, gap: tuple[float, float]) -> bool:
    return not gap[0] <= start < gap[1]


def _short(value: float) -> float:
    """A number with six digits. A picture shows no more, and the file is half as large."""
    return float(f"{value:.6g}")


# ---- candidates ----


def points_of(search: SearchState, most: int = MOST_POINTS) -> Points:
    """The candidates that fit, as points of a picture."""
    screened, candidates = search.screened, search.candidates
    seconds = raised_seconds(search)
    has_bound = np.isfinite(seconds)  # the other candidates may have a tensor degree without labels
    level, whole, full = (x[has_bound] for x in (screened.level, screened.without_bytes, screened.recomputed_bytes))
    share = level / MOST_LEVEL
    peaks = np.full(len(seconds), np.inf)
    peaks[has_bound] = (1 - share) * whole + share * full
    capacities = search.goal.by_devices(candidates, lambda part: part.on.capacity_bytes)
    peaks = np.minimum(peaks, capacities)  # enough blocks are recomputed to fit
    is_exact = np.zeros(len(seconds), dtype=bool)
    for index, plan in search.exact.items():
        seconds[index] = plan.seconds if plan.fits else np.inf
        peaks[index], is_exact[index] = plan.peak_bytes, True
    fitting = np.flatnonzero(np.isfinite(seconds))
    must = fitting[is_exact[fitting]]
    others = np.setdiff1d(fitting, must)
    others = others[np.argsort(seconds[others], kind="stable")]
    room = max(0, most - len(must))
    if len(others) > room:
        others = others[np.unique(np.linspace(0, len(others) - 1, room).astype(int))] if room else others[:0]
    chosen = np.concatenate([must, others])
    chosen = chosen[np.argsort(seconds[chosen], kind="stable")]
    columns: dict[str, tuple[Any, ...]] = {
        "seconds": tuple(_short(value) for value in seconds[chosen].tolist()),
        "bytes": tuple(float(f"{value:.4g}") for value in peaks[chosen].tolist()),
        "exact": tuple(is_exact[chosen].astype(int).tolist()),
        "schedule": tuple(SCHEDULE_NAMES[index] for index in candidates.schedule[chosen].tolist()),
    }
    numbers = ("pp", "tp", "cp", "ep", "dp_shard", "dp_replicate", "zero", "micro_batch", "micro_batches", "virtual")
    columns |= {name: tuple(getattr(candidates, name)[chosen].tolist()) for name in numbers}
    columns["devices"] = tuple(candidates.num_devices[chosen].tolist())
    return Points(fitting=len(fitting), columns=columns)
