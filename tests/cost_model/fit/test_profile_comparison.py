"""An estimate beside a trace: the same terms, a refusal of another plan, a sentence with the remedy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost_model.estimate import CollectiveSeconds, Estimate
from autopar.cost_model.fit.predicted_vs_measured import compared_terms, corrected
from autopar.cost_model.fit.profile_comparison import compare_trace, predicted_parts, remedy, sentence, tiers_of
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.parts import COMPUTE, MEMORY, OTHER
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec

DEGREES = {"pp": 1, "tp": 2, "dp_shard": 2, "dp_replicate": 1, "zero": 3, "micro_batch": 2, "micro_batches": 1,
           "accumulate": 1, "schedule": "1f1b", "virtual_stages": 1, "recompute": "none"}  # fmt: skip


def estimate(compute_s: float = 1.0, tp_s: float = 0.3, dp_s: float = 0.2) -> Estimate:
    """A step of compute, collectives, a hundredth of waiting and fixed costs, and an optimizer that no trace shows."""
    exposed = {"tp": tp_s, "dp": dp_s}
    other = dict.fromkeys(OTHER.values(), 0.0) | {OTHER["optimizer"]: 0.5, OTHER["fixed"]: 0.01}
    other |= {OTHER["stragglers"]: 0.01, OTHER["gradient accumulation"]: 0.1}
    step_s = compute_s + sum(exposed.values()) + sum(other.values())
    return Estimate(
        model="m", cluster="4xcpu", engine="autopar", profile="cpu", precision="fp32", num_devices=4,
        num_parameters=1000, sequence=64, global_batch=4, degrees=DEGREES, step_s=step_s,
        step_interval_s=(0.0, 9.0), peak_interval_bytes=(0.0, 2.0), tokens_per_s=1.0,
        tokens_per_s_per_device=1.0, tflops_per_device=1.0, mfu=0.1, hfu=0.1,
        compute_s=dict.fromkeys(COMPUTE.values(), compute_s / len(COMPUTE)),
        collectives=tuple(
            CollectiveSeconds(mesh_dim=dim, what="", exposed_s=s, hidden_s=0.0) for dim, s in exposed.items()
        ),
        other_s=other, peak_bytes=1.0, device_bytes=2.0, chance_of_fitting=1.0,
        fits=True, memory_bytes=dict.fromkeys(MEMORY.values(), 0.0),
        scaling_efficiency=1.0, least_devices=2, run=None, formula_only=(), assumptions=(),
    )  # fmt: skip


def trace(parts: Mapping[str, float], **about: Any) -> dict[str, Any]:
    """Tracks of one rank, one after the other, in seconds."""
    events, at = [], 0.0
    for track, seconds in parts.items():
        events.append({"ph": "X", "pid": 0, "cat": track, "name": track, "ts": at, "dur": seconds * 1e6, "args": {}})
        at += seconds * 1e6
    return {"traceEvents": events, "otherData": {"world_size": 4, "degrees": DEGREES, "parameters": 1000} | about}


def test_terms_add_up_to_the_step_without_its_optimizer() -> None:
    made = estimate()
    found = predicted_parts(made)
    assert found == pytest.approx({"compute": 1.1, "tp": 0.3, "dp": 0.2, "idle": 0.01, "other": 0.01})
    assert sum(found.values()) == pytest.approx(made.step_s - 0.5)


def test_the_term_that_is_off_is_named_with_its_remedy() -> None:
    measured = {"compute": 1.1, "tp0": 0.4, "tp1": 0.5, "dp_shard": 0.15, "dp_replicate": 0.05, "all ranks": 0.01}
    found = compare_trace(estimate(), trace(measured), band=0.1)
    terms = {term.name: term.measured_s for term in found.terms}
    assert terms == pytest.approx({"compute": 1.1, "tp": 0.9, "dp": 0.2, "idle": 0.0, "other": 0.01})
    assert [term.name for term in found.outside] == ["tp"]
    assert sentence(found) == (
        "off the most is tp: predicted 300 ms, measured 900 ms (-67%): "
        "measure its links with `autopar calibrate` on as many ranks"
    )
    right = compare_trace(estimate(), trace({"compute": 1.1, "tp": 0.3, "dp": 0.2}), band=0.1)
    assert sentence(right) == "no term is off by more than 10% and a hundredth of the step"


def test_collectives_on_one_track_are_one_term() -> None:
    found = compare_trace(estimate(), trace({"compute": 1.1, "collectives": 0.4, "dp": 0.1}), band=0.1)
    terms = {term.name: (term.predicted_s, term.measured_s) for term in found.terms}
    assert terms["collectives"] == pytest.approx((0.5, 0.5)) and not {"tp", "dp"} & terms.keys()


@pytest.mark.parametrize(
    ("about", "field"),
    [
        ({"world_size": 8}, "ranks"),
        ({"sequence": 128}, "tokens"),
        ({"parameters": 999}, "parameters"),
        ({"degrees": {**DEGREES, "zero": 1}}, "zero"),
        ({"degrees": {**DEGREES, "micro_batch": 4}}, "micro_batch"),
    ],
)
def test_a_trace_of_another_plan_is_refused(about: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match="not of the plan that was estimated") as caught:
        compare_trace(estimate(), trace({"compute": 1.0}, **about), band=0.1)
    assert [problem.path for problem in caught.value.problems] == [field]


def test_everything_that_differs_is_told_and_what_changes_nothing_is_not() -> None:
    other = trace({"compute": 1.0}, world_size=2, degrees={**DEGREES, "tp": 1, "schedule": "gpipe"})
    with pytest.raises(InputError) as caught:
        compare_trace(estimate(), other, band=0.1)
    assert [problem.path for problem in caught.value.problems] == ["ranks", "tp"]  # no pipeline: any schedule will do
    silent = {**trace({"compute": 1.0}), "otherData": None}  # of an older version
    assert compare_trace(estimate(), silent, band=0.1).terms


@pytest.mark.parametrize("name", ["compute", "idle", "point-to-point", "other", "tp", "dp", "collectives"])
def test_every_term_has_a_remedy(name: str) -> None:
    assert remedy(compared_terms({name: 1.0}, {name: 2.0}).terms[0])


def test_tiers_follow_the_ranks() -> None:
    cluster = replace(ClusterSpec.preset("16xh100"))
    degrees = {"pp": 2, "tp": 4, "dp_shard": 2, "dp_replicate": 1}
    assert tiers_of(cluster, degrees) == {
        "tp": "in_host", "dp": "in_host", "point-to-point": "inter_host", "collectives": "in_host",
    }  # fmt: skip
    assert tiers_of(cluster, {"pp": 1, "tp": 8, "dp_shard": 2, "dp_replicate": 1})["dp"] == "inter_host"


def test_a_corrected_profile_has_the_links_of_the_tier_scaled() -> None:
    found = compare_trace(estimate(), trace({"compute": 1.1, "tp": 0.3, "dp": 0.8}), band=0.1)
    profile = device_profile("cpu")
    new = corrected(profile, found, tiers={"tp": "in_host", "dp": "inter_host"})
    assert new.links["in_host"] == profile.links["in_host"]
    assert new.links["inter_host"].usual.efficiency == pytest.approx(profile.links["inter_host"].usual.efficiency / 4)
