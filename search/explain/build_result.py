"""The result of a search as data: the best plan, other plans and why they are worse, baselines, counts, the front."""

from collections.abc import Iterator
from dataclasses import replace

from autopar.cost_model.estimate import optimizer_assumption, situation_of
from autopar.cost_model.interval import chance_of_fitting, interval_of, likely_slower
from autopar.cost_model.machine.cluster import dtype_assumptions
from autopar.cost_model.step.offload import host_assumption
from autopar.errors import AutoparError
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.search.driver.alternatives import next_plans
from autopar.search.driver.infeasible import counted
from autopar.search.driver.search import SearchState, Works
from autopar.search.explain.build_report_data import details_of, points_of
from autopar.search.explain.pareto import contender_of, front_of
from autopar.search.pricing.exact import PricedPlan, priced
from autopar.search.pricing.objective import part_numbers, why_worse
from autopar.search.result.result import Contender, SearchResult
from autopar.search.space.candidates import Split
from autopar.words.numbers import readable_bytes


def result_of(
    search: SearchState,
    program: Program,
    works_of: Works,
    works_of_best: Works,
    *,
    top: int,
    alike: bool = False,
    global_batch: int | None = None,
) -> SearchResult:
    """The result without its plan and the model's name."""
    best, goal, whole = search.best, search.goal, search.goal.parts[max(search.goal.parts)]
    on, cluster = whole.on, whole.cluster
    details = None
    if best is not None:
        part = goal.part(best)
        details = details_of(best, works_of_best(*Split.of(best.degrees)), part.cluster, part.on)
    others = next_plans(search, top, alike=alike)
    situation, device_bytes = situation_of(on.machine, works_of(1)), on.machine.memory_bytes
    room = None if best is None else interval_of(best.peak_bytes, "memory", situation)
    degrees = replace(Degrees() if best is None else best.degrees, optimizer=works_of(1).optimizer)
    return SearchResult(
        model="",
        cluster=cluster.name,
        engine=on.machine.engine.name,
        profile=on.machine.profile.name,
        precision=on.machine.precision,
        objective=goal.objective,
        unit=goal.unit,
        num_devices=cluster.num_devices,
        sequence=program.sequence or 1,
        global_batch=global_batch or (0 if best is None else best.degrees.global_batch),
        device_bytes=device_bytes,
        chance=on.chance,
        best=None if best is None else _contender(search, search.index_of_best, best),
        step_interval_s=None if best is None else interval_of(best.seconds, "time", situation),
        peak_interval_bytes=room,
        chance_of_fitting=chance_of_fitting(best.peak_bytes, device_bytes, room) if best and room else None,
        refined=len(search.refined.trials),
        trials=search.refined.trials,
        importance=search.refined.importance,
        others=tuple(_contender(search, index, plan) for index, plan in others),
        baselines=tuple(_contender(search, *baseline) for baseline in _priced_baselines(search, works_of)),
        bound=None if search.proof.best is None else search.proof.bound,
        gap=search.proof.gap,
        is_proven=search.proof.is_proven,
        counted=counted(search, on.capacity_bytes),
        front=front_of(search),
        closest=None,
        seconds=0.0,
        notes=program.notes,
        assumptions=(
            *on.machine.assumptions,
            *dtype_assumptions(works_of(1).dtype, on.machine.precision, cluster),
            *filter(None, (host_assumption(on.machine), optimizer_assumption(works_of(1), degrees))),
        ),
        details=details,
        points=points_of(search),
    )


def _contender(search: SearchState, index: int | None, plan: PricedPlan) -> Contender:
    """A priced plan beside the best plan."""
    best, goal, reason = search.best, search.goal, ""
    if not plan.fits:
        missing = plan.peak_bytes - goal.part(plan).on.capacity_bytes
        reason = f"does not fit: {readable_bytes(missing)} more than a device has"
    elif best is not None and plan is not best:
        reason = why_worse(goal, best, plan)
    return replace(
        contender_of(goal, plan),
        fits=plan.fits,
        slower=0.0 if best is None else plan.seconds / best.seconds - 1,
        reason=reason,
        parts=part_numbers(plan.step.parts),
        name="" if index is None else search.baselines.get(index, ""),
        is_like_best=best is not None
        and plan is not best
        and plan.fits
        and plan.seconds < best.seconds * (1 + likely_slower()),
    )


def _priced_baselines(search: SearchState, works_of: Works) -> Iterator[tuple[int, PricedPlan]]:
    """The legal baselines by candidate, and their prices."""
    for index in search.baselines:
        split = search.candidates.split(index)
        if split in search.labelled:
            yield index, search.together.priced(index)
        elif split not in search.refused:
            try:
                works = works_of(*split)
            except AutoparError:
                continue
            degrees = search.candidates.degrees(index)
            part = search.goal.parts[degrees.world_size]
            yield index, priced(works, degrees, part.on, least_memory=search.goal.is_memory)
