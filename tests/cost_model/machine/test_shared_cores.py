"""CPU ranks: one thread starts and runs operators, ranks share cores, and collectives have their measured cost."""

from dataclasses import replace

import numpy as np
import pytest
from equal_stages import equal_stages
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.collectives import hops, sent_bytes
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.links import Links
from autopar.cost_model.machine.machine import Speeds
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import CallCost, LinkProfile, Measurement
from autopar.cost_model.pipeline.simulator import replay_of, replayed, shared_step_s
from autopar.cost_model.pipeline.stages import pipelines_of, stages_at
from autopar.cost_model.step.assembly import PipelineTimes
from autopar.cost_model.step.block_time import computing_seconds
from autopar.cost_model.step.context import Passes
from autopar.cost_model.work.block_work import BlockWork, Operator
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.device import Link

ENGINE = engine_named("autopar")


def _passes(seconds: float) -> Passes:
    return Passes(forward=np.array([seconds]), backward=np.array([2 * seconds]))


def _pipelined(seconds: dict[str, float], cuts: tuple[int, ...], micro_batches: int, sharing: float) -> PipelineTimes:
    stages = stages_at(list(seconds), cuts, Degrees(pp=len(cuts) + 1, micro_batches=micro_batches))
    passes = {role: _passes(one) for role, one in seconds.items()}
    return pipelines_of([stages], ENGINE, 1.0, sharing)(passes, np.zeros(1))


def _run_s(found: PipelineTimes, micro_batches: int) -> float:
    return float(micro_batches * found.busy[0] + found.idle[0] + found.messages[0])


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_stages_that_wait_leave_their_cores_to_others(micro_batches: int) -> None:
    equal = {"layer:1": 1.0, "layer:2": 1.0}
    own, shared = (_run_s(_pipelined(equal, (1,), micro_batches, sharing), micro_batches) for sharing in (1.0, 2.0))
    assert own == pytest.approx(3 * (micro_batches + 1))
    assert shared == pytest.approx(3 * micro_batches)  # two ranks on one core: one of them always computes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_rank_has_more_than_a_core(schedule: str) -> None:
    """Four ranks on two cores, one micro-batch: one computes at a time, and the other core is idle."""
    run = replayed(replay_of(schedule, 4, 1, 1), equal_stages(4, forward_s=1.0, backward_s=2.0))
    assert [shared_step_s(run, sharing) for sharing in (1.0, 2.0, 4.0)] == pytest.approx([12.0, 6.0, 3.0])


@given(micro_batches=st.integers(1, 6), num_ranks=st.integers(2, 5), sharing=st.floats(1, 5))
@settings(max_examples=30, deadline=None)
def test_shared_cores_are_between_whole_cores_and_no_sharing(
    micro_batches: int, num_ranks: int, sharing: float
) -> None:
    run = replayed(
        replay_of("1f1b", num_ranks, 1, micro_batches), equal_stages(num_ranks, forward_s=1.0, backward_s=2.0)
    )
    shared, work = shared_step_s(run, sharing), 3.0 * micro_batches
    assert max(run.step_s / sharing, work) - 1e-9 <= shared <= run.step_s + 1e-9
    assert shared_step_s(run, 1.0) == pytest.approx(run.step_s)


def test_unequal_stages_take_the_mean_of_ranks_that_share_cores() -> None:
    found = _pipelined({"layer:1": 1.0, "layer:2": 2.0}, (1,), 8, 2.0)
    assert _run_s(found, 8) == pytest.approx(8 * 3 * 1.5)
    assert found.blocks == 1
    whole = _pipelined({"layer:1": 1.0, "layer:2": 2.0}, (1,), 8, 1.0)
    assert _run_s(whole, 8) > 8 * 3 * 2.0


