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
from autopar.search.space.dimensions import Constraints, most_level_of, recompute_blocks_of

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
    """The plan that needs the least memory of a device, the missing bytes, and the changes that would help."""
    on = query.machinery(query.cluster)
    roomy = replace(on, machine=replace(on.machine, memory_bytes=inf))
    least = _searched(query, roomy, should_continue)
    offloads = query.constraints.offloads if on.machine.host is not None else ()
    for offload in (value for value in offloads[-1:] if value not in query.constraints.first_offloads):
        more = _searched(query, roomy.keeping(offload), should_continue)  # the value that leaves least on the device
        least = more if least is None or (more is not None and more.peak_bytes < least.peak_bytes) else least
    if least is None:
        return None
    helps = list(_remedies(query, should_continue))
    return Closest(
        degrees=degrees_in_plain(least.degrees, least.cuts, regather=least.regather),
        peak_bytes=least.peak_bytes,
        missing_bytes=least.peak_bytes - on.capacity_bytes,
        remedy="; ".join(helps) or "nothing that was tried: one option less, a shorter sequence, more devices",
        parts={name: float(np.max(part)) for name, part in least.memory.parts.items()},
    )


Change = tuple[str, Query]  # in words, and the search after it


def _remedies(query: Query, should_continue: Callable[[], bool]) -> Iterator[str]:
    """At most one remedy of each kind, the cheapest kind first."""
    kinds = (
        _per_micro_batch, _fewer_wishes, _recomputed, _in_chunks, _offloaded, _other_optimizer, _shorter, _more_devices,
    )  # fmt: skip
    for changes_of in kinds:
        for text, changed in changes_of(query):
            on = changed.machinery(changed.cluster)
            plan = _searched(changed, on, lambda: False) if should_continue() else None  # the first that fits
            if plan is not None:
                yield f"{text}: {plan_in_words(degrees_in_plain(plan.degrees, plan.cuts, regather=plan.regather))}"
            if plan is not None or not should_continue():
                break


def _per_micro_batch(query: Query) -> Iterator[Change]:
    if not query.constraints.accumulates:
        constraints = replace(query.constraints, accumulates=True)
        yield "with a loss for each micro-batch (per_micro_batch)", replace(query, constraints=constraints)


def _fewer_wishes(query: Query) -> Iterator[Change]:
    for text, constraints in query.constraints.without_one():
        yield f"without {text}", replace(query, constraints=constraints)


def _recomputed(query: Query) -> Iterator[Change]:
    """More recomputation than the user asked for."""
    if recompute_blocks_of(query.constraints.fix) is not None or most_level_of(query.constraints.fix) != 2:
        free = replace(
            query, machinery=lambda cluster: replace(query.machinery(cluster), recompute_blocks=None, most_level=2)
        )
        yield "with --recompute auto", _without_words(free, "recompute", "recompute_blocks")


def _in_chunks(query: Query) -> Iterator[Change]:
    """More chunks of the loss than the user asked for. Without a wish the search has tried all numbers."""
    (given,) = query.constraints.fix.get("loss_chunks", (None,))
    if given is not None and query.works_in_chunks is not None:
        chunks, most = 2, chunks_of(query.works_of(1).sequence)
        while chunks <= most:
            if chunks > given:
                more = replace(query, works_of=partial(query.works_in_chunks, chunks=chunks))
                yield f"with --loss-chunks {chunks}", _without_words(more, "loss_chunks")
            chunks *= 2


def _without_words(query: Query, *words: str) -> Query:
    fixed = {word: values for word, values in query.constraints.fix.items() if word not in words}
    return replace(query, constraints=replace(query.constraints, fix=fixed))


def _offloaded(query: Query) -> Iterator[Change]:
    """Values of `offload` that the search did not try."""
    tried = query.constraints.first_offloads
    if query.machinery(query.cluster).machine.host is not None:
        tried = (*tried, *query.constraints.offloads)
    for offload in (value for value in OFFLOADS if value not in tried):
        yield f"with --offload {offload}", _without_words(_keeping(query, offload), "offload")


def _keeping(query: Query, offload: str) -> Query:
    return replace(query, machinery=lambda cluster: query.machinery(cluster).keeping(offload))


def _other_optimizer(query: Query) -> Iterator[Change]:
    """The optimizer with the most state that a plan has room for, of the ones with less state than the plan's own."""
    works = query.works_of(1)
    alone = query.cluster.num_devices == 1
    known = {name: works.moment_bytes_of(name) for name in works.optimizers if alone or OPTIMIZERS[name].runs_split}
    for name in sorted(known, key=lambda optimizer: -known[optimizer]):
        if known[name] < works.moment_bytes:
            bytes_of = f"{known[name]:.3g} instead of {works.moment_bytes:.3g} bytes of state a parameter"
            changed = replace(query, works_of=_changed(query.works_of, optimizer=name))
            yield f"with --optimizer {name} ({bytes_of})", changed


def _shorter(query: Query) -> Iterator[Change]:
    tokens = query.works_of(1).sequence
    while tokens % 2 == 0 and tokens // 2 >= LEAST_TOKENS:
        tokens //= 2
        changed = replace(query, works_of=_changed(query.works_of, sequence=tokens))
        yield f"with sequences of {tokens:,} tokens", changed


def _changed(works_of: Works, **fields: Any) -> Works:
    def changed(tp: int, cp: int = 1, ep: int = 1) -> ProgramWorks:
        return replace(works_of(tp, cp, ep), **fields)

    return changed


def _more_devices(query: Query) -> Iterator[Change]:
    hosts = _least_hosts(query)
    for tried in range(1, MOST_TRIES + 1) if query.machinery(query.cluster).room_bytes > 0 else ():
        cluster = with_hosts(query.cluster, hosts)
        more = replace(query, cluster=cluster, constraints=constraints_on(query.constraints, cluster.num_devices))
        yield f"on {cluster.num_devices:,} such devices", more
        hosts += 1 if tried < MOST_TRIES // 2 else max(1, hosts // 4)


def _least_hosts(query: Query) -> int:
    """More hosts than the cluster has, with room for evenly divided parameters, gradients and optimizer state."""
    state = query.works_of(1).num_parameters * query.machinery(query.cluster).machine.engine.state_bytes
    missing = state / max(query.machinery(query.cluster).room_bytes, 1.0) - query.cluster.num_devices
    return query.cluster.num_hosts + max(1, ceil(missing / query.cluster.groups[-1].devices_per_host))


def with_hosts(cluster: ClusterSpec, num_hosts: int) -> ClusterSpec:
    """The cluster with more hosts like its last ones."""
    more, last = num_hosts - cluster.num_hosts, cluster.groups[-1]
    groups = (*cluster.groups[:-1], replace(last, num_hosts=last.num_hosts + more))
    between = cluster.inter_host or last.in_host or ANY_LINK
    return replace(cluster, name=f"{num_hosts} hosts like {cluster.name}", groups=groups, inter_host=between)


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
