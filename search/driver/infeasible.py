"""If no plan fits: the plan that needs the least memory, and the changes with which a plan would fit.

One search tries each change (`_remedies`). Its objective is the memory of the fullest rank, and it ends with the first
plan that fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Any

import numpy as np

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import Link
from autopar.ir.offload import OFFLOADS
from autopar.ir.optimizers import OPTIMIZERS
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.bounds.memory import PARTS
from autopar.search.driver.chunk_choice import WorksInChunks, chunks_of
from autopar.search.driver.search import SearchState, Works, search_degrees
from autopar.search.pricing.exact import PricedPlan
from autopar.search.pricing.objective import Goal, Part
from autopar.search.result.format import plan_in_words
from autopar.search.result.result import CandidateCounts, Closest, degrees_in_plain
from autopar.search.space.candidates import constraints_on
from autopar.search.space.constraints import Constraints, most_level_of, recompute_blocks_of

LEAST_TOKENS = 64
MOST_TRIES = 24  # numbers of hosts; in the second half each is a quarter larger than the number before
_MOST_PRICED = 100
ANY_LINK = Link(bytes_per_s=1e9, latency_s=1e-6, name="none")  # memory does not depend on the link


@dataclass(frozen=True, eq=False, kw_only=True)
class Query:
    """A search that found no plan, and the functions that price plans on any cluster."""

    works_of: Works
    cluster: ClusterSpec
    constraints: Constraints
    machinery: Callable[[ClusterSpec], Machinery]
    works_in_chunks: WorksInChunks | None = None


def counted(search: SearchState, capacity_bytes: float) -> CandidateCounts:
    """The number of candidates. Candidates that do not fit are also counted by the largest part of their memory."""
    screened = search.screened
    without_room = ~screened.fits & np.isfinite(screened.state_bytes)  # without refused tensor degrees
    for_state = without_room & (screened.state_bytes > capacity_bytes)
    largest = screened.largest[without_room].astype(int)
    numbers = {name: int(np.sum(largest == position)) for position, name in enumerate(PARTS)}
    return CandidateCounts(
        candidates=len(search.candidates),
        no_room_for_state=int(np.sum(for_state)),
        no_room_for_activations=int(np.sum(without_room & ~for_state)),
        largest={name: many for name, many in sorted(numbers.items(), key=lambda item: -item[1]) if many},
        priced=len(search.exact),
        refused={str(split): why for split, why in search.refused.items()},
    )


def closest(query: Query, should_continue: Callable[[], bool] = lambda: True) -> Closest | None:
    """The plan that needs the least memory of a device, the missing bytes, and the changes that would help.

    None if no candidate can be priced.
    """
    on = query.machinery(query.cluster)
    roomy = replace(on, machine=replace(on.machine, memory_bytes=inf))
    least = _searched(query, roomy, should_continue)
    offloads = query.constraints.offloads if on.machine.host is not None else ()
    for offload in (value for value in offloads[-1:] if value not in query.constraints.first_offloads):
        more = _searched(query, roomy.keeping(offload), should_continue)  # the value that leaves least on the device
        least = more if least is None or (more is not None and more.needed_bytes < least.needed_bytes) else least
    if least is None:
        return None
    helps = list(_remedies(query, should_continue))
    return Closest(
        degrees=degrees_in_plain(least.degrees, least.cuts, regather=least.regather),
        needed_bytes=least.needed_bytes,
        missing_bytes=least.needed_bytes - on.capacity_bytes,
        remedy="; ".join(helps) or "nothing that was tried: one option less, a shorter sequence, more devices",
        parts={name: float(np.max(part)) for name, part in least.memory.parts.items() if name != "cache"},
    )


def _remedies(query: Query, should_continue: Callable[[], bool]) -> Iterator[str]:
    """At most one remedy of each kind, the cheapest kind first."""
    kinds = (
        _per_micro_batch, _fewer_wishes, _recomputed, _in_chunks, _offloaded, _other_optimizer, _shorter, _more_devices,
    )  # fmt: skip
    for find in kinds:
        remedy = find(query, should_continue) if should_continue() else None
        if remedy is not None:
            yield remedy


def _per_micro_batch(query: Query, _: Callable[[], bool]) -> str | None:
    if query.constraints.accumulates:
        return None
    plan = _fitting(replace(query, constraints=replace(query.constraints, accumulates=True)))
    return None if plan is None else f"with a loss for each micro-batch (per_micro_batch): {_words(plan)}"


def _fewer_wishes(query: Query, should_continue: Callable[[], bool]) -> str | None:
    for text, constraints in query.constraints.without_one():
        if not should_continue():
            return None
        plan = _fitting(replace(query, constraints=constraints))
        if plan is not None:
            return f"without {text}: {_words(plan)}"
    return None


def _recomputed(query: Query, _: Callable[[], bool]) -> str | None:
    """More recomputation than the user asked for."""
    if recompute_blocks_of(query.constraints.fix) is None and most_level_of(query.constraints.fix) == 2:
        return None

    def free(cluster: ClusterSpec) -> Machinery:
        return replace(query.machinery(cluster), recompute_blocks=None, most_level=2)

    plan = _fitting(_without_words(replace(query, machinery=free), "recompute", "recompute_blocks"))
    return None if plan is None else f"with --recompute auto: {_words(plan)}"


def _in_chunks(query: Query, should_continue: Callable[[], bool]) -> str | None:
    """More chunks of the loss than the user asked for. Without a wish the search has tried all numbers."""
    (given,) = query.constraints.fix.get("loss_chunks", (None,))
    works_in_chunks, chunks = query.works_in_chunks, 2
    if given is None or works_in_chunks is None:
        return None
    while chunks <= chunks_of(query.works_of(1).sequence) and should_continue():
        more = replace(query, works_of=partial(works_in_chunks, chunks=chunks))
        plan = _fitting(_without_words(more, "loss_chunks")) if chunks > given else None
        if plan is not None:
            return f"with --loss-chunks {chunks}: {_words(plan)}"
        chunks *= 2
    return None


def _without_words(query: Query, *words: str) -> Query:
    fixed = {word: values for word, values in query.constraints.fix.items() if word not in words}
    return replace(query, constraints=replace(query.constraints, fix=fixed))


def _offloaded(query: Query, should_continue: Callable[[], bool]) -> str | None:
    """Values of `offload` that the search did not try."""
    tried = query.constraints.first_offloads
    if query.machinery(query.cluster).machine.host is not None:
        tried = tuple(dict.fromkeys((*tried, *query.constraints.offloads)))
    for offload in (value for value in OFFLOADS if value not in tried):
        if not should_continue():
            return None
        plan = _fitting(_keeping(query, offload))
        if plan is not None:
            return f"with --offload {offload}: {_words(plan)}"
    return None


def _keeping(query: Query, offload: str) -> Query:
    def on_host(cluster: ClusterSpec) -> Machinery:
        return query.machinery(cluster).keeping(offload)

    return _without_words(replace(query, machinery=on_host), "offload")


def _other_optimizer(query: Query, should_continue: Callable[[], bool]) -> str | None:
    """The optimizer with the most state that a plan has room for, of the ones with less state than the plan's own."""
    works = query.works_of(1)
    alone = query.cluster.num_devices == 1
    known = {name: works.moment_bytes_of(name) for name in works.optimizers if alone or OPTIMIZERS[name].runs_split}
    sizes = {name: size for name, size in known.items() if size < works.moment_bytes}
    for name in sorted(sizes, key=lambda optimizer: -sizes[optimizer]):
        if not should_continue():
            return None
        plan = _fitting(replace(query, works_of=_changed(query.works_of, optimizer=name)))
        if plan is not None:
            return (
                f"with --optimizer {name} ({sizes[name]:.3g} instead of {works.moment_bytes:.3g} bytes of state a "
                f"parameter): {_words(plan)}"
            )
    return None