def test_one_thread_adds_starting_to_running() -> None:
    kernel = Operator(
        name="add", kind="memory", flops=0.0, m=0.0, n=0.0, k=0.0, count=0.0, forward_bytes=3e6, backward_bytes=6e6,
        kernels_forward=1, kernels_backward=2,
    )  # fmt: skip
    work = BlockWork(
        role="layer", products=(), eager=(kernel,), fused=(kernel,), sent=(), saved_eager_bytes=0.0,
        saved_fused_bytes=0.0, saved_operand_bytes=0.0, input_bytes=0.0,
        parameters_split=0.0, parameters_whole=0.0, parameters_expert=0.0,
    )  # fmt: skip
    profile = device_profile("cpu")
    speeds = Speeds(
        peak_flops_per_s=1e10, product_flops_per_s=1e10, narrow_flops_per_s=None, attention=profile.attention,
        tile=profile.tile, bytes_per_s=1e9, launch_s=1e-6, host_s=1e-3, misaligned=1.0, in_one_thread=True,
    )  # fmt: skip
    found = computing_seconds(work, speeds, ENGINE, is_narrow=False)
    assert found.forward == pytest.approx(3e-3 + 1e-6 + 1e-3)
    assert found.waiting == pytest.approx(3e-3)
    beside = computing_seconds(work, replace(speeds, in_one_thread=False), ENGINE, is_narrow=False)
    assert beside.forward < found.forward


def _measured_links() -> Links:
    """Of a profile that has measured kinds, on two hosts of four."""
    kinds = {
        "all_gather": CallCost(efficiency=0.5, call_s=1e-3),
        "reduce_scatter": CallCost(efficiency=0.25, call_s=2e-3),
        "point_to_point": CallCost(efficiency=1.0, call_s=3e-4),
    }
    link = LinkProfile(
        usual=CallCost(efficiency=0.4, call_s=1e-3),
        kinds=kinds,  # type: ignore[arg-type]
        link=Link(bytes_per_s=1e9, latency_s=1e-4, name="measured"),
    )
    measured = Measurement(date="2026-11-21", host="here", how="gloo", ranks=4, seconds=1.0, ranks_per_core=2.0)
    shipped = device_profile("cpu")
    profile = replace(shipped, links={**shipped.links, "in_host": link}, measured=measured)
    group = replace(ClusterSpec.preset("4xcpu").groups[0], num_hosts=2)
    cluster = ClusterSpec(name="two", groups=(group,), inter_host=Link(bytes_per_s=1e8, latency_s=1e-3))
    found = cluster_machine(cluster, ENGINE, mechanisms(), precision="fp32", profile=profile)
    assert found.ranks_per_core == 1.0 and found.speeds.in_one_thread  # cores were measured in one host
    alone = cluster_machine(ClusterSpec.preset("4xcpu"), ENGINE, mechanisms(), precision="fp32", profile=profile)
    assert alone.ranks_per_core == 2.0
    return found.links


@pytest.mark.parametrize(("kind", "speed", "call_s"), [("all_gather", 5e8, 1e-3), ("reduce_scatter", 2.5e8, 2e-3)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_measured_kinds_cost_what_was_fitted(kind: str, speed: float, call_s: float, ranks: int) -> None:
    links = _measured_links()
    moved, steps = sent_bytes(kind, 1e6, ranks), hops(kind, ranks)  # type: ignore[arg-type]
    expected = moved / speed + steps * 1e-4 + call_s if ranks > 1 else 0.0
    one = np.ones(1)
    assert links.seconds(kind, np.array([1e6]), ranks * one, one) == pytest.approx(expected)  # type: ignore[arg-type]
    in_parts = links.seconds(kind, np.array([1e6]), ranks * one, one, num_calls=5.0)  # type: ignore[arg-type]
    more = 4 * (steps * 1e-4 + call_s) if ranks > 1 else 0.0
    assert in_parts == pytest.approx(expected + more)


def test_what_was_not_measured_is_priced_as_before() -> None:
    links = _measured_links()
    plain, one = replace(links, calls=None), np.ones(1)
    for kind, ranks in (("all_reduce", 4.0), ("all_gather", 8.0)):  # another kind, another tier
        args = (kind, np.array([1e6]), ranks * one, one)
        assert links.seconds(*args) == plain.seconds(*args)  # type: ignore[arg-type]
    assert links.message_s(np.array([1e6]), np.array([True])) == pytest.approx(1e-3 + 1e-4 + 3e-4)
    outside = np.array([False])
    assert links.message_s(np.array([1e6]), outside) == plain.message_s(np.array([1e6]), outside)
