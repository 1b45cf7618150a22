"""A fit finds the constants that were planted, through noise, and says how far off it is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planted_profiles import DEVICE, MEASURED, planted, samples_of

from autopar.cost_model.fit.device import FitSetting, fit_profile
from autopar.cost_model.fit.links import fit_links, sent_and_hops
from autopar.cost_model.fit.log_least_squares import best_constant, fit_errors
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import AttentionEfficiency, CallCost, DeviceProfile, LinkProfile, Tile
from autopar.cost_model.machine.profile_io import dump_profile, load_profile
from autopar.ir.cluster import Tier
from autopar.ir.device import Link, device_of_preset
from autopar.ir.device_presets import device_preset
from autopar.ir.samples import Sample, Work

part = st.floats(0.2, 0.95)


def setting(units: float = 1.0) -> FitSetting:
    return FitSetting(device=DEVICE, base=device_profile("a100-80gb"), measured=MEASURED, units=units)


def fitted(profile: DeviceProfile, *, noise: float, seed: int = 0) -> DeviceProfile:
    return fit_profile(samples_of(profile, noise=noise, seed=seed), setting(profile.tile.units))


# without shrinking: one example fits thousands of grids
@settings(
    max_examples=4,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    a=part,
    b=part,
    memory=st.floats(0.3, 0.95),
    forward=part,
    backward=part,
    products=part,
    tile_m=st.sampled_from([16.0, 64.0, 128.0]),
    tile_n=st.sampled_from([32.0, 128.0]),
    k_half=st.floats(30, 1500),
    length_half=st.floats(50, 1500),
    launch_s=st.floats(5e-7, 5e-6),
    seed=st.integers(0, 2**16),
)
def test_planted_constants_are_found_through_noise(
    a: float,
    b: float,
    memory: float,
    forward: float,
    backward: float,
    products: float,
    tile_m: float,
    tile_n: float,
    k_half: float,
    length_half: float,
    launch_s: float,
    seed: int,
) -> None:
    true = planted(
        efficiency={"bfloat16": a, "float32": b},
        memory_efficiency=memory,
        tile=Tile(m=tile_m, n=tile_n, k_half=k_half, units=50.0),
        attention=AttentionEfficiency(forward=forward, backward=backward, products=products, length_half=length_half),
        launch_s=launch_s,
        host_launch_s=8e-6,
    )
    found = fitted(true, noise=0.03, seed=seed)
    assert (found.tile.m, found.tile.n, found.tile.units) == (tile_m, tile_n, 50.0)
    assert found.tile.k_half == pytest.approx(k_half, rel=0.25)
    assert found.efficiency["bfloat16"] == pytest.approx(a, rel=0.08)
    assert found.efficiency["float32"] == pytest.approx(b, rel=0.08)
    assert found.memory_efficiency == pytest.approx(memory, rel=0.08)
    assert found.attention.forward == pytest.approx(forward, rel=0.12)
    assert found.attention.backward == pytest.approx(backward, rel=0.12)
    assert found.attention.products == pytest.approx(products, rel=0.08)
    assert found.launch_s == pytest.approx(launch_s, rel=0.15)
    assert found.host_launch_s == pytest.approx(8e-6, rel=0.15)
    for name in ("matmul", "attention", "products", "memory"):
        assert found.fit[name].median < 0.05 and found.fit[name].p90 < 0.1, name


def test_without_noise_the_fit_is_exact() -> None:
    true = planted(tile=Tile(m=64.0, n=32.0, k_half=128.0, units=108.0))
    found = fitted(true, noise=0.0)
    assert found.tile == true.tile
    for error in found.fit.values():
        assert error.p90 < 1e-3
    assert found.efficiency["bfloat16"] == pytest.approx(true.efficiency["bfloat16"], rel=1e-3)


kinds = {
    "all_reduce": CallCost(efficiency=0.9, call_s=2e-5),
    "all_gather": CallCost(efficiency=0.7, call_s=8e-6),
    "reduce_scatter": CallCost(efficiency=0.4, call_s=5e-5),
    "point_to_point": CallCost(efficiency=1.0, call_s=1e-5),
}


def planted_links(speed: float, latency_s: float, tier: Tier = "in_host") -> DeviceProfile:
    link = Link(bytes_per_s=speed, latency_s=latency_s, name="planted")
    return planted(links={tier: LinkProfile(usual=CallCost(efficiency=0.7, call_s=1e-5), kinds=kinds, link=link)})


def collectives(profile: DeviceProfile, *, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    return [s for s in samples_of(profile, noise=noise, seed=seed) if s.work.part == "collective"]


@settings(max_examples=20, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(speed=st.floats(1e8, 4e11), latency_s=st.floats(1e-6, 2e-4), seed=st.integers(0, 2**16))
def test_links_predict_what_was_planted_through_noise(speed: float, latency_s: float, seed: int) -> None:
    true = planted_links(speed, latency_s)
    found = fit_links(collectives(true, noise=0.03, seed=seed))["in_host"]
    link = found.profile.link
    assert link is not None
    off = []
    for sample in collectives(true):
        kind, ranks = sample.work.name, int(sample.work.numbers["ranks"])
        sent, steps = sent_and_hops(kind, sample.work.amount, ranks)  # type: ignore[arg-type]
        call = found.profile.of(kind)  # type: ignore[arg-type]
        predicted = call.call_s + steps * link.latency_s + sent / (link.bytes_per_s * call.efficiency)
        off.append(abs(predicted / sample.seconds - 1))
    assert np.median(off) < 0.03 and np.max(off) < 0.2
    assert all(error.median < 0.06 for error in found.errors.values())


@pytest.mark.parametrize("tier", ["in_host", "inter_host"])
def test_planted_links_are_found(tier: Tier) -> None:
    found = fit_links(collectives(planted_links(2e10, 1e-5, tier)))
    assert found.keys() == {tier}
    profile = found[tier].profile
    assert profile.link is not None and profile.link.latency_s == pytest.approx(1e-5, rel=0.3)
    for kind, call in kinds.items():
        reached = profile.of(kind).efficiency * profile.link.bytes_per_s  # type: ignore[arg-type]
        assert reached == pytest.approx(call.efficiency * 2e10, rel=0.03)


def test_with_one_size_of_group_as_much_as_possible_counts_as_hops() -> None:
    """Else larger groups would cost no more than small ones."""
    pairs = [s for s in collectives(planted_links(2e10, 1e-5)) if s.work.numbers["ranks"] == 2]
    profile = fit_links(pairs)["in_host"].profile
    least = min(
        (call.call_s + steps * 1e-5) / steps for call, steps in ((kinds["all_gather"], 1), (kinds["all_reduce"], 2))
    )
    assert profile.link is not None and profile.link.latency_s == pytest.approx(least, rel=0.1)


def test_known_links_keep_their_figures() -> None:
    link = Link(bytes_per_s=3e11, latency_s=3e-6, name="NVLink")
    usual = CallCost(efficiency=0.7, call_s=1e-5)
    true = planted(links={"in_host": LinkProfile(usual=usual, kinds=kinds, link=link)})
    found = fit_links(collectives(true), link)["in_host"].profile
    assert found.link is None
    for kind, call in kinds.items():
        assert found.of(kind).efficiency == pytest.approx(call.efficiency, rel=0.01)  # type: ignore[arg-type]
        assert found.of(kind).call_s == pytest.approx(call.call_s, rel=0.01)  # type: ignore[arg-type]


def test_what_was_not_measured_stays_as_it_was() -> None:
    base = device_profile("a100-80gb")
    found = fit_profile([Sample(work=Work(part="memory", name="copy", amount=1e9), seconds=1e-3)], setting())
    assert (found.tile, found.attention, found.links) == (base.tile, base.attention, base.links)
    assert found.memory_efficiency == pytest.approx(0.5, rel=0.01)
    assert found.sources["memory_efficiency"].startswith("measured 2026-11-21")
    assert found.sources["tile.m"] == base.sources["tile.m"]
    assert set(found.fit) == {"memory"}


def test_measured_parts_are_those_of_the_device_s_own_power() -> None:
    """What was not measured is as the shipped profile says for its power. No later step counts the power again."""
    limited = device_of_preset(device_preset("h100-96gb-hbm2e"))
    shipped = device_profile("h100-96gb-hbm2e")
    own = FitSetting(device=limited, base=shipped, measured=MEASURED)
    found = fit_profile([Sample(work=Work(part="memory", name="copy", amount=1e9), seconds=1e-3)], own)
    assert found.watts_per_tflops is None and "watts_per_tflops" not in found.sources
    part = shipped.efficiency_of("bfloat16")
    assert found.sustained(found.efficiency_of("bfloat16"), limited) == shipped.sustained(part, limited) < 0.9 * part
    assert found.attention.forward == shipped.sustained(shipped.attention.forward, limited)


def test_a_cpu_launches_and_computes_in_one_thread() -> None:
    works = [Work(part="launch", name=name, amount=100) for name in ("device", "host")]
    samples = [Sample(work=work, seconds=seconds) for work, seconds in zip(works, (2e-4, 5e-4), strict=True)]
    cpu = FitSetting(device=replace(DEVICE, device_type="cpu"), base=device_profile("cpu"), measured=MEASURED)
    for found, host_s in ((fit_profile(samples, cpu), 3e-6), (fit_profile(samples, setting()), 5e-6)):
        assert (found.launch_s, found.host_launch_s) == (pytest.approx(2e-6), pytest.approx(host_s))


def test_a_launch_takes_the_geometric_mean_of_its_samples() -> None:
    """One slow sample moves the mean little."""
    times = {"device": (1e-6, 2e-6, 32e-6), "host": (4e-6, 4e-6, 4e-6)}
    samples = [
        Sample(work=Work(part="launch", name=name, amount=100), seconds=100 * seconds)
        for name, every in times.items()
        for seconds in every
    ]
    assert fit_profile(samples, setting()).launch_s == pytest.approx(4e-6)


def test_unknown_figures_are_the_best_that_was_measured() -> None:
    samples = samples_of(planted())
    found = fit_profile(samples, replace(setting(108.0), figures_are_known=False))
    assert found.device is not None
    best = max(s.work.amount / s.seconds for s in samples if s.work.name == "float32")
    assert found.device.peak_flops_per_s["float32"] == pytest.approx(best, rel=1e-3)
    assert found.efficiency["float32"] >= 0.99


@pytest.mark.parametrize(("both", "slowdown"), [(1.0, 1.0), (1.4, 1.5), (1.8, 2.0), (3.0, 2.0), (0.9, 1.0)])
def test_overlap_is_the_part_of_the_shorter_that_comes_on_top(both: float, slowdown: float) -> None:
    times = (("compute", 1.0), ("communicate", 0.8), ("both", both))
    samples = [Sample(work=Work(part="overlap", name=name, amount=1), seconds=s) for name, s in times]
    assert fit_profile(samples, setting(108.0)).overlap_slowdown == slowdown


def test_a_fitted_profile_is_a_file_with_a_source_for_every_number(tmp_path: Path) -> None:
    link = LinkProfile(usual=kinds["all_gather"], kinds=kinds, link=Link(bytes_per_s=1e9, latency_s=1e-5))
    overlap = [
        Sample(work=Work(part="overlap", name=name, amount=1), seconds=seconds)
        for name, seconds in (("compute", 1.0), ("communicate", 0.8), ("both", 1.4))
    ]
    samples = [*samples_of(planted(links={"in_host": link}), noise=0.02), *overlap]
    found = fit_profile(samples, replace(setting(108.0), reserve_bytes=7 * 10**8))
    assert found.overlap_slowdown == 1.5 and found.reserve_bytes == 7 * 10**8
    dump_profile(found, tmp_path / "device.yaml")
    again = load_profile(tmp_path / "device.yaml")
    assert again == found
    unmeasured = {path for path, source in again.sources.items() if not source.startswith("measured")}
    assert unmeasured == {"links.inter_host.efficiency", "links.inter_host.call_us"}


@settings(max_examples=50, deadline=None)
@given(true=st.floats(2e-3, 1.9), offset=st.floats(0, 10))
def test_one_constant_is_found_anywhere(true: float, offset: float) -> None:
    work = np.array([1.0, 10.0, 300.0])
    assert best_constant(lambda x: offset + work / x, offset + work / true, 1e-3, 2.0) == pytest.approx(true, rel=1e-3)


def test_errors_are_relative() -> None:
    found = fit_errors([1.1, 2.0, 0.5], [1.0, 2.0, 1.0])
    assert (found.median, found.num_points) == (0.1, 3) and found.p90 == pytest.approx(0.42)
