"""`autopar.plan`, from a module to a plan that runs, and what it says where nothing fits."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.planning import capture_for, check_plan
from autopar.search.result import SearchResult

LAYERS, SEQUENCE, BATCH = 4, 64, 16


def model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        made: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    return made


def tokens(batch: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch, SEQUENCE, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def searched(cluster: Any = "8xh100", **options: Any) -> SearchResult:
    return autopar.plan(model(), cluster, example_inputs=tokens(), global_batch=BATCH, **options)


def small(memory_bytes: float) -> ClusterSpec:
    """Four devices with little memory."""
    spec = ClusterSpec.preset("4xh100")
    groups = tuple(replace(one, device=replace(one.device, memory_bytes=memory_bytes)) for one in spec.groups)
    return replace(spec, groups=groups)


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
    program = capture_for(model(), tokens(), degrees)
    check_plan(found.plan, program, 8)
    estimate = autopar.estimate(program, "8xh100", found.plan)
    assert estimate.step_s == pytest.approx(found.best.step_s, rel=0.02)


def test_others_are_slower_and_say_why(found: SearchResult) -> None:
    assert found.best is not None
    assert found.is_proven
    assert found.gap == 0
    assert found.others
    for one in (*found.others, *found.baselines):
        assert one.step_s >= found.best.step_s
        assert one.reason or one.slower == 0
    assert {one.name for one in found.baselines} >= {"FSDP", "tensor in host + FSDP"}


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
    roomy = searched(small(80e9), fix={"tp": 1, "pp": 1, "dp_shard": 4, "zero": 3, "micro_batch": 4})
    assert roomy.best is not None
    assert roomy.best.degrees["recompute"] == "none"
    needed = roomy.best.needed_bytes
    tight = searched(small((needed - 0.5e6) / 0.96), fix={"tp": 1, "pp": 1, "dp_shard": 4, "zero": 3, "micro_batch": 4})
    assert tight.best is not None
    assert tight.best.degrees["recompute"] == "full"
    assert tight.best.degrees["recompute_blocks"] < LAYERS
    assert tight.best.needed_bytes < needed


def test_what_leaves_no_plan_is_an_error() -> None:
    with pytest.raises(PlanError, match="16 sequences over 8 devices"):
        searched(fix={"dp": 3})
    with pytest.raises(PlanError, match="tensor degree 3"):
        searched(ClusterSpec.preset("3xh100"), fix={"tp": 3})


def test_out_of_time_there_is_still_a_plan() -> None:
    found = searched(fix={"tp": 1, "pp": 1}, timeout_s=0.0)
    assert found.plan is not None
    assert found.best is not None
