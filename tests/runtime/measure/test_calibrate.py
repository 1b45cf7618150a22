"""Measurements of calibration: every work runs, ranks do the same works, and times grow with the work."""

import math
import os
import time
from dataclasses import replace

import pytest
import torch

from autopar.commands.calibrate import RankDevice, Stage, combined, measured_stage, ranks_per_core, stages
from autopar.cost_model.machine.profile import Measurement
from autopar.ir.cluster import ClusterSpec
from autopar.ir.samples import Work
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.measure import calibrate_device as device
from autopar.runtime.measure.calibrate_device import Pace, device_works, measure, prepared, seconds_of
from autopar.runtime.measure.calibrate_links import link_groups, link_works, overlap_works

CPU = torch.device("cpu")
RANK = RankDevice(host="here", dtypes=("float32",), units=1, reserve_bytes=0)
BUDGET_S = 0.002


def smallest(works: list[Work]) -> list[Work]:
    """One work of every part and name."""
    found: dict[tuple[str, str, float], Work] = {}
    for work in works:
        key = (work.part, work.name, work.numbers.get("is_backward", 0))
        if key not in found or work.amount < found[key].amount:
            found[key] = work
    return list(found.values())


def test_every_kind_of_work_of_a_cpu_runs() -> None:
    groups = device_works("cpu", device.dtypes_of(CPU))
    works = smallest([work for group in groups.values() for work in group])
    assert {work.part for work in works} == {"launch", "memory", "matmul", "attention", "products"}
    assert {work.name for work in works if work.part == "matmul"} == {"float32", "bfloat16", "float64"}
    for work in works:
        seconds = measure(work, CPU, Pace(), BUDGET_S)
        assert 0 < seconds < 5, work
    assert (device.num_units(CPU), device.reserve_bytes(CPU)) == (1, 0)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_works_say_how_much_they_are(device_type: str) -> None:
    groups = device_works(device_type, ("bfloat16", "float16", "tf32", "float32", "float8"))
    for name, works in groups.items():
        assert works, name
        for work in works:
            n = work.numbers
            if work.part in ("matmul", "products"):
                assert work.amount == 2 * n["count"] * n["m"] * n["n"] * n["k"]
            elif work.part == "attention":
                assert work.amount == 2 * n["count"] * n["m"] * n["n"] * n["k"] and n["is_causal"]
        if work.part not in ("launch", "memory"):
            amounts = [work.amount for work in works]
            assert amounts == sorted(amounts), name  # so that what takes too long comes last
    for work in groups["products float8"]:
        assert not (work.numbers["n"] % 16 or work.numbers["k"] % 16)


def test_prepared_attention_is_what_it_says() -> None:
    numbers = {"count": 3, "m": 8, "n": 8, "k": 4, "is_causal": 1, "is_backward": 1}
    work = Work(part="attention", name="float64", amount=1, numbers=numbers)
    gradients = prepared(work, CPU)()
    assert isinstance(gradients, tuple) and [g.shape for g in gradients] == [(1, 3, 8, 4)] * 3
    assert all(g.dtype == torch.float64 and g.abs().sum() > 0 for g in gradients)
    out = prepared(replace(work, numbers={**numbers, "is_backward": 0}), CPU)()
    assert isinstance(out, torch.Tensor) and out.shape == (1, 3, 8, 4)


