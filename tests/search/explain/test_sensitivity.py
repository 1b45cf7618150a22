"""What-if curves: the plan that was searched at factor 1, plans that could run elsewhere, and bounds below them."""

from dataclasses import replace
from functools import cache

import pytest
from search_cases import Case

from autopar.cost_model.machine.cluster import cluster_machine
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.driver.search import search_degrees
from autopar.search.explain.sensitivity import Base, adapted, what_if
from autopar.search.pricing.objective import Part
from autopar.search.result.report_data import Curve

CASE = Case(model="llama", cluster="16xh100", global_batch=16, tokens=2048)


def machinery(cluster: ClusterSpec) -> Machinery:
    made = cluster_machine(cluster, CASE.on.machine.engine, CASE.on.machine.mechanisms, precision="bf16")
    return replace(CASE.on, machine=replace(made, memory_bytes=CASE.on.machine.memory_bytes))


@cache
def base(*schedules: str) -> Base:
    """Of the search over some schedules, or all of them."""
    constraints = replace(CASE.constraints, tensor_degrees=(1, 2)).narrowed(
        {"schedule": schedules} if schedules else {}
    )
    found = search_degrees(CASE.works, CASE.spec, constraints, CASE.on, most_exact=200)
    assert found.best is not None
    return Base(
        best=found.best, part=Part(cluster=CASE.spec, on=CASE.on, weight=1.0), machinery=machinery, works_of=CASE.works,
        every=(CASE.works,), constraints=constraints, global_batch=CASE.global_batch,
    )  # fmt: skip


@cache
def curves(*schedules: str) -> dict[str, Curve]:
    return {curve.name: curve for curve in what_if(base(*schedules))}


def test_every_curve_passes_the_searched_plan() -> None:
    assert list(curves()) == ["devices", "bandwidth of links between hosts", "global batch", "sequence length"]
    for curve in curves().values():
        here = next(one for one in curve.points if one.factor == 1)
        assert here.step_s == base().best.seconds
        assert here.fits
        assert [one.factor for one in curve.points] == sorted(one.factor for one in curve.points)


def test_no_plan_is_below_its_bound() -> None:
    for curve in curves().values():
        for one in curve.points:
            assert one.bound_s is not None
            if one.step_s is not None and one.fits:
                assert one.bound_s <= one.step_s * (1 + 1e-6), (curve.name, one)
                assert one.tokens_per_s is not None and one.bound_tokens_per_s is not None


def test_more_bandwidth_is_no_slower_and_more_work_no_faster() -> None:
    def steps_of(found: dict[str, Curve]) -> dict[str, list[float]]:
        return {name: [one.step_s for one in curve.points if one.step_s is not None] for name, curve in found.items()}

    steps = steps_of(curves())
    assert steps["bandwidth of links between hosts"] == sorted(steps["bandwidth of links between hosts"], reverse=True)
    assert steps["global batch"] == sorted(steps["global batch"])
    # a block that waits for the host takes as long with more tokens, of which backward passes for weights then are more
    whole = steps_of(curves("gpipe", "1f1b", "interleaved-1f1b"))["sequence length"]
    assert whole == sorted(whole)


@pytest.mark.parametrize(
    ("devices", "batch", "expected"),
    [
        (16, 64, (2, 4, 8)),
        (32, 64, (2, 8, 4)),
        (8, 64, (2, 2, 16)),
        (12, 64, None),  # 3 data-parallel ranks do not divide the batch
        (2, 64, None),
    ],
)
def test_a_plan_elsewhere(devices: int, batch: int, expected: tuple[int, int, int] | None) -> None:
    plan = Degrees(tp=2, pp=2, dp_shard=4, zero=1, micro_batch=2, micro_batches=8, recompute="full", recompute_blocks=3)
    found = adapted(plan, replace(CASE.constraints, num_devices=devices, global_batch=batch))
    assert (None if found is None else (found.tp, found.dp, found.num_micro_batches)) == expected
    if found is not None:
        assert (found.world_size, found.recompute, found.zero) == (devices, "none", 1)
