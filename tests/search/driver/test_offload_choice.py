"""Offload in the search: bounds and the best plan against full enumeration, prices by hand, and remedies that run."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from deep_models import Deep, machinery
from search_cases import Case
from suites import long, thinned

from autopar.cost_model.pricing import layout_of, shape_of_works
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.step.offload import can_offload, host_bytes
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.device import HostShare
from autopar.ir.offload import OFFLOADS
from autopar.search.bounds.lower_bounds import Machinery, screen
from autopar.search.driver.infeasible import Query, closest
from autopar.search.driver.offload_choice import search_offloads
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import PricedPlan, priced, pricing_of
from autopar.search.pricing.objective import Goal, Part
from autopar.search.space.candidates import candidates, tensor_degrees
from autopar.search.space.dimensions import EVERY_BLOCK, Constraints

HOST = HostShare(link_bytes_per_s=20e9, memory_bytes=1e9, memory_bytes_per_s=40e9)
FORBID = {"schedule": ("gpipe", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev")}
LLAMA = Deep(preset="llama2-7b", layers=32, tokens=4096)


def hosted(on: Machinery, host: HostShare = HOST) -> Machinery:
    return replace(on, machine=replace(on.machine, host=host))


@cache
def case_of(memory_bytes: float) -> tuple[Case, Machinery]:
    case = Case(model="llama", cluster="4xh100", global_batch=4, tokens=256, memory_bytes=memory_bytes)
    return case, hosted(case.on)


def enumerated(case: Case, on: Machinery, fix: Any = None) -> list[tuple[PricedPlan, float]]:
    """Every candidate with its exact price and its bound."""
    every, found = candidates(case.constraints.narrowed(fix, FORBID)), []
    for tp in set(every.tp.tolist()):
        mine = every.at(every.tp == tp)
        bounds = screen(case.works(tp), mine, on).seconds
        for i, bound in enumerate(bounds.tolist()):
            found.append((priced(case.works(tp), mine.degrees(i), on), bound))
    return found


@cache
def enumerated_on(memory_bytes: float, offload: str) -> list[tuple[PricedPlan, float]]:
    case, on = case_of(memory_bytes)
    return enumerated(case, on.keeping(offload))


def searched(case: Case, on: Machinery, constraints: Constraints, *, has_time: bool = True) -> SearchState:
    goal = Goal(objective="time", parts={4: Part(cluster=case.spec, on=on, weight=1.0)})

    def search(own: Goal, below: float) -> SearchState:
        part = own.parts[4].on
        return search_degrees(case.works, case.spec, constraints, part, most_exact=10_000, goal=own, below=below)

    return search_offloads(search, goal, constraints, lambda: has_time)


def test_out_of_time_the_value_that_leaves_least_on_the_device_is_searched() -> None:
    case, on = case_of(3e6)
    constraints = case.constraints.narrowed(fix={}, forbid=FORBID)
    found = searched(case, on, constraints, has_time=False)
    assert found.best is not None and found.best.degrees.offload == constraints.offloads[-1]
    assert found.best.fits


@pytest.mark.parametrize("memory_bytes", [long(80e9), 6e6, 3e6])
@pytest.mark.parametrize("fix", [{}, {"offload": OFFLOADS}])
def test_no_plan_is_better_than_the_one_found(memory_bytes: float, fix: dict[str, tuple[str, ...]]) -> None:
    """By default offload is searched only if no plan fits without it."""
    case, on = case_of(memory_bytes)
    found = searched(case, on, case.constraints.narrowed(fix=fix, forbid=FORBID))
    best: dict[str, float] = {}
    for offload in OFFLOADS:
        for one, bound in enumerated_on(memory_bytes, offload):
            assert one.degrees.offload == offload
            if one.fits:
                assert bound <= one.seconds * (1 + 1e-9), one.degrees
                best[offload] = min(best.get(offload, np.inf), one.seconds)
    if not fix and "none" in best:
        best = {"none": best["none"]}
    assert found.best is not None
    assert found.goal.value(found.best) == min(best.values())
    assert found.proof.bound == min(best.values())
    assert found.proof.is_proven
    assert best[found.best.degrees.offload] == min(best.values())


def test_memory_demands_offload_in_one_of_these_cases() -> None:
    """So the test above compares plans on the device and plans on the host."""
    chosen = []
    for memory_bytes in (80e9, 6e6, 3e6):
        case, on = case_of(memory_bytes)
        best = searched(case, on, case.constraints.narrowed(forbid=FORBID)).best
        chosen.append(None if best is None else best.degrees.offload)
    assert chosen[0] == "none"
    assert chosen[-1] not in ("none", None)


def test_without_figures_of_the_host_nothing_is_offloaded() -> None:
    case, on = case_of(3e6)
    on = replace(on, machine=replace(on.machine, host=None))
    assert searched(case, on, case.constraints.narrowed(forbid=FORBID)).best is None
    asked = searched(case, on, case.constraints.narrowed(fix={"offload": OFFLOADS[1:]}, forbid=FORBID))
    assert asked.best is not None


def layouts(**fields: float) -> Layouts:
    ones = dict.fromkeys(Layouts.__slots__, 1.0) | {"sequence_parallel": 0.0, "zero": 0.0, "recompute": 0.0}
    return Layouts(**{name: np.array([value]) for name, value in (ones | fields).items()})


def one_of(case: Case, on: Machinery, **degrees: int) -> PricedPlan:
    return next(
        one
        for one, _ in enumerated(case, on)
        if all(getattr(one.degrees, name) == value for name, value in degrees.items())
    )


def test_the_optimizer_on_the_host_by_hand() -> None:
    case, on = case_of(80e9)
    works = case.works(1)
    here = one_of(case, on, dp_shard=4, zero=3, micro_batch=1)
    there = priced(works, replace(here.degrees, offload="optimizer"), on.keeping("optimizer"))
    elements, size = works.num_parameters / 4, works.element_bytes
    assert float(there.memory.parts["optimizer state"].max()) == 0.0
    assert float(there.memory.parts["parameters"].max()) == float(here.memory.parts["parameters"].max()) > 0
    copies = 2 * size * elements / HOST.link_bytes_per_s
    update = (size + 2 * (4 + 8)) * elements / HOST.memory_bytes_per_s
    assert float(there.step.parts["host copies"].max()) == pytest.approx(copies, rel=1e-6)
    assert float(there.step.parts["optimizer"].max()) == pytest.approx(update, rel=1e-6)
    assert float(here.step.parts["host copies"].max()) == 0.0
    shape = shape_of_works(works)
    held = (2 * shape.stored_bytes + shape.moment_bytes) * elements
    assert host_bytes(on.keeping("optimizer").machine.engine, shape, works.num_parameters, 0.0, 0.0, layouts(
        dp=4.0, shard=4.0, zero=3.0)) == pytest.approx(held)  # fmt: skip
    little = hosted(on, replace(HOST, memory_bytes=0.99 * held)).keeping("optimizer")
    assert there.fits
    assert not priced(works, there.degrees, little).fits


@pytest.mark.parametrize("offload", OFFLOADS[1:])
def test_less_device_memory_and_more_seconds(offload: str) -> None:
    case, on = case_of(80e9)
    here = one_of(case, on, dp_shard=4, zero=3, micro_batch=1)
    slow = hosted(on, replace(HOST, link_bytes_per_s=1e9)).keeping(offload)
    there = priced(case.works(1), here.degrees, slow)
    assert there.peak_bytes < here.peak_bytes
    assert there.seconds > here.seconds


def test_shards_on_the_host_need_shards() -> None:
    _, on = case_of(80e9)
    engine = on.keeping("parameters").machine.engine
    assert can_offload(engine, layouts())[0]
    assert can_offload(engine, layouts(dp=4.0, shard=4.0, zero=1.0))[0]
    assert not can_offload(engine, layouts(dp=4.0, shard=4.0, zero=0.0))[0]


def test_words_are_checked() -> None:
    with pytest.raises(InputError, match="fix offload: must be one of none, optimizer"):
        Constraints(num_devices=1, global_batch=1, most_stages=1, tensor_degrees=(1,)).narrowed({"offload": "disk"})


def test_seven_billion_on_24_gb_with_offload_or_with_less_state() -> None:
    pytest.importorskip("transformers")
    cluster = ClusterSpec.preset("1xrtx4090")
    constraints = Constraints(num_devices=1, global_batch=8, most_stages=LLAMA.layers, tensor_degrees=tensor_degrees(1))
    works_of, on = LLAMA.works_of("1xrtx4090"), machinery(cluster)
    goal = Goal(objective="time", parts={1: Part(cluster=cluster, on=on, weight=1.0)})

    def search(own: Goal, below: float) -> SearchState:
        return search_degrees(works_of, cluster, constraints, own.parts[1].on, most_exact=100, goal=own, below=below)

    best = search_offloads(search, goal, constraints).best
    assert best is not None
    assert best.degrees.offload != "none"
    without = constraints.narrowed(fix={"offload": "none"})
    asked = Query(works_of=works_of, cluster=cluster, constraints=without, machinery=machinery)
    told = closest(asked)
    assert told is not None
    assert "with --offload " in told.remedy


PINNED = (
    {"recompute_blocks": EVERY_BLOCK, "most_level": 1},
    {"recompute_blocks": 1, "most_level": 1},
    {"recompute_blocks": EVERY_BLOCK},
    {"recompute_blocks": 2},
    {"recompute_blocks": (2, 0)},
    {"recompute_blocks": (1, 3), "most_level": 1},
)
ON_LINKS = [(pins, speed) for pins in PINNED for speed in (20e9, 1e8)]


@pytest.mark.parametrize(("pins", "link_bytes_per_s"), thinned(ON_LINKS, keep=ON_LINKS[::3]), ids=str)
def test_bounds_hold_for_recomputed_blocks_with_activations_on_the_host(
    pins: dict[str, Any], link_bytes_per_s: float
) -> None:
    """A price is the one of the plan alone, and no bound is above it."""
    case, on = case_of(80e9)
    case = replace(case, selective=pins.get("most_level") == 1)
    on = replace(hosted(on, replace(HOST, link_bytes_per_s=link_bytes_per_s)).keeping("activations"), **pins)
    num_priced, blocks = 0, pins["recompute_blocks"]
    kind = {"recompute": "selective" if case.selective else "full"}
    for one, bound in enumerated(case, on, kind | {"recompute_blocks": blocks} if isinstance(blocks, tuple) else kind):
        assert one.degrees.recompute == ("selective" if case.selective else "full")
        pricing = pricing_of(case.works(one.degrees.tp), one, case.spec, on)
        layouts = layout_of(pricing.works, pricing.question.degrees)
        assert float(pricing.step(layouts).seconds[0]) == pytest.approx(one.seconds, rel=1e-9)
        assert float(np.max(pricing.memory(layouts).peak_bytes)) == pytest.approx(one.peak_bytes, rel=1e-9)
        assert one.fits
        assert bound <= one.seconds * (1 + 1e-9), one.degrees
        num_priced += 1
    assert num_priced > 3


@pytest.mark.parametrize("stages", [1, 2])
def test_what_recomputation_does_not_save_is_not_copied(stages: int) -> None:
    """Numbers of blocks of each stage, which are all its blocks, have the price of all blocks."""
    case, on = case_of(80e9)
    degrees = Degrees(pp=stages, dp_shard=4 // stages, zero=0, micro_batch=1, micro_batches=stages)

    def moved(level: int, blocks: int | tuple[int, ...]) -> tuple[float, float]:
        """Seconds of copies, and bytes on the host."""
        works = replace(case, selective=level == 1).works(1)
        own = replace(on.keeping("activations"), recompute_blocks=blocks, most_level=level)
        found = priced(works, degrees, own)
        pricing = pricing_of(works, found, case.spec, own)
        return float(found.step.parts["host copies"].max()), pricing.host_bytes(layout_of(works, found.degrees))

    none, selective, full = moved(2, 0), moved(1, EVERY_BLOCK), moved(2, EVERY_BLOCK)
    for at in (0, 1):
        assert none[at] > selective[at] > full[at] > 0
    if stages > 1:
        every = (sum(count for _, count in case.works(1).counts),) * stages
        assert moved(1, every) == pytest.approx(selective)
        assert moved(2, every) == pytest.approx(full)
