"""Plans as values: they print, compare and round-trip, and every deviation in a file is one named error."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.plan import BlockLabels, Plan
from autopar.ir.rank_order import ORDERS
from autopar.ir.sharding import I, R, S


def a_plan(**changes: Any) -> Plan:
    block = BlockLabels(
        name="layers.0",
        signature="abc",
        ports={"x": (S(0), I), "weight": (R, S(0, 1))},
        labels={"mlp.up:linear:0": ("...0.0", "o.0")},
        results={"add_1": (S(0), I)},
    )
    values: dict[str, Any] = {
        "fingerprint": "f" * 64,
        "model": "tiny",
        "degrees": Degrees(tp=2, dp_shard=2, zero=1, micro_batch=4),
        "blocks": (block,),
        "batch": 8,
        "sequence": 16,
        "notes": ("a note",),
    }
    return Plan(**values | changes)


def test_round_trip(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    assert a_plan(batch=16) != plan


def test_a_plan_file_from_before_loss_chunks_is_read() -> None:
    data = json.loads(a_plan().to_json())
    del data["degrees"]["loss_chunks"]
    assert Plan.from_dict(data) == a_plan()
    chunked = a_plan(degrees=Degrees(loss_chunks=8))
    assert Plan.from_dict(json.loads(chunked.to_json())).degrees.loss_chunks == 8
    with pytest.raises(PlanError, match="loss_chunks"):
        degrees_from({"loss_chunks": 0})


def test_degrees() -> None:
    degrees = degrees_from({"tp": 2, "dp": 4, "zero": 2, "sequence_parallel": True, "micro_batch": None})
    assert (degrees.tp, degrees.dp_shard, degrees.dp, degrees.world_size) == (2, 4, 4, 8)
    assert degrees.mesh.as_dict() == {"dp": 4, "tp": 2}


@pytest.mark.parametrize("text", ["3,1, 0,0", [3, 1, 0, 0], (3, 1, 0, 0)])
def test_recomputed_blocks_of_every_stage(text: Any, tmp_path: Path) -> None:
    degrees = degrees_from({"pp": 4, "recompute": "full", "recompute_blocks": text})
    assert degrees.recompute_blocks == (3, 1, 0, 0)
    assert [degrees.full_blocks_of(stage) for stage in range(4)] == [3, 1, 0, 0]
    assert [degrees.selective_blocks_of(stage) for stage in range(4)] == [0, 0, 0, 0]
    plan = a_plan(degrees=degrees, cuts=(1, 2, 3))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["3", [3], 3])
def test_one_number_for_all_stages(text: Any) -> None:
    degrees = degrees_from({"pp": 2, "recompute": "full", "recompute_blocks": text})
    assert [degrees.full_blocks_of(stage) for stage in range(2)] == [3, 3]


def test_each_kind_of_recomputation_counts_its_own_blocks() -> None:
    every = {"none": (0, 0), "full": (None, 0), "selective": (0, None), "auto": (0, 0)}
    for kind, expected in every.items():
        degrees = degrees_from({"recompute": kind})
        assert (degrees.full_blocks_of(0), degrees.selective_blocks_of(0)) == expected, kind
    mixed = degrees_from({"pp": 2, "recompute": "auto", "recompute_blocks": "1,0", "selective_blocks": 2})
    assert [mixed.full_blocks_of(stage) for stage in range(2)] == [1, 0]
    assert [mixed.selective_blocks_of(stage) for stage in range(2)] == [2, 2]
    assert not mixed.is_recompute_open and degrees_from({"recompute": "auto"}).is_recompute_open


def test_a_plan_with_open_recomputation_is_refused() -> None:
    plan = a_plan(degrees=degrees_from({"recompute": "auto"}))
    with pytest.raises(PlanError, match="recompute_blocks or selective_blocks"):
        Plan.from_dict(plan.to_dict())


@pytest.mark.parametrize("order", ORDERS)
def test_coordinates_follow_the_order(order: str) -> None:
    """Names of the order are digits of a rank, the first the most significant."""
    degrees = degrees_from({"pp": 2, "dp_shard": 3, "dp_replicate": 2, "tp": 4, "order": order})
    sizes, names = {"pp": 2, "dp": 6, "tp": 4}, order.split("-")
    every = [tuple(degrees.coordinate(name, rank) for name in names) for rank in range(degrees.world_size)]
    assert every == list(product(*(range(sizes[name]) for name in names)))
    plan = a_plan(degrees=degrees, cuts=(1,))
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    assert ("rank order dp-pp-tp" in plan.explain()) == (order != ORDERS[0])


def test_plans_without_an_order_have_the_default() -> None:
    data = a_plan().to_dict()
    del data["degrees"]["order"]
    assert Plan.from_dict(data) == a_plan()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tq": 2}, "tp"),
        ({"tp": 0}, "at least 1"),
        ({"tp": -1}, "at least 1"),
        ({"tp": 2.0}, "whole number"),
        ({"tp": True}, "whole number"),
        ({"tp": "2"}, "whole number"),
        ({"tp": 10**7}, "at most"),
        ({"zero": 4}, "0, 1, 2 or 3"),
        ({"dp": 2, "dp_shard": 2}, "second time"),
        ({"sequence_parallel": 1}, "true, false or null"),
        ({"recompute_blocks": 0}, "at least 1"),
        ({"recompute_blocks": [0]}, "at least 1"),
        ({"recompute_blocks": [1, -1]}, "one for every stage such as 3,2,1,0"),
        ({"recompute_blocks": "1,x"}, "one for every stage such as 3,2,1,0"),
        ({"recompute_blocks": [1, True]}, "one for every stage such as 3,2,1,0"),
        ({"recompute_blocks": 1.5}, "one for every stage such as 3,2,1,0"),
        ({"per_micro_batch": None}, "per_micro_batch: must be true or false"),
        ({"order": "tp-pp-dp"}, "order: must be one of pp-dp-tp, dp-pp-tp"),
        ([], "mapping"),
        (None, "mapping"),
    ],
)
def test_degrees_that_are_refused(data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        degrees_from(data)


def written(tmp_path: Path, change: Any) -> Path:
    data = a_plan().to_dict()
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("fingerprint"), "fingerprint"),
        (lambda d: d.update(version=99), "version"),
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d["degrees"].update(tp=0), "at least 1"),
        (lambda d: d["blocks"][0].update(extra=1), "extra"),
        (lambda d: d["blocks"][0].pop("labels"), "labels"),
        (lambda d: d["blocks"][0]["ports"].update(x=["S(", "I"]), "SPMD type"),
        (lambda d: d.update(blocks=3), "plan"),
        (lambda d: d.update(batch=0), "batch: must be a whole number above 0"),
        (lambda d: d.update(cuts=[1]), "cuts: must be 0 whole numbers, one less than stages"),
        (lambda d: d.update(summary={}), "summary.blocks: is required"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.load(written(tmp_path, change))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00", "[" * 100_000, '{"version": 1, "version": 1}'])
def test_what_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan"):
        Plan.load(path)


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="autopar plan"):
        Plan.load(tmp_path / "none.json")