def test_float32_products_leave_the_setting_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    with device.products_in("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    assert (device.torch_dtype("tf32"), device.torch_dtype("bfloat16")) == (torch.float32, torch.bfloat16)


def test_ranks_agree_on_how_often_they_run() -> None:
    agreed, met, runs = list[float](), list[int](), list[int]()

    def largest(value: float) -> float:
        agreed.append(value)
        return 0.01  # another rank is slow

    pace = Pace(largest=largest, meet=lambda: met.append(len(runs)))
    seconds_of(lambda: runs.append(1), CPU, pace, 1.0)
    repeats = 10  # a tenth of the budget at the speed of the slowest
    assert len(runs) == 3 + repeats * len(met)
    assert met == [3 + repeats * i for i in range(len(met))]


def test_a_round_takes_as_long_as_the_work() -> None:
    x = torch.ones(2**20)
    short = seconds_of(lambda: x.add_(1), CPU, Pace(), 0.05)
    long = seconds_of(lambda: [x.add_(1) for _ in range(20)], CPU, Pace(), 0.05)
    assert long > 3 * short


def test_ranks_that_share_cores_count_processor_time() -> None:
    shared = Pace(ranks_per_core=4.0)
    assert seconds_of(lambda: time.sleep(0.002), CPU, shared, 0.02) < 0.001  # waiting is not computing
    x = torch.ones(2**18)
    used = time.thread_time()
    seconds = seconds_of(lambda: x.add_(1), CPU, shared, 0.02)
    assert 0 < seconds < 4 * (time.thread_time() - used)
    whole = seconds_of(lambda: x.add_(1), CPU, Pace(ranks_per_core=1.0), 0.02)
    assert 2 < seconds / whole < 8


@pytest.mark.parametrize(("ranks", "device", "expected"), [(1, "cpu", 1.0), (64, "cuda", 1.0)])
def test_only_cpu_ranks_share_cores(ranks: int, device: str, expected: float) -> None:
    assert ranks_per_core(device, ranks) == expected
    cores = len(os.sched_getaffinity(0))
    assert ranks_per_core("cpu", 3 * cores) == 3.0


def test_what_takes_too_long_is_left_out() -> None:
    works = [Work(part="memory", name="copy", amount=float(2**i)) for i in (16, 36)]  # the second would not fit at all
    found = measured_stage(Stage(name="memory", works=tuple(works)), CPU, 1e-4)
    assert found[0] is not None and found[1] is None


@pytest.mark.parametrize(("factor", "is_disturbed"), [(1.1, False), (2.0, True)])
def test_passes_that_differ_are_told(factor: float, is_disturbed: bool) -> None:
    todo = [s for s in stages("cpu", ("float32",), ["a"]) if s.name in ("memory", "launches")]
    cluster = ClusterSpec.preset("2xcpu")
    measurement = Measurement(date="2026-11-21", host="here", how="two ranks", ranks=2, seconds=1.0)
    found = []
    for slower in (1.0, factor, (1 + factor) / 2):
        for stage in todo:
            found.append((stage, [[work.amount * 1e-9 * slower for work in stage.works]] * 2))
    made = combined(found, cluster, RANK, measurement)
    assert made.is_disturbed is is_disturbed and made.spread == pytest.approx(factor - 1, abs=1e-3)
    assert made.samples[0].seconds == pytest.approx(made.samples[0].work.amount * 1e-9 * (1 + factor) / 2)
    assert made.profile.measured is not None and "passes differ by" in made.profile.measured.how


def test_groups_follow_the_hosts() -> None:
    assert link_groups("a") == []
    assert [g.ranks for g in link_groups("aabb")] == [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    assert [(g.size, g.hosts) for g in link_groups("aaaabbbb")] == [(2, 1), (4, 1), (2, 2)]
    assert [g.ranks for g in link_groups("aaa")] == [((0, 1, 2),)]
    assert link_groups("aab") == []


def test_messages_are_measured_in_pairs() -> None:
    pair, four = link_groups("aaaa")
    assert {work.name for work in link_works(pair, "cpu")} - {work.name for work in link_works(four, "cpu")} == {
        "point_to_point"
    }
    sizes = {work.amount for work in link_works(four, "cpu")}
    assert (min(sizes), max(sizes)) == (2**10, 2**26)


def test_stages_end_with_what_ranks_share() -> None:
    names = [stage.name for stage in stages("cpu", ("float32",), ["a"] * 4)]
    assert names[-3:] == ["collectives, 2 ranks of a host", "collectives, 4 ranks of a host", "overlap"]
    assert [s for s in stages("cpu", ("float32",), ["a"]) if s.groups is not None] == []


def test_every_collective_runs_on_ranks() -> None:
    pairs, four = link_groups("aaaa")
    todo = [
        Stage(name="pairs", works=tuple(smallest(link_works(pairs, "cpu"))), groups=pairs),
        Stage(name="four", works=tuple(smallest(link_works(four, "cpu"))), groups=four),
        Stage(name="overlap", works=tuple(overlap_works()), groups=four),
        Stage(name="memory", works=tuple(device_works("cpu", ("float32",))["memory"][:2])),
    ]
    with Ranks(4, timeout_s=600, checked=False) as world:
        for stage in todo:
            found = world.run("autopar.commands.calibrate:measured_on_rank", stage, BUDGET_S)
            assert len(found) == 4
            for times in found:
                assert len(times) == len(stage.works)
                assert all(seconds is not None and math.isfinite(seconds) and seconds > 0 for seconds in times)
