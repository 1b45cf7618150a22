"""Plans that are priced only: bounds and best plans against full enumeration, offloading by hand, and their marks."""

from dataclasses import replace

import numpy as np
import pytest
from deep_models import Deep, machinery, searched
from search_cases import Case, machinery_with

from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.offload import HOST_STATE_BYTES, UPDATE_BYTES, can_offload
from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import HostShare
from autopar.search.bounds.lower_bounds import Beyond, Machinery, screen
from autopar.search.driver.infeasible import Asked, closest
from autopar.search.driver.priced_only import combinations, constraints_of, machinery_of, search_beyond
from autopar.search.pricing.exact import Priced, priced
from autopar.search.pricing.objective import Goal, Part
from autopar.search.space.candidates import candidates, tensor_degrees
from autopar.search.space.constraints import Constraints

HOST = HostShare(link_bytes_per_s=20e9, memory_bytes=1e9, memory_bytes_per_s=40e9)
FORBID = {"schedule": ("gpipe", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev"), "zero": 1}
LLAMA = Deep(preset="llama2-7b", layers=32, tokens=4096)


def hosted(on: Machinery, host: HostShare = HOST) -> Machinery:
    return replace(on, machine=replace(on.machine, host=host))


def case_of(memory_bytes: float) -> tuple[Case, Machinery]:
    case = Case(model="llama", cluster="4xh100", global_batch=4, tokens=256, memory_bytes=memory_bytes)
    return case, hosted(case.on)


def narrowed(case: Case) -> Constraints:
    return case.constraints.narrowed(forbid=FORBID)


def enumerated(case: Case, on: Machinery, beyond: Beyond) -> list[tuple[Priced, float]]:
    """Every candidate with its exact price and its bound."""
    own, machine = constraints_of(narrowed(case), case.spec, beyond), machinery_of(on, beyond)
    every = candidates(own)
    found = []
    for tp in set(every.tp.tolist()):
        mine = every.at(every.tp == tp)
        bounds = screen(case.works(tp), mine, machine).seconds
        for i, bound in enumerate(bounds.tolist()):
            found.append((priced(case.works(tp), mine.degrees(i), machine), bound))
    return found


@pytest.mark.parametrize("memory_bytes", [80e9, 10e6, 6e6])
def test_no_plan_beyond_is_better_than_the_one_found(memory_bytes: float) -> None:
    case, on = case_of(memory_bytes)
    goal = Goal(objective="time", parts={4: Part(cluster=case.spec, on=on, weight=1.0)})
    found = search_beyond(case.works, case.spec, narrowed(case), goal, most_exact=10_000)
    seconds = []
    for beyond in combinations(case.works(1), case.spec, on):
        for one, bound in enumerated(case, on, beyond):
            if one.fits:
                assert bound <= one.seconds * (1 + 1e-9), (beyond, one.degrees)
                seconds.append(one.seconds)
    assert {one.cp for one in combinations(case.works(1), case.spec, on)} == {1, 2, 4}
    assert found is not None
    assert found.value == found.bound == min(seconds)
    assert found.formula_only(case.spec)


def layouts(**fields: float) -> Layouts:
    ones = dict.fromkeys(Layouts.__slots__, 1.0) | {"sequence_parallel": 0.0, "zero": 0.0, "recompute": 0.0}
    return Layouts(**{name: np.array([value]) for name, value in (ones | fields).items()})


def test_offloading_by_hand() -> None:
    case, on = case_of(80e9)
    works, beyond = case.works(1), Beyond(offload=True)
    degrees = next(
        one for one, _ in enumerated(case, on, beyond) if one.degrees.dp == 4 and one.degrees.zero == 3
    ).degrees
    here = priced(works, degrees, on)
    there = priced(works, degrees, machinery_of(on, beyond))
    elements = works.num_parameters / 4
    size = works.element_bytes
    assert float(there.memory.parts["optimizer state"].max()) == 0.0
    assert there.needed_bytes < here.needed_bytes
    update = max((UPDATE_BYTES + size) * elements / HOST.memory_bytes_per_s, size * elements / HOST.link_bytes_per_s)
    assert float(there.step.parts["optimizer"].max()) >= update * (1 - 1e-9)
    slower = hosted(on, replace(HOST, memory_bytes_per_s=HOST.memory_bytes_per_s / 100))
    assert priced(works, degrees, machinery_of(slower, beyond)).seconds > there.seconds
    little = hosted(on, replace(HOST, memory_bytes=0.99 * HOST_STATE_BYTES * elements))
    assert there.fits
    assert not priced(works, degrees, machinery_of(little, beyond)).fits


def test_gradients_must_leave_as_they_are_made() -> None:
    assert can_offload(layouts())[0]
    assert can_offload(layouts(dp=4.0, shard=4.0, zero=2.0))[0]
    assert not can_offload(layouts(dp=4.0, shard=4.0, zero=1.0))[0]
    assert not can_offload(layouts(pp=2.0))[0]


def test_seven_billion_on_24_gb_only_with_offload_and_it_says_so() -> None:
    pytest.importorskip("transformers")
    name = "1xrtx4090"
    cluster = ClusterSpec.preset(name)
    assert searched(LLAMA, name, cluster, 8).best is None
    constraints = Constraints(num_devices=1, global_batch=8, most_stages=LLAMA.layers, tensor_degrees=tensor_degrees(1))
    works_of, on = LLAMA.works_of(name), machinery(cluster)
    goal = Goal(objective="time", parts={1: Part(cluster=cluster, on=on, weight=1.0)})
    found = search_beyond(works_of, cluster, constraints, goal, most_exact=100)
    assert found is not None
    assert found.beyond == Beyond(offload=True)
    assert any("host" in mark for mark in found.formula_only(cluster))
    asked = Asked(works_of=works_of, cluster=cluster, constraints=constraints, machinery=machinery)
    told = closest(asked)
    assert told is not None
    assert told.remedy.startswith("with the optimizer on the host")


def test_context_parallelism_is_among_what_is_found() -> None:
    case, on = case_of(80e9)
    found = [one for one, _ in enumerated(case, on, Beyond(cp=2)) if one.degrees.dp == 1 and one.degrees.zero == 3]
    assert found  # context ranks hold shards, though there is one data-parallel rank
    assert machinery_with(case.spec, 80e9).beyond == Beyond()
