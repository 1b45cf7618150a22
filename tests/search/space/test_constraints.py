"""Constraints of every kind: the search keeps them, and finds the best of the remaining plans."""

from typing import Any

import pytest
from searched_models import BATCH, model, small, tokens

from autopar.capture.any_size import Capture, capture
from autopar.capture.request import Request
from autopar.cost_model.interval import usable_bytes
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.planning.captured_search import search_captured
from autopar.planning.labels import LABELLED_DP
from autopar.planning.options import PlanOptions
from autopar.search.result.result import SearchResult

ROOMY = small(80e9)


@pytest.fixture(scope="module")
def captured() -> Capture:
    return capture(Request.of(model(), tokens()), LABELLED_DP)


def searched(captured: Capture, cluster: ClusterSpec = ROOMY, **fix: Any) -> SearchResult:
    asked = PlanOptions(global_batch=BATCH, fix=fix, trials=0)
    return search_captured(captured, cluster, asked, name="model", on_progress=lambda _: None)


def test_recomputation_that_is_asked_for(captured: Capture) -> None:
    one = searched(captured, pp=2, tp=1, virtual_stages=1, recompute="full", recompute_blocks=1)
    whole = searched(captured, pp=2, tp=1, virtual_stages=1, recompute="full")
    least = searched(captured, pp=2, tp=1, virtual_stages=1)
    assert one.plan is not None and whole.plan is not None and least.plan is not None
    assert (one.plan.degrees.recompute, one.plan.degrees.recompute_blocks) == ("full", 1)
    assert (whole.plan.degrees.recompute, whole.plan.degrees.recompute_blocks) == ("full", None)
    assert least.plan.degrees.recompute == "none"
    steps = [found.best.step_s for found in (least, one, whole) if found.best is not None]
    assert steps == sorted(steps)
    assert steps[0] < steps[2]
    assert all(found.is_proven for found in (one, whole))


def test_recomputation_of_every_stage_that_is_asked_for(captured: Capture) -> None:
    uneven = searched(captured, tp=1, recompute="full", recompute_blocks=(1, 0))
    assert uneven.plan is not None and uneven.best is not None
    degrees = uneven.plan.degrees
    assert (degrees.recompute_blocks, degrees.pp * degrees.virtual_stages) == ((1, 0), 2)
    even = searched(captured, tp=1, recompute="full", recompute_blocks="1,1")
    assert even.best is not None
    assert uneven.best.step_s < even.best.step_s
    with pytest.raises(PlanError, match="cut_at 2 and recompute_blocks 3"):
        searched(captured, cut_at="model.layers.1", recompute="full", recompute_blocks=(1, 0, 0))


def test_what_fits_only_with_recomputation_does_not_fit_without(captured: Capture) -> None:
    alone: dict[str, Any] = {"tp": 1, "pp": 1, "dp_shard": 4, "zero": 3, "micro_batch": 4}
    roomy = searched(captured, **alone)
    assert roomy.best is not None
    assert roomy.details is not None
    tight = small((roomy.best.peak_bytes - roomy.details.ranks[0].bytes["activations"] / 4) / usable_bytes(1.0))
    free = searched(captured, tight, **alone)
    assert free.best is not None
    assert free.best.degrees["recompute"] == "selective"
    full = searched(captured, tight, **alone, recompute="full")
    assert full.best is not None and full.best.step_s > free.best.step_s
    kept = searched(captured, tight, **alone, recompute="none", offload="none")
    assert kept.best is None
    moved = searched(captured, tight, **alone, recompute="none")
    assert moved.best is not None
    assert moved.best.degrees["offload"] != "none"


def test_cuts_that_are_asked_for(captured: Capture) -> None:
    free = searched(captured, pp=2, virtual_stages=1)
    uneven = searched(captured, cut_at="model.layers.1")
    assert free.best is not None and uneven.best is not None and uneven.plan is not None
    assert uneven.plan.degrees.num_stages == 2
    assert uneven.plan.degrees.cut_at == ("model.layers.1",)
    assert uneven.best.degrees["cuts"] == list(uneven.plan.cuts)
    assert free.best.degrees["cuts"] != uneven.best.degrees["cuts"]
    with pytest.raises(PlanError, match=r"model\.layers\.9"):
        searched(captured, cut_at="model.layers.9")


def test_sequence_parallelism_that_is_asked_for(captured: Capture) -> None:
    found = {wanted: searched(captured, tp=4, sequence_parallel=wanted) for wanted in (True, False)}
    for wanted, one in found.items():
        assert one.plan is not None
        assert one.plan.degrees.sequence_parallel is wanted
        leaves = [str(t) for block in one.plan.blocks for types in block.results.values() for t in types]
        assert ("S(1)" in " ".join(leaves)) is wanted, leaves


def test_one_value_of_each() -> None:
    with pytest.raises(InputError, match="recompute"):
        PlanOptions(global_batch=1, fix={"recompute": "some"}).narrowing()
    with pytest.raises(InputError, match="recompute_blocks"):
        PlanOptions(global_batch=1, fix={"recompute_blocks": (1, -2)}).narrowing()
    with pytest.raises(InputError, match="forbid cut_at"):
        PlanOptions(global_batch=1, forbid={"cut_at": "a"}).narrowing()
