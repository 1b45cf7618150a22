"""A wrong prediction names the term that is off, and the corrected profile predicts the measured time."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.fit.predicted_vs_measured import compared_terms, corrected
from autopar.cost_model.fit.profile_parts import measured_parts, read_trace
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile import CallCost, LinkProfile
from autopar.cost_model.machine.profile_io import dump_profile, load_profile
from autopar.errors import InputError
from autopar.ir.device import Link
from autopar.runtime.profile.chrome_trace import chrome_trace, write_whole
from autopar.runtime.profile.timeline import Slice

DAY = date(2026, 11, 21)


def test_the_term_that_is_off_is_named_first() -> None:
    found = compared_terms({"compute": 1.0, "tp": 0.3, "idle": 0.2}, {"compute": 1.02, "tp": 0.9, "idle": 0.1})
    assert [term.name for term in found.terms] == ["tp", "idle", "compute"]
    assert [term.name for term in found.outside] == ["tp", "idle"]
    assert str(found.total) == "step: predicted 1.5 s, measured 2.02 s (-26%)"
    assert [str(term) for term in found.outside] == [
        "tp: predicted 300 ms, measured 900 ms (-67%)",
        "idle: predicted 200 ms, measured 100 ms (+100%)",
    ]


def test_errors_that_cancel_out_are_told_all_the_same() -> None:
    found = compared_terms({"compute": 1.0, "tp": 0.5}, {"compute": 0.5, "tp": 1.0})
    assert found.total.off_s == 0
    assert {term.name for term in found.outside} == {"compute", "tp"}


def test_small_terms_name_nobody() -> None:
    found = compared_terms({"compute": 1.0, "tp": 0.001}, {"compute": 1.0, "tp": 0.004})
    assert found.outside == ()


def test_times_must_be_times() -> None:
    with pytest.raises(InputError) as caught:
        compared_terms({"compute": -1.0, "tp": float("nan")}, {"compute": float("inf")})
    assert len(caught.value.problems) == 3
    with pytest.raises(InputError, match="at least one"):
        compared_terms({}, {"compute": 1.0})


@settings(max_examples=50, deadline=None)
@given(factor=st.floats(0.6, 5))
def test_a_corrected_constant_gives_the_measured_time(factor: float) -> None:
    profile = device_profile("a100-80gb")
    found = corrected(profile, compared_terms({"compute": 1.0, "idle": 0.2}, {"compute": factor, "idle": 0.2}))
    if abs(factor - 1) <= 0.1 * factor or abs(factor - 1) < 0.02:
        assert found == profile
        return
    scaled = {
        "efficiency": profile.efficiency["bfloat16"] / found.efficiency["bfloat16"],
        "forward": profile.attention.forward / found.attention.forward,
        "memory": profile.memory_efficiency / found.memory_efficiency,
        "launch": found.launch_s / profile.launch_s,
    }
    for name, ratio in scaled.items():
        assert ratio == pytest.approx(factor, rel=1e-3), name


def test_links_are_corrected_on_the_tier_that_a_dimension_crosses() -> None:
    kinds = {"all_gather": CallCost(efficiency=0.6, call_s=1e-5)}
    link = Link(bytes_per_s=1e9, latency_s=1e-5, name="measured")
    one = LinkProfile(usual=CallCost(efficiency=0.8, call_s=2e-5), kinds=kinds, link=link)  # type: ignore[arg-type]
    profile = replace(device_profile("cpu"), links={"in_host": one, "inter_host": one})
    found = corrected(
        profile,
        compared_terms({"tp": 0.5, "dp": 0.2, "pp": 1.0}, {"tp": 0.5, "dp": 0.4, "pp": 1.0}),
        tiers={"dp": "inter_host"},
    )
    assert found.links["in_host"] == one
    new = found.links["inter_host"]
    assert (new.usual.efficiency, new.usual.call_s) == (0.4, 4e-5)
    assert (new.of("all_gather").efficiency, new.of("all_gather").call_s) == (0.3, 2e-5)
    assert new.link is not None and (new.link.bytes_per_s, new.link.latency_s) == (1e9, 2e-5)


def test_the_source_says_what_was_changed_and_the_file_is_still_one(tmp_path: Path) -> None:
    profile = device_profile("a100-80gb")
    comparison = compared_terms({"compute": 1.0, "tp": 1.0}, {"compute": 2.0, "tp": 0.5})
    once = corrected(profile, comparison, today=DAY)
    source = once.sources["attention.forward"]
    assert source.startswith(profile.sources["attention.forward"])
    assert "scaled for 2 times the time on 2026-11-21: compute: predicted 1 s, measured 2 s (-50%)" in source
    assert once.sources["reserve_gb"] == profile.sources["reserve_gb"]
    twice = corrected(once, comparison, today=DAY)
    assert twice.sources["attention.forward"] == source
    dump_profile(twice, tmp_path / "device.yaml")
    assert load_profile(tmp_path / "device.yaml") == twice
    assert twice.links["in_host"].usual.efficiency == 2.0  # no further: a link gives no more than it has


def test_waiting_is_nobodys_constant() -> None:
    profile = device_profile("a100-80gb")
    assert corrected(profile, compared_terms({"idle": 1.0, "tp": 0}, {"idle": 3.0, "tp": 2.0})) == profile


# ---- traces ----


def block(start: float, end: float) -> Slice:
    return Slice(track="compute", name="layers.0", start_us=start, duration_us=end - start, details={"call": 0})


def span(track: str, start: float, end: float) -> Slice:
    details = {"from_stage": 0, "to_stage": 1, "micro_batch": 0} if track == "point-to-point" else {}
    return Slice(track=track, name=f"0SEND_F0 {track}", start_us=start, duration_us=end - start, details=details)


def test_terms_of_a_trace_add_up_to_the_step() -> None:
    first = [
        span("compute", 0, 500),  # a pass, with waiting in it
        block(100, 300),
        block(320, 450),
        span("tp", 150, 200),
        span("tp", 180, 210),
        span("dp", 280, 340),  # hidden for all but 20
        span("point-to-point", 450, 470),
        replace(span("point-to-point", 470, 800), name="0RECV_B0"),  # waits for the other stage
        span("host", 0, 900),
    ]
    second = [block(0, 100), span("tp", 900, 1000)]
    trace = chrome_trace([("rank 0: pp 0 dp 0 tp 0", first), ("rank 1: pp 0 dp 0 tp 1", second)], {})
    found = measured_parts(json.loads(json.dumps(trace)))
    assert found == pytest.approx(
        {"tp": 60e-6, "compute": 270e-6, "dp": 20e-6, "point-to-point": 20e-6, "idle": 630e-6}
    )
    assert sum(found.values()) == pytest.approx(1000e-6)


def test_passes_count_where_there_are_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_whole(path, chrome_trace([("rank 0", [span("compute", 0, 50), span("dp", 40, 100)])], {}))
    assert measured_parts(read_trace(path)) == pytest.approx({"compute": 50e-6, "dp": 50e-6, "idle": 0.0})


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ('{"traceEvents": []}', "must have slices"),
        ('{"traceEvents": [{"ph": "X", "pid": "0", "cat": "tp", "ts": 0, "dur": 1}]}', "pid, cat, ts and dur"),
        ('{"traceEvents": {"ph": "X"}}', "must have slices"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rule):
        measured_parts(read_trace(path))
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "missing.json")
