"""The plans that may be measured: as the search priced them, and with room for trials that run out of memory."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autopar.capture.request import Request
from autopar.commands.given import Given
from autopar.commands.tune_candidates import Subject, candidates_of, subject_of
from autopar.cost_model.interval import usable_bytes
from autopar.cost_model.machine.machine import Machine
from autopar.ir.cluster import ClusterSpec
from autopar.models.load import resolve_model
from autopar.planning.captured_search import search_captured
from autopar.planning.machine import machine_of
from autopar.planning.options import PlanOptions
from autopar.search.measured.tuning import Candidate

TOP = 19
REQUESTS = {
    "usual": {},
    "mixed precision": {"precision": "bf16"},
    "sums in 16 bits": {"precision": "bf16", "reduce_dtype": "bf16", "dp": 4},
    "pipeline": {"pp": 2, "dp": 2},
    "own cuts": {"pp": 2, "cut_at": "model.layers.1"},
    "gathered values are kept": {"zero": 3, "dp": 4, "fix": {"regather": False}},
    "loss in chunks": {"fix": {"loss_chunks": 2}},
    "no sequence parallelism": {"tp": 4, "sequence_parallel": False},
    "context": {"cp": 2, "context": "ring"},
}


@cache
def given(name: str = "llama3-8b", layers: int = 3) -> Given:
    found = resolve_model(name, layers=layers, hidden=64, seq_len=32, batch=2, dtype="float32")
    return Given(request=Request.of(found.model, found.example_inputs, found.loss_fn), name=name)


def request(**words: Any) -> PlanOptions:
    return PlanOptions(**{"precision": "fp32"} | words)


def subject(cluster: ClusterSpec, asked: PlanOptions) -> Subject:
    return subject_of(given(), cluster, asked, lambda text: None)


def machine(cluster: ClusterSpec, asked: PlanOptions) -> Machine:
    return machine_of(cluster, None, asked.precision or "fp32")


def candidates(of: Subject, asked: PlanOptions) -> tuple[Candidate, ...]:
    return candidates_of(of, machine(of.cluster, asked), lambda text: None)


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_the_measured_plan_is_the_plan_that_the_search_found(request_: Mapping[str, Any]) -> None:
    cluster, asked = ClusterSpec.preset("4xh100"), request(global_batch=8, top=TOP, **request_)
    of = subject(cluster, asked)
    searched = search_captured(of.captured, cluster, asked, name=of.given.name, on_progress=lambda text: None).plan
    assert searched is not None
    first = of.plan_of(candidates(of, asked)[0])
    assert replace(first, summary=None, notes=()) == replace(searched, summary=None, notes=())


def test_every_plan_of_a_pipeline_has_the_cuts_of_its_price() -> None:
    cluster, asked = ClusterSpec.preset("4xh100"), request(global_batch=8, top=TOP, fix={"pp": (2, 4)})
    of = subject(cluster, asked)
    every = candidates(of, asked)
    assert any(one.degrees["pp"] == 2 for one in every)
    for one in every:
        assert of.plan_of(one).cuts == tuple(one.degrees["cuts"])


def test_one_device_has_plans_of_several_micro_batches() -> None:
    cluster, asked = ClusterSpec.preset("1xh100"), request(global_batch=8, top=TOP)
    every = candidates(subject(cluster, asked), asked)
    assert sorted(one.degrees["micro_batch"] for one in every) == [1, 2, 4, 8]
    assert [one.predicted_s for one in every] == sorted(one.predicted_s for one in every)


def test_few_plans_of_the_degrees_are_filled_up_and_many_are_not() -> None:
    few, many = ClusterSpec.preset("2xh100"), ClusterSpec.preset("8xh100")
    asked = request(global_batch=8, top=3)
    assert all(_differ(candidates(subject(many, asked), asked)))
    asked = replace(asked, top=TOP)
    every = candidates(subject(few, asked), asked)
    assert len(every) > len(set(map(_degrees, every))) > 3


def _degrees(one: Candidate) -> tuple[Any, ...]:
    return tuple(one.degrees[name] for name in ("pp", "tp", "cp", "dp_shard", "dp_replicate", "zero"))


def _differ(every: tuple[Candidate, ...]) -> list[bool]:
    return [_degrees(one) != _degrees(other) for at, one in enumerate(every) for other in every[:at]]


def test_a_plan_is_there_that_leaves_memory_free() -> None:
    """The best plan fills a small device, so plans that fill less of it are added. They recompute."""
    usual, asked = ClusterSpec.preset("1xcpu"), request(global_batch=64, micro_batch=64, top=TOP)
    (only,) = candidates(subject(usual, asked), asked)
    usable = 1.02 * only.predicted_bytes
    small = of_memory(usual, usable / usable_bytes(1.0))
    first, *with_less = candidates(subject(small, asked), asked)
    assert first.degrees == only.degrees and first.degrees["recompute"] == "none"
    assert with_less and all(one.degrees["recompute"] != "none" for one in with_less)
    assert with_less[0].predicted_bytes <= 0.75 * usable < first.predicted_bytes
    assert with_less[0].predicted_s > first.predicted_s


def of_memory(cluster: ClusterSpec, memory_bytes: float) -> ClusterSpec:
    (group,) = cluster.groups
    return replace(cluster, groups=(replace(group, device=replace(group.device, memory_bytes=int(memory_bytes))),))
