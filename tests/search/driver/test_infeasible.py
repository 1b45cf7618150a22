"""If no plan fits: the counts, the closest plan, and remedies that work."""

import re
from dataclasses import replace

import pytest
from search_cases import Case, machinery_with

from autopar.ir.cluster import ClusterSpec
from autopar.ir.optimizers import OPTIMIZERS
from autopar.search.bounds.memory import PARTS
from autopar.search.driver.infeasible import Query, closest, counted, with_hosts
from autopar.search.driver.search import search_degrees
from autopar.search.pricing.exact import priced
from autopar.search.result.result import Closest
from autopar.search.space.candidates import candidates, constraints_on
from autopar.search.space.dimensions import Constraints

CASE = Case(model="llama", cluster="2xh100", global_batch=4, tokens=128, memory_bytes=4e6)

ON_DEVICES = CASE.constraints.narrowed({"offload": "none"})


def asked(case: Case = CASE, constraints: Constraints | None = None) -> Query:
    return Query(
        works_of=case.works,
        cluster=case.spec,
        constraints=constraints or case.constraints,
        machinery=lambda cluster: machinery_with(cluster, case.memory_bytes),
    )


def fits(case: Case, cluster: ClusterSpec, narrowed: Constraints | None = None) -> bool:
    on = machinery_with(cluster, case.memory_bytes)
    constraints = constraints_on(narrowed or case.constraints, cluster.num_devices)
    found = search_degrees(case.works, cluster, constraints, on, most_exact=10_000)
    return found.best is not None


def told(one: Closest | None) -> str:
    assert one is not None
    return one.remedy


@pytest.mark.parametrize("fix", [{"offload": "none"}, {}])
def test_the_closest_is_the_plan_with_least_memory(fix: dict[str, str]) -> None:
    constraints, on = CASE.constraints.narrowed(fix), CASE.on
    found, every = closest(asked(constraints=constraints)), candidates(CASE.constraints)
    assert found is not None
    least = min(
        priced(CASE.works(int(every.tp[i])), every.degrees(i), on.keeping(offload), least_memory=True).peak_bytes
        for i in range(len(every))
        for offload in constraints.offloads
    )
    assert found.peak_bytes == pytest.approx(least)
    assert found.missing_bytes == pytest.approx(least - on.capacity_bytes)
    assert sum(found.parts.values()) == pytest.approx(least)


def test_the_least_number_of_more_devices() -> None:
    words = re.search(r"on (\d+) such devices", told(closest(asked())))
    assert words is not None
    hosts = int(words[1]) // 2
    assert fits(CASE, with_hosts(CASE.spec, hosts))
    # fewer hosts are left out only because state alone fills them, or were tried
    assert not any(fits(CASE, with_hosts(CASE.spec, fewer)) for fewer in range(1, hosts))


def test_a_sequence_that_fits() -> None:
    case = replace(CASE, tokens=512, memory_bytes=6.5e6)
    words = re.search(r"sequences of ([\d,]+) tokens", told(closest(asked(case))))
    assert words is not None
    tokens = int(words[1].replace(",", ""))
    assert fits(replace(case, tokens=tokens), case.spec)
    assert not fits(replace(case, tokens=2 * tokens), case.spec)


def test_a_wish_that_stands_in_the_way_comes_first() -> None:
    case = replace(CASE, memory_bytes=1e7)
    narrowed = case.constraints.narrowed(fix={"zero": 0, "tp": 1, "pp": 1}, forbid={"schedule": "gpipe"})
    assert not fits(case, case.spec, narrowed)
    assert told(closest(asked(case, narrowed))).startswith("without fix zero = 0: ")
    assert fits(case, case.spec, replace(narrowed, fix={"tp": (1,), "pp": (1,)}))


def test_what_is_counted() -> None:
    for tokens, largest in ((4096, "logits"), (16, "optimizer state")):
        case = replace(CASE, tokens=tokens, memory_bytes=1e6)
        found = search_degrees(case.works, case.spec, case.constraints, case.on, most_exact=100)
        count = counted(found, case.on.capacity_bytes)
        assert sum(count.largest.values()) == count.candidates
        assert set(count.largest) <= set(PARTS)
        assert next(iter(count.largest)) == largest


def test_without_room_for_the_framework_nothing_helps() -> None:
    case = replace(CASE, memory_bytes=-1e6)
    assert told(closest(asked(case))).startswith("nothing that was tried")


def test_a_loss_of_every_micro_batch_where_the_batch_cannot_be_split() -> None:
    case = replace(CASE, global_batch=64, tokens=512, memory_bytes=2e7)
    whole = replace(asked(case), constraints=replace(case.constraints, accumulates=False))
    assert fits(case, case.spec)
    assert told(closest(whole)).startswith("with a loss for each micro-batch (per_micro_batch): ")
    assert "per_micro_batch" not in told(closest(asked(replace(case, memory_bytes=1e6))))


def test_an_optimizer_with_less_state() -> None:
    """The optimizer with the most state that fits, which runs on split parameters."""
    case = replace(CASE, memory_bytes=5.8e6)
    words = re.search(
        r"with --optimizer ([\w-]+) \(([\d.]+) instead of 8 bytes", told(closest(asked(case, ON_DEVICES)))
    )
    assert words is not None
    works = case.works(1)
    sizes = {name: works.moment_bytes_of(name) for name in works.optimizers if OPTIMIZERS[name].runs_split}
    assert float(words[2]) == pytest.approx(sizes[words[1]], rel=0.01)

    def found(name: str) -> bool:
        constraints = constraints_on(ON_DEVICES, case.spec.num_devices)
        works = {tp: replace(case.works(tp), optimizer=name) for tp in constraints.tensor_degrees}
        on = machinery_with(case.spec, case.memory_bytes)
        return (
            search_degrees(lambda tp, cp=1, ep=1: works[tp], case.spec, constraints, on, most_exact=10_000).best
            is not None
        )

    more = [name for name, size in sizes.items() if sizes[words[1]] < size < 8]
    assert [found(name) for name in (words[1], *more)] == [True, *[False] * len(more)]


def test_out_of_time_only_the_closest_is_told() -> None:
    found = closest(asked(constraints=ON_DEVICES), lambda: False)
    assert found is not None
    assert found.missing_bytes > 0
    assert found.remedy.startswith("nothing that was tried")
