"""A diagnosis from measurements: the slow ranks, and the figures compared with the cluster."""

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from autopar.cli.app import app_of
from autopar.commands.diagnosis import Check, Diagnosis, Rank, diagnose
from autopar.ir.cluster import ClusterSpec
from autopar.runtime.measure.doctor_speed import SpeedMeasurement

Part = tuple[Rank, list[Check], list[SpeedMeasurement]]


def part(rank: int, *measured: SpeedMeasurement, error: float | None = 0.0, device: str = "cpu") -> Part:
    check = Check(name="conversion P -> I", error=error, tolerance=0.0, where="forward", num_compared=4)
    return Rank(rank=rank, host="here", device=device), [check], list(measured)


def rounds(
    kind: str, amount: float, seconds: Sequence[float], name: str = "matmul float32", peer: int | None = None
) -> SpeedMeasurement:
    return SpeedMeasurement(name=name, kind=kind, amount=amount, rounds_s=tuple(seconds), peer=peer)


def of_times(*times: list[float]) -> Diagnosis:
    cluster = ClusterSpec.preset(f"{len(times)}xcpu")
    return diagnose(cluster, [part(r, rounds("flops", 1e9, own)) for r, own in enumerate(times)])


def test_the_slow_rank_is_named() -> None:
    found = of_times([1, 1, 1], [1, 1.1, 1], [2, 2, 2], [1, 1, 1.1])
    (figure,) = found.figures
    assert figure.slow == {2: pytest.approx(0.5)} and found.slow_ranks == {2: {"matmul float32": pytest.approx(0.5)}}
    assert figure.worst == (2, 5e8) and figure.of_cluster == (5e10,) * 4
    assert of_times([1, 1, 1], [1.3, 1.3, 1.3]).figures[0].slow.keys() == {1}


def test_a_disturbance_of_one_round_or_of_all_ranks_names_nobody() -> None:
    assert not of_times([1, 1, 1], [1, 9, 1], [1, 1, 1]).slow_ranks
    assert not of_times([1, 5, 3], [1.1, 5, 3], [1, 5.2, 3.1]).slow_ranks
    assert not of_times([1, 1, 1], [1, 4, 4], [1, 1, 1]).slow_ranks  # it can be as fast as the others


def test_ranks_are_compared_with_equal_devices() -> None:
    parts = [part(r, rounds("flops", 1e9, [t] * 3), device=d) for r, (t, d) in enumerate([(1, "a"), (3, "b")])]
    assert not diagnose(ClusterSpec.preset("2xcpu"), parts).slow_ranks


def test_links() -> None:
    large = [rounds("point-to-point", 4e6, [t] * 3, "message of 4 MB", peer) for t, peer in ((0.01, 1), (0.04, 0))]
    small = rounds("point-to-point", 8, [1e-4] * 3, "message of 8 B", 1)
    ring = rounds("all-reduce", 4e6, [0.01] * 3, "all-reduce of 4 MB")
    cluster = ClusterSpec.preset("2xcpu")
    found = diagnose(cluster, [part(0, large[0], small, ring), part(1, large[1], ring)])
    message, latency, reduce = found.figures
    assert message.unit == "B/s" and message.of_ranks == (4e8, 1e8) and message.slow == {1: 0.25}
    assert message.promised == cluster.link(0, 1).bytes_per_s
    assert (latency.unit, latency.of_ranks, latency.promised) == ("s", (1e-4, None), cluster.link(0, 1).latency_s)
    assert reduce.of_ranks == (4e8, 4e8) and not reduce.slow


@pytest.mark.parametrize("error", (0.5, None))
def test_the_worst_rank_of_a_check_counts(error: float | None) -> None:
    found = diagnose(ClusterSpec.preset("2xcpu"), [part(0), part(1, error=error)])
    assert not found.passed and (found.checks[0].rank, found.checks[0].error) == (1, error)


@pytest.mark.parametrize("passed", (True, False))
def test_table_and_exit_status(monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    import autopar.commands.doctor

    measured = [rounds("flops", 1e9, [t] * 3) for t in (1, 1, 4)]
    parts = [part(r, m, error=0.0 if passed or r != 1 else 0.25) for r, m in enumerate(measured)]
    found = diagnose(ClusterSpec.preset("3xcpu"), parts)
    monkeypatch.setattr(autopar.commands.doctor, "examine_here", lambda *_, **__: found)
    result = CliRunner().invoke(app_of(), ["doctor", "--ranks", "3"])
    assert result.exit_code == (0 if passed else 1)
    assert "slow: rank 2 (cpu on here): matmul float32 75% under the median" in result.stdout
    assert ("passed" if passed else "FAILED: conversion P -> I on rank 1") in result.stdout
    if not passed:
        assert "2.5e-01" in result.stdout and "rank 1: forward" in result.stdout