def _shorter(query: Query, should_continue: Callable[[], bool]) -> str | None:
    tokens = query.works_of(1).sequence
    while tokens % 2 == 0 and tokens // 2 >= LEAST_TOKENS and should_continue():
        tokens //= 2
        plan = _fitting(replace(query, works_of=_changed(query.works_of, sequence=tokens)))
        if plan is not None:
            return f"with sequences of {tokens:,} tokens: {_words(plan)}"
    return None


def _changed(works_of: Works, **fields: Any) -> Works:
    def changed(tp: int, cp: int = 1, ep: int = 1) -> ProgramWorks:
        return replace(works_of(tp, cp, ep), **fields)

    return changed


def _more_devices(query: Query, should_continue: Callable[[], bool]) -> str | None:
    room, hosts, tried = _room(query), _least_hosts(query), 0
    while room > 0 and tried < MOST_TRIES and should_continue():
        cluster = with_hosts(query.cluster, hosts)
        plan = _fitting(
            replace(query, cluster=cluster, constraints=constraints_on(query.constraints, cluster.num_devices))
        )
        if plan is not None:
            return f"on {cluster.num_devices:,} such devices: {_words(plan)}"
        tried += 1
        hosts += 1 if tried < MOST_TRIES // 2 else max(1, hosts // 4)
    return None


def _least_hosts(query: Query) -> int:
    """More hosts than the cluster has, with room for evenly divided parameters, gradients and optimizer state."""
    state = query.works_of(1).num_parameters * query.machinery(query.cluster).machine.engine.state_bytes
    missing = state / max(_room(query), 1.0) - query.cluster.num_devices
    return query.cluster.num_hosts + max(1, ceil(missing / query.cluster.groups[-1].devices_per_host))


def _room(query: Query) -> float:
    """Bytes of a device for the model."""
    on = query.machinery(query.cluster)
    return on.capacity_bytes - on.machine.reserve_bytes


def with_hosts(cluster: ClusterSpec, num_hosts: int) -> ClusterSpec:
    """The cluster with more hosts like its last ones."""
    more, last = num_hosts - cluster.num_hosts, cluster.groups[-1]
    groups = (*cluster.groups[:-1], replace(last, num_hosts=last.num_hosts + more))
    between = cluster.inter_host or last.in_host or ANY_LINK
    return replace(cluster, name=f"{num_hosts} hosts like {cluster.name}", groups=groups, inter_host=between)


def _fitting(query: Query) -> PricedPlan | None:
    """The first plan that fits."""
    return _searched(query, query.machinery(query.cluster), lambda: False)


def _searched(query: Query, on: Machinery, should_continue: Callable[[], bool]) -> PricedPlan | None:
    goal = Goal(objective="memory", parts={query.cluster.num_devices: Part(cluster=query.cluster, on=on, weight=1.0)})
    constraints = replace(query.constraints, fewer_devices=())
    try:
        return search_degrees(
            query.works_of,
            query.cluster,
            constraints,
            on,
            most_exact=_MOST_PRICED,
            should_continue=should_continue,
            goal=goal,
        ).best
    except AutoparError:  # labels that cannot be found
        return None


def _words(plan: PricedPlan) -> str:
    return plan_in_words(degrees_in_plain(plan.degrees, plan.cuts, regather=plan.regather))
