"""The step time if one thing changes: devices, links, global batch or sequence length.

Each change gives two figures.

    plan    the best plan with the fewest changes. All degrees but data parallelism stay, as do the micro-batch, the
            schedule and the ZeRO stage. Stages are cut anew, and the fewest blocks that fit are recomputed. The plan is
            priced exactly.
    bound   a lower bound of every candidate after the change. Screening finds it with the labels of tensor degree 1 and
            of the plan's own tensor degree.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.rank_order import ORDERS
from autopar.search.bounds.lower_bounds import Machinery, screen
from autopar.search.driver.search import Works
from autopar.search.pricing.exact import BY_STAGE, PricedPlan, priced
from autopar.search.pricing.objective import Part
from autopar.search.result.report_data import Curve, CurvePoint
from autopar.search.space.candidates import Split, candidates
from autopar.search.space.dimensions import Constraints, divisors
from autopar.search.space.subcluster import device_counts, part_of

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The search as it was: the part of the cluster, the prices, and how to price another cluster."""

    best: PricedPlan
    part: Part
    machinery: Callable[[ClusterSpec], Machinery]
    works_of: Works  # the block costs of the plan
    every: tuple[Works, ...]  # the block costs of all plans that were searched
    constraints: Constraints
    global_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One value of the changed thing."""

    value: float
    cluster: ClusterSpec
    on: Machinery
    global_batch: int
    sequence: int


def what_if(base: Base) -> tuple[Curve, ...]:
    """A curve for each thing that can be changed."""
    of_plan = "the plan's tensor and pipeline degrees, micro-batch, schedule and ZeRO stage"
    one_host = base.part.cluster.num_hosts == 1
    curves = (
        ("devices", "", f"{of_plan}, global batch and sequence; data-parallel ranks follow", _devices),
        (
            f"bandwidth of links {'inside a host' if one_host else 'between hosts'}",
            "B/s",
            f"{of_plan}, devices, global batch and sequence",
            _bandwidth,
        ),
        ("global batch", "sequences", f"{of_plan}, devices and sequence; the number of micro-batches follows", _batch),
        ("sequence length", "tokens", f"{of_plan}, devices, global batch and the search's labels", _sequence),
    )
    now = _Setting(
        value=0.0,
        cluster=base.part.cluster,
        on=base.part.on,
        global_batch=base.global_batch,
        sequence=base.works_of(*Split.of(base.best.degrees)).sequence,
    )
    result = []
    for name, unit, held, change in curves:
        changes = ((factor, change(base, now, factor)) for factor in FACTORS)
        points = tuple(_point(base, factor, new) for factor, new in changes if new is not None)
        if len(points) > 1:
            result.append(Curve(name=name, unit=unit, held=held, points=points))
    return tuple(result)


# ---- the changes ----


def _devices(base: Base, now: _Setting, factor: float) -> _Setting | None:
    count, cluster = now.cluster.num_devices * factor, now.cluster
    if factor < 1:
        if count not in device_counts(cluster):
            return None
        cluster = part_of(cluster, int(count))
    elif factor > 1:
        if cluster.inter_host is None:
            return None  # one host: its links to other hosts are unknown
        groups = tuple(replace(group, num_hosts=int(group.num_hosts * factor)) for group in cluster.groups)
        cluster = replace(cluster, name=f"{count:g} devices like {cluster.name}", groups=groups)
    on = now.on if factor == 1 else base.machinery(cluster)
    return replace(now, value=count, cluster=cluster, on=on)


def _bandwidth(base: Base, now: _Setting, factor: float) -> _Setting | None:
    links = now.on.machine.links
    if now.cluster.num_devices == 1:
        return None
    if now.cluster.num_hosts == 1:
        value = links.in_host_bytes_per_s * factor
        calls = None if links.calls is None else replace(links.calls, bytes_per_s=links.calls.bytes_per_s * factor)
        links = replace(links, in_host_bytes_per_s=value, calls=calls)
    else:
        value = links.inter_host_bytes_per_s * factor
        links = replace(links, inter_host_bytes_per_s=value)
    return replace(now, value=value, on=replace(now.on, machine=replace(now.on.machine, links=links)))


def _batch(base: Base, now: _Setting, factor: float) -> _Setting | None:
    count = now.global_batch * factor
    return replace(now, value=count, global_batch=int(count)) if count == int(count) else None


def _sequence(base: Base, now: _Setting, factor: float) -> _Setting | None:
    tokens = now.sequence * factor
    return replace(now, value=tokens, sequence=int(tokens)) if tokens == int(tokens) else None


# ---- the step after a change ----


def _point(base: Base, factor: float, changed: _Setting) -> CurvePoint:
    count = changed.cluster.num_devices
    constraints = replace(
        base.constraints,
        num_devices=count,
        fewer_devices=(),
        global_batch=changed.global_batch,
        local_batch=None,
        tensor_degrees=tuple(tp for tp in divisors(count) if tp <= max(base.constraints.tensor_degrees)),
        devices_per_host=changed.on.machine.links.devices_per_host,
    )
    degrees = adapted(base.best.degrees, constraints)
    plan = base.best if factor == 1 else None
    if degrees is not None and plan is None:
        works = replace(base.works_of(*Split.of(degrees)), sequence=changed.sequence)
        plan = priced(works, degrees, changed.on, cut=BY_STAGE)
    tokens, bound = float(changed.global_batch * changed.sequence), _bound(base, changed, constraints)
    return CurvePoint(
        factor=factor,
        value=float(changed.value),
        step_s=None if plan is None else plan.seconds,
        tokens_per_s=None if plan is None else tokens / plan.seconds,
        fits=plan is not None and plan.fits,
        bound_s=bound,
        bound_tokens_per_s=None if bound is None else tokens / bound,
    )


def adapted(degrees: Degrees, constraints: Constraints) -> Degrees | None:
    """The same plan on other devices and batches, still without recomputation. None if it cannot be split so."""
    kept = ["tp", "pp", "cp", "ep", "micro_batch", "virtual_stages", *(["schedule"] if degrees.pp > 1 else [])]
    kept += ["dp_replicate"] if degrees.dp_replicate == 1 else ["dp_shard"]
    c = candidates(replace(constraints, fix={word: (getattr(degrees, word),) for word in kept}, forbid={}))
    if not len(c):
        return None
    return c.degrees(int(np.argmax(2 * (c.zero == degrees.zero) + (c.order == ORDERS.index(degrees.order)))))


def _bound(base: Base, changed: _Setting, constraints: Constraints) -> float | None:
    """The smallest lower bound of all candidates, in seconds."""
    every = candidates(constraints)
    least = np.inf
    for is_alike, works in _labelled(base):
        mine = every.of(*(split for split in every.splits() if is_alike(split)))
        if np.any(mine):
            screened = screen(replace(works, sequence=changed.sequence), every.at(mine), changed.on)
            least = min(least, float(np.min(screened.seconds)))
    return float(least) if np.isfinite(least) else None


def _labelled(base: Base) -> Iterator[tuple[Callable[[Split], bool], ProgramWorks]]:
    """Block costs with the splits that they stand for: tensor degree 1, and one set for all other degrees."""
    yield lambda split: split.tp == 1, base.works_of(1)
    best_tp = base.best.degrees.tp
    above = (best_tp,) if best_tp > 1 else tuple(tp for tp in base.constraints.tensor_degrees if tp > 1)
    for tp in above:
        try:
            all_works = [works_of(tp) for works_of in base.every]
        except AutoparError:
            continue
        yield from ((lambda split: split.tp > 1, works) for works in all_works)
        return
