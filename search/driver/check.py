"""Checks of a search's result before its use, by other means than the search itself.

A failed check is an error of the search, not of its user.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import isclose, isfinite

from autopar.cost_model.pricing import layout_of
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import Problem, SearchError
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.schedules.registry import SCHEDULES, schedule_problems
from autopar.search.driver.search import SearchState
from autopar.search.pricing.exact import PricedPlan, pricing_of
from autopar.search.pricing.objective import Part
from autopar.search.space.dimensions import DIMENSIONS, Constraints

_SAME = 1e-9  # of a number that is counted twice
# the fields of `Degrees` that a search decides
DECIDED = ("pp", "tp", "cp", "ep", "dp_shard", "dp_replicate", "zero", "micro_batch", "accumulate", "micro_batches",
           "schedule", "virtual_stages", "recompute", "recompute_blocks", "selective_blocks", "order")  # fmt: skip


def check_result(search: SearchState, plan: Plan, works: ProgramWorks, constraints: Constraints) -> None:
    """Raise `SearchError` with all errors of a search's best plan and of the `plan` made of it."""
    best = search.best
    assert best is not None
    problems = [*_degrees(best.degrees, constraints), *_cuts(best, works), *_plan(best, plan, works)]
    if not problems:  # only a legal plan has a price
        problems = [*_price(best, works, search.goal.part(best)), *_proof(search, best)]
    if problems:
        raise SearchError("the search found a plan that fails its own check", problems)


def _degrees(degrees: Degrees, constraints: Constraints) -> Iterator[Problem]:
    used = degrees.world_size
    allowed = (constraints.num_devices, *constraints.fewer_devices)
    if used not in allowed:
        rule = f"pp · tp · cp · dp_shard · dp_replicate must be {' or '.join(map(str, allowed))} devices"
        yield Problem(path="degrees", value=used, rule=rule)
    of_rank = (degrees.micro_batch or 0) * degrees.micro_batches * degrees.accumulate
    for name, has in (("global_batch", of_rank * degrees.dp_shard * degrees.dp_replicate), ("local_batch", of_rank)):
        wanted = getattr(constraints, name)
        if wanted is not None and has != wanted:
            yield Problem(path=name, value=has, rule=f"must be {wanted} sequences")
    for name, kind in (("tp", "tensor"), ("cp", "context"), ("ep", "expert")):
        if getattr(degrees, name) not in getattr(constraints, f"{kind}_degrees"):
            yield Problem(path=name, value=getattr(degrees, name), rule="does not divide the model")
    if degrees.num_micro_batches > 1 and not constraints.accumulates:
        yield Problem(path="micro_batches", value=degrees.num_micro_batches, rule="would change the loss")
    if degrees.schedule not in SCHEDULES:
        yield Problem(path="schedule", value=degrees.schedule, rule="is not a known schedule")
    elif degrees.pp > 1:
        yield from schedule_problems(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
    for dimension in DIMENSIONS:
        value = dimension.value_of(degrees)
        if not constraints.allows(dimension.word, value):
            yield Problem(path=dimension.word, value=value, rule="is not among the values that were asked for")


def _cuts(best: PricedPlan, works: ProgramWorks) -> Iterator[Problem]:
    cuts, degrees = best.cuts, best.degrees
    stages = degrees.pp * degrees.virtual_stages
    if len(cuts) != stages - 1:
        yield Problem(path="cuts", value=list(cuts), rule=f"must be {stages - 1}, one between any two stages")
        return
    bounds = (0, *cuts, len(works.calls))
    for start, stop in pairwise(bounds):
        if not (start < stop and any(works.calls[start:stop])):
            rule = f"leave a stage from call {start} to {stop} of {len(works.calls)} without a block"
            yield Problem(path="cuts", value=list(cuts), rule=rule)


def _price(best: PricedPlan, works: ProgramWorks, part: Part) -> Iterator[Problem]:
    """Count the numbers again for this plan alone, without anything that the search has kept of other plans."""
    pricing = pricing_of(works, best, part.cluster, part.on)
    layouts = layout_of(works, best.degrees)
    memory = pricing.memory(layouts)
    recomputed = {
        "seconds": float(pricing.step(layouts).seconds.max()),
        "peak_bytes": float(memory.peak_bytes.max()),
    }
    for name, value in recomputed.items():
        had = getattr(best, name)
        if not (isfinite(had) and had > 0 and isclose(had, value, rel_tol=_SAME)):
            yield Problem(path=name, value=had, rule=f"is {value!r} when counted again")
    capacity = part.on.capacity_bytes
    if not best.fits or recomputed["peak_bytes"] > capacity * (1 + _SAME):
        rule = f"must fit: it is {recomputed['peak_bytes']:.6g} of {capacity:.6g} bytes"
        yield Problem(path="peak_bytes", value=best.peak_bytes, rule=rule)


def _proof(search: SearchState, best: PricedPlan) -> Iterator[Problem]:
    goal, proof = search.goal, search.proof
    if proof.best is None:  # then only a trial with varied cuts can fit
        if search.refined.best is None and search.chunked is None:
            yield Problem(path="proof", rule="has no plan that fits")
        return
    if not proof.bound <= proof.best.value * (1 + _SAME):
        yield Problem(path="bound", value=proof.bound, rule=f"must not be above the best price, {proof.best.value!r}")
    least = min((goal.value(plan) for plan in search.exact.values() if plan.fits), default=float("inf"))
    if goal.value(best) > least * (1 + _SAME):
        yield Problem(path="value", value=goal.value(best), rule=f"must be the least that was priced, {least!r}")


def _plan(best: PricedPlan, plan: Plan, works: ProgramWorks) -> Iterator[Problem]:
    both = {f"degrees.{name}": (getattr(plan.degrees, name), getattr(best.degrees, name)) for name in DECIDED}
    both["degrees.loss_chunks"] = plan.degrees.loss_chunks, works.loss_chunks
    both |= {"regather": (plan.regather, best.regather), "cuts": (plan.cuts, best.cuts)}
    for name, (has, priced) in both.items():
        if has != priced:
            yield Problem(path=f"plan.{name}", value=has, rule=f"is {priced!r} in the plan that was priced")
    batch = (best.degrees.micro_batch or 0) * best.degrees.dp
    if plan.batch != batch:
        yield Problem(path="plan.batch", value=plan.batch, rule=f"must be {batch} sequences of a global micro-batch")
