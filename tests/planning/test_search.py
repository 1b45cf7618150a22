"""`autopar.plan`, from a module to a plan that runs, and its result if no plan fits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from searched_models import BATCH, LAYERS, model, small, tokens
from torch import nn

import autopar
from autopar.capture.request import Request
from autopar.cost_model.interval import usable_bytes
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for, check_plan, label_plan
from autopar.search.result.result import SearchResult


def searched(cluster: Any = "8xh100", **options: Any) -> SearchResult:
    return autopar.plan(model(), cluster, example_inputs=tokens(), global_batch=BATCH, **options)


def test_a_float32_plan_is_priced_as_it_runs_and_that_is_said() -> None:
    fix = {"tp": 2, "pp": 1, "dp_shard": 4, "zero": 3, "micro_batch": 4}
    in_fp32 = {"fix": fix | {"precision": "fp32"}}
    found = autopar.plan(model().float(), "8xh100", example_inputs=tokens(), global_batch=BATCH, **in_fp32)
    assert found.precision == "fp32" and any("float32" in one and "TF32" in one for one in found.assumptions)
    usual = searched(fix=fix)
    assert usual.precision == "bf16" and not any("the model is" in one for one in usual.assumptions)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return searched(fix={"pp": (1, 2)}, forbid={"zero": 0})


def test_the_plan_is_what_was_priced(found: SearchResult) -> None:
    assert found.plan is not None
    assert found.best is not None
    degrees = found.plan.degrees
    assert degrees.world_size == 8
    assert degrees.dp * (degrees.micro_batch or 0) * degrees.num_micro_batches == BATCH
    assert degrees.pp in (1, 2)
    program = capture_for(Request.of(model(), tokens()), degrees)
    check_plan(found.plan, program, 8)
    estimate = autopar.estimate(program, "8xh100", found.plan)
    assert estimate.step_s == pytest.approx(found.best.step_s, rel=0.02)
    predicted = found.plan.predicted
    assert predicted is not None
    for name in ("step_s", "step_interval_s", "tokens_per_s", "mfu", "peak_bytes", "peak_interval_bytes"):
        assert getattr(predicted, name) == pytest.approx(getattr(estimate, name)), name
    assert (predicted.step_s, predicted.step_interval_s) == (found.best.step_s, found.step_interval_s)
    assert replace(found.plan, predicted=None) == found.plan  # what was predicted does not tell plans apart


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "needs one label per mesh dimension": lambda block: block["labels"].popitem(),
    r"zzz:9: the block has no such value": lambda block: block["labels"].update({"zzz:9": ["I"]}),
    r"no variant 'q9\.7'": lambda block: block["labels"].update({next(iter(block["labels"])): ["q9.7"] * 2}),
    "needs one type per mesh dimension": lambda block: block["ports"].popitem(),
    r"has no axis S\(9\)": lambda block: block["ports"].update({next(iter(block["ports"])): ["I", "S(9)"]}),
    "a value between blocks is partial": lambda block: block["results"].update(
        {next(iter(block["results"])): ["I", "P"]}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_labels_that_do_not_belong_to_the_model_are_refused(message: str) -> None:
    wish = {"tp": 2, "dp_shard": 2}
    program = autopar.capture_program(model(), tokens(), batch=BATCH)
    plan = label_plan(program, ClusterSpec.preset("4xh100"), resolve_degrees(wish, 4), "")
    data = plan.to_dict()
    WRONG[message](data["blocks"][2])
    with pytest.raises(PlanError, match=message):
        check_plan(Plan.from_dict(data), program, 4)


def test_others_are_slower_and_say_why(found: SearchResult) -> None:
    assert found.best is not None
    assert found.is_proven
    assert found.gap == 0
    assert found.others
    for one in (*found.others, *found.baselines):
        assert one.step_s >= found.best.step_s
        assert one.reason or one.slower == 0
    assert {one.name for one in found.baselines} >= {"FSDP", "tensor parallelism in hosts + FSDP"}


def test_parts_add_up(found: SearchResult) -> None:
    assert found.best is not None
    assert sum(found.best.parts.values()) == pytest.approx(found.best.step_s)


def test_json(found: SearchResult) -> None:
    data = json.loads(json.dumps(found.to_dict()))
    assert data["best"]["degrees"]["pp"] in (1, 2)
    assert data["plan"]["degrees"]["zero"] != 0
    assert data["counted"]["candidates"] > 50


def test_the_same_search_gives_the_same_plan(found: SearchResult) -> None:
    again = searched(fix={"pp": (1, 2)}, forbid={"zero": 0})
    assert again.plan is not None
    assert found.plan is not None
    assert again.plan.to_json() == found.plan.to_json()


def test_words_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="tpp"):
        searched(fix={"tpp": 2})
    with pytest.raises(InputError, match="global_batch"):
        autopar.plan(model(), "8xh100", example_inputs=tokens(), global_batch=0)


def test_where_nothing_fits_the_closest_plan_is_told() -> None:
    found = searched(small(1.001e9))
    assert found.plan is None
    assert found.best is None
    assert found.closest is not None
    assert found.closest.missing_bytes > 0
    assert found.closest.remedy
    counted = found.counted
    assert counted.no_room_for_state + counted.no_room_for_activations == counted.candidates > 0


def test_recomputation_only_where_memory_forces_it() -> None:
    fix = {"tp": 1, "pp": 1, "dp_shard": 4, "zero": 3, "micro_batch": 4}
    roomy = searched(small(80e9), fix=fix)
    assert roomy.best is not None
    assert roomy.best.degrees["recompute"] == "none" and "loss_chunks" not in roomy.best.degrees
    needed = roomy.best.peak_bytes
    tight = small((needed - 0.5e6) / usable_bytes(1.0))
    either = searched(tight, fix=fix).best
    in_chunks = searched(tight, fix=fix | {"recompute": "none"}).best
    full = searched(tight, fix=fix | {"loss_chunks": 1, "recompute": "full"}).best
    selective = searched(tight, fix=fix | {"loss_chunks": 1, "recompute": "selective"}).best
    some = searched(tight, fix=fix | {"loss_chunks": 1}).best
    assert either and in_chunks and full and selective and some
    assert in_chunks.degrees["loss_chunks"] > 1
    assert some.degrees["recompute"] != "none" and some.degrees["recompute_blocks"] < LAYERS
    ways = (in_chunks, full, selective, some)
    assert roomy.best.step_s < either.step_s == min(way.step_s for way in ways) < full.step_s
    assert all(way.peak_bytes < needed for way in ways)


def test_what_leaves_no_plan_is_an_error() -> None:
    with pytest.raises(PlanError, match="16 sequences over 8 devices as asked; dp 3 needs 3 devices, or a multiple"):
        searched(fix={"dp": 3})
    with pytest.raises(PlanError, match="tp 2 × dp 8 needs 16 devices, or a multiple"):
        searched(fix={"tp": 2, "dp": 8})
    with pytest.raises(PlanError, match="dp 8 needs a multiple of 8 sequences"):
        autopar.plan(model(), "8xh100", example_inputs=tokens(), global_batch=4, fix={"dp": 8})


def test_a_degree_that_does_not_divide_the_heads_is_planned_at_its_price() -> None:
    found = searched(ClusterSpec.preset("3xh100"), fix={"tp": 3})
    assert found.plan is not None
    assert any("because 3 does not divide 4 heads" in note for note in found.plan.notes)


def test_out_of_time_there_is_still_a_plan() -> None:
    found = searched(timeout_s=0.0)
    assert found.plan is not None
    assert found.best is not None
    shown = [one.value for one in (*found.others, *found.baselines) if one.fits]
    assert len(shown) > 3 and found.best.value <= min(shown)
    assert found.bound == 0.0 and not found.is_proven


class ByName(nn.Module):
    """Two layers of one width, with names and no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


