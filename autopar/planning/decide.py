"""What rank 0 decides for `parallelize`: the program and the plan of a job."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopar._version import public_version
from autopar.cache.store import cache_folder
from autopar.cache.tuned import TUNED, tuned_plans
from autopar.capture.request import Request, checked_precision
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planning.captured_search import labels_for, search_captured
from autopar.planning.fixed import (
    ONE_MICRO_BATCH,
    PlanLike,
    capture_for,
    check_plan,
    label_plan,
    program_for,
    wished_in_precision,
)
from autopar.planning.options import PlanOptions
from autopar.planning.search import captured_as_asked
from autopar.search.result.format import nothing_fits

_logger = logging.getLogger("autopar")


def job_options(
    request: Request,
    precision: str | None,
    global_batch: int | None,
    fix: Mapping[str, Any],
    forbid: Mapping[str, Any],
    objective: str,
    chance: float,
    timeout_s: float,
) -> PlanOptions:
    """What a search is asked for. It ends after `timeout_s`, because the other ranks wait in a collective."""
    return PlanOptions(
        precision=checked_precision(precision), fix=fix, forbid=forbid, objective=objective, global_batch=global_batch,
        local_batch=request.sizes[0] if global_batch is None else None, chance=chance, timeout_s=timeout_s,
    )  # fmt: skip


def plan_of_job(
    request: Request, cluster: ClusterSpec, plan: PlanLike, options: PlanOptions, *, derived: bool
) -> tuple[Program, Plan]:
    """The program and the plan of a job, from a plan, a path, degrees, a tuned plan, or a search.

    The inputs of the request are of one rank in one step. If they are `derived`, only their shapes count.
    """
    loaded = Plan.load(plan) if isinstance(plan, (str, Path)) and plan != TUNED else plan
    if isinstance(loaded, (Plan, str)):
        _refuse_beside(options, "the plan decides this", ("precision", "global_batch", "fix", "forbid", "objective"))
    if isinstance(loaded, str):
        return _tuned(request, cluster, options)
    if isinstance(loaded, Plan):
        program = capture_for(request, loaded.degrees)
        check_plan(loaded, program, cluster.num_devices, None if derived else request.sizes[0])
        _warn_torch_version(loaded)
        return program, loaded
    options, wish = options.joined_with(loaded or {})
    if not wish:
        return _searched(request, cluster, options)
    _refuse_beside(options, "they are about a search, and the plan has degrees", ("fix", "forbid", "objective"))

    words = {**options.wish(), **wish}
    (degrees, program), _, notes = wished_in_precision(
        request, words, cluster, options.local_batch, options.global_batch
    )
    _say((*notes, *(note for note in program.notes if note.startswith(ONE_MICRO_BATCH))))
    decided = label_plan(program, cluster, degrees, type(request.model).__name__)
    return program, replace(decided, notes=(*decided.notes, *notes))


def _refuse_beside(options: PlanOptions, why: str, names: Sequence[str]) -> None:
    """Refuse arguments of a search. Raises `InputError` naming them."""
    usual = PlanOptions()
    if given := [name for name in names if (getattr(options, name) or None) != (getattr(usual, name) or None)]:
        raise InputError(f"{', '.join(given)} beside plan: {why}; leave out these arguments, or leave out plan")


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        _logger.warning(note)


def _searched(request: Request, cluster: ClusterSpec, options: PlanOptions) -> tuple[Program, Plan]:
    """The best plan and its program."""
    captured, used, notes = captured_as_asked(request, cluster, options)
    _say(notes)
    name, report = type(request.model).__name__, (lambda _: None)
    labels = labels_for(captured, cluster, used, report, request.folder and request.folder / "labels")
    result = search_captured(captured, cluster, used, name=name, on_progress=report, labels=labels)
    if result.plan is None:
        raise PlanError(nothing_fits(result))
    if result.plan.degrees.world_size != cluster.num_devices:
        raise PlanError(
            f"the plan of least {options.objective} uses {result.plan.degrees.world_size} of the "
            f"{cluster.num_devices} devices; start that many ranks, or leave out objective"
        )
    return program_for(captured, result.plan.degrees), replace(result.plan, notes=(*result.plan.notes, *notes))


def _tuned(request: Request, cluster: ClusterSpec, options: PlanOptions) -> tuple[Program, Plan]:
    """The plan that `autopar.tune` measured to be the best for this model, batch and cluster, and its program.

    The batch is of one data-parallel rank, or of all of them.
    """
    kind, batch = type(request.model).__name__, options.local_batch
    kept = tuned_plans(cache_folder(), cluster, kind)
    for plan in (*(p for p in kept if p.degrees.local_batch == batch),
                 *(p for p in kept if p.degrees.global_batch == batch)):  # fmt: skip
        program = capture_for(request, plan.degrees)
        if program.fingerprint == plan.fingerprint:
            return program, plan
    batches = [f"{n} sequences" for n in sorted({p.degrees.global_batch for p in kept})]
    there = f" (there are plans of {', '.join(batches)}, perhaps of another {kind})" if batches else ""
    raise PlanError(
        f"nobody tuned {kind} on {cluster.name} for {batch} sequences of a data-parallel rank or of all ranks "
        f"here{there}; run `autopar tune` or autopar.tune on these devices first, or give another plan"
    )


def _warn_torch_version(plan: Plan) -> None:
    built, here = public_version(plan.torch_version), public_version(torch.__version__)
    if built and built != here:
        warnings.warn(f"the plan was made with torch {built}, this is {here}", stacklevel=3)
