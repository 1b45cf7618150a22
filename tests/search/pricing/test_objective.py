"""Objectives: values against full enumeration, parts of clusters, and figures that a cluster must have."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from search_cases import Case, machinery_with
from suites import thinned

from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import PricedPlan, priced
from autopar.search.pricing.objective import Goal, goal_of
from autopar.search.space.candidates import candidates
from autopar.search.space.dimensions import Constraints
from autopar.search.space.subcluster import device_counts, part_of

GROUP = {
    "num_hosts": 3, "devices_per_host": 2, "device": "h100-sxm", "price_usd_per_device_hour": 2.0,
    "in_host": {"name": "PCIe", "bandwidth_gb_per_s": 25, "latency_us": 5},
}  # fmt: skip
TWO_HOSTS = {"groups": [GROUP], "inter_host": {"name": "Ethernet", "bandwidth_gb_per_s": 2, "latency_us": 20}}
CASES = tuple(
    (objective, model, memory, local)
    for objective, (model, memory), local in product(
        ("cost", "energy", "memory", "time"), (("llama", 80e9), ("gpt2", 20e6)), (None, 2)
    )
    if objective != "time" or local
)


FORBID = {"schedule": ("gpipe", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev"), "zero": 2}


def cluster() -> ClusterSpec:
    return ClusterSpec.from_dict(TWO_HOSTS)


def asked(objective: str, model: str, memory: float, local: int | None) -> tuple[Case, Goal, Constraints]:
    case = Case(model=model, cluster="2xh100", global_batch=6, tokens=128, memory_bytes=memory)
    goal = goal_of(objective, cluster(), lambda part: machinery_with(part, memory), per_sequence=local is not None)
    counts = tuple(goal.parts)
    constraints = replace(
        case.constraints,
        num_devices=max(counts),
        fewer_devices=counts[:-1],
        global_batch=None if local else 6,
        local_batch=local,
        tensor_degrees=(1, 2),
    )
    return case, goal, constraints.narrowed(forbid=FORBID)


def plain(degrees: Degrees) -> Degrees:
    """Without recomputation, which follows from memory."""
    return replace(degrees, recompute="none", recompute_blocks=None)


def searched(case: Case, goal: Goal, constraints: Constraints) -> SearchState:
    whole = goal.parts[max(goal.parts)]
    return search_degrees(case.works, whole.cluster, constraints, whole.on, most_exact=10_000, goal=goal)


@cache
def enumerated(model: str, memory: float, local: int | None, least_memory: bool) -> tuple[PricedPlan, ...]:
    """Every candidate, priced exactly."""
    case, goal, constraints = asked("energy", model, memory, local)
    every = candidates(constraints)
    found = []
    for i in range(len(every)):
        degrees = every.degrees(i)
        part = goal.parts[degrees.world_size]
        found.append(priced(case.works(degrees.tp), degrees, part.on, least_memory=least_memory))
    return tuple(found)


@pytest.mark.parametrize(("objective", "model", "memory", "local"), thinned(CASES, keep=CASES[::5]))
def test_no_plan_has_a_smaller_value(objective: str, model: str, memory: float, local: int | None) -> None:
    case, goal, constraints = asked(objective, model, memory, local)
    found = searched(case, goal, constraints)
    every = candidates(constraints)
    assert {int(n) for n in every.num_devices} == set(goal.parts)
    bounds, values = goal.bounds(every, found.screened), []
    for one in enumerated(model, memory, local, objective == "memory"):
        at = [i for i in range(len(every)) if every.degrees(i) == plain(one.degrees)]
        if one.fits and at:  # the objective may not use fewer devices
            values.append(goal.value(one))
            assert bounds[at[0]] <= values[-1] * (1 + 1e-9), one.degrees
    assert found.proof.is_proven
    assert found.best is not None
    assert goal.value(found.best) == min(values)
    assert len(found.exact) < len(every)


def test_fewer_devices_cost_less_where_links_are_slow() -> None:
    case, goal, constraints = asked("cost", "llama", 80e9, None)
    found = searched(case, goal, constraints)
    assert found.best is not None
    assert found.best.degrees.world_size < 6
    whole = searched(*asked("time", "llama", 80e9, None)).best
    assert whole is not None
    assert whole.degrees.world_size == 6
    assert goal.value(found.best) < goal.value(whole)


def test_a_step_of_an_hour_costs_the_price_of_an_hour() -> None:
    goal = goal_of("cost", cluster(), lambda part: machinery_with(part, 80e9))
    assert goal.value_of(3600.0, 0.0, Degrees(dp_shard=6)) == pytest.approx(6 * 2.0)


def test_parts_of_a_cluster() -> None:
    whole = cluster()
    assert device_counts(whole) == (1, 2, 4, 6)
    two, four = part_of(whole, 2), part_of(whole, 4)
    assert (two.num_hosts, two.inter_host) == (1, None)
    assert four.inter_host == whole.inter_host
    assert part_of(whole, 1).groups[0].in_host is None
    assert part_of(whole, 6) == whole
    assert ClusterSpec.from_dict(four.to_dict()) == four


def test_a_part_of_hosts_that_are_linked_pair_by_pair_has_less_bandwidth() -> None:
    whole = ClusterSpec.preset("8xh100")
    link = whole.groups[0].in_host
    assert link is not None
    pairwise = replace(whole, groups=(replace(whole.groups[0], in_host=replace(link, is_switched=False)),))
    part = part_of(pairwise, 4).groups[0].in_host
    assert part is not None
    assert part.bytes_per_s == pytest.approx(link.bytes_per_s * 3 / 7)
    assert part_of(whole, 4).groups[0].in_host == link


def test_below_one_leaf_there_is_no_spine() -> None:
    whole = ClusterSpec.preset("32xh100")
    leaves = replace(whole, spine=whole.inter_host, hosts_per_leaf=2)
    assert part_of(leaves, 16).spine is None
    assert part_of(leaves, 24).spine == leaves.spine
    unlike = replace(whole, groups=(*whole.groups, replace(whole.groups[0], num_hosts=1, devices_per_host=4)))
    assert device_counts(unlike) == (1, 2, 4, 8, 16, 24, 32, 36)
    assert part_of(unlike, 36) == unlike
    assert len(part_of(unlike, 32).groups) == 1


def test_what_a_cluster_does_not_say_is_named() -> None:
    silent = ClusterSpec.preset("4xh100")
    with pytest.raises(InputError, match="price_usd_per_device_hour"):
        goal_of("cost", silent, lambda part: machinery_with(part, 80e9))
    device = replace(silent.groups[0].device, power_w=None)
    dark = replace(silent, groups=(replace(silent.groups[0], device=device),))
    with pytest.raises(InputError, match="power_w"):
        goal_of("energy", dark, lambda part: machinery_with(part, 80e9))
    with pytest.raises(InputError, match="energy"):
        goal_of("enrgy", silent, lambda part: machinery_with(part, 80e9))