@pytest.mark.parametrize(("narrow", "stages"), [({"fix": {"pp": (2, 4)}}, 2), ({"forbid": {"pp": 1}}, 2), ({}, 1)])
def test_a_model_without_numbers_has_stages_where_every_plan_has(narrow: Any, stages: int) -> None:
    inputs = {"x": torch.zeros(4, 8)}
    found = autopar.plan(ByName(), "2xcpu", example_inputs=inputs, global_batch=4, **narrow)
    assert found.plan is not None and found.plan.degrees.pp == stages
    check_plan(found.plan, capture_for(Request.of(ByName(), inputs), found.plan.degrees), 2)


def test_a_study_keeps_the_trials(tmp_path: Path) -> None:
    kept = tmp_path / "plan.log"
    narrow = {"pp": 2, "tp": 1, "micro_batch": 1}
    first = searched(fix=narrow, study=kept, trials=6)
    again = searched(fix=narrow, study=kept, trials=6)
    assert [one.params for one in again.trials] == [one.params for one in first.trials]
    assert {one.source for one in again.trials} == {"resumed"}
    assert first.plan is not None
    assert again.plan is not None
    assert again.plan.to_json() == first.plan.to_json()
    with pytest.raises(InputError, match=r"of another search(.|\n)*fix: the study was made with .*2.*; got"):
        searched(fix={"pp": 4}, study=kept)


def test_the_front_holds_what_nothing_beats(found: SearchResult) -> None:
    assert found.best is not None
    points = [(one.step_s, one.peak_bytes, one.num_devices) for one in found.front if one.is_exact]
    assert (found.best.step_s, found.best.peak_bytes, 8) in points
    for one in found.front:
        beats = [p for p in points if p != (one.step_s, one.peak_bytes, one.num_devices)]
        assert not any(s <= one.step_s and m <= one.peak_bytes for s, m, _ in beats)
    assert any(one.peak_bytes < found.best.peak_bytes for one in found.front)


def test_the_cheapest_plan_runs_on_the_devices_that_it_uses() -> None:
    whole = ClusterSpec.preset("16xh100")
    priced = replace(whole, groups=tuple(replace(one, price_usd_per_device_hour=3.6) for one in whole.groups))
    found = searched(priced, objective="cost", fix={"tp": 1, "pp": 1}, forbid={"zero": (1, 2)})
    assert found.plan is not None
    assert found.best is not None
    assert (found.objective, found.unit) == ("cost", "USD")
    assert found.best.num_devices == found.plan.degrees.world_size < 16
    assert found.best.value == pytest.approx(found.best.step_s * found.best.num_devices * 3.6 / 3600)
    assert all(one.value >= found.best.value and one.reason for one in found.others)
    assert len({one.num_devices for one in found.others}) > 1
    estimate = autopar.estimate(
        capture_for(Request.of(model(), tokens()), found.plan.degrees), f"{found.best.num_devices}xh100", found.plan
    )
    assert estimate.step_s == pytest.approx(found.best.step_s, rel=0.02)


def test_a_batch_of_every_rank() -> None:
    found = autopar.plan(model(), "4xh100", example_inputs=tokens(), local_batch=4, fix={"pp": 1, "zero": (0, 3)})
    assert found.plan is not None
    assert found.best is not None
    degrees = found.plan.degrees
    assert found.global_batch == 4 * degrees.dp
    assert found.unit == "s per sequence"
    assert found.best.value == pytest.approx(found.best.step_s / found.global_batch)
    with pytest.raises(InputError, match="give one of the two"):
        autopar.plan(model(), "4xh100", example_inputs=tokens(), local_batch=4, global_batch=8)
