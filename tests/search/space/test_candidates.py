"""The space: every legal candidate once, also under constraints."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from autopar.errors import InputError
from autopar.ir.schedules.registry import SCHEDULE_NAMES, schedule_problems
from autopar.planning.degrees import resolve_degrees
from autopar.search.space.candidates import Candidates, candidates
from autopar.search.space.dimensions import Constraints, divisors

COLUMNS = [each.name for each in fields(Candidates)]
CONSTRAINTS = Constraints(num_devices=24, global_batch=48, most_stages=10, tensor_degrees=(1, 2, 3, 4, 8))


def rows(found: Candidates) -> list[tuple[int, ...]]:
    names = COLUMNS
    return list(zip(*(getattr(found, name).tolist() for name in names), strict=True))


def test_everything_listed_is_legal_and_listed_once() -> None:
    found = candidates(CONSTRAINTS)
    assert len(set(rows(found))) == len(found) > 1000
    for i in range(0, len(found), 7):
        degrees = found.degrees(i)
        assert degrees.world_size == 24
        assert degrees.dp * (degrees.micro_batch or 0) * degrees.num_micro_batches == 48
        assert degrees.num_stages <= 10
        if degrees.pp > 1:
            assert not schedule_problems(degrees.schedule, degrees.pp, degrees.virtual_stages, degrees.micro_batches)
        wish: dict[str, Any] = {"pp": degrees.pp, "tp": degrees.tp, "dp_shard": degrees.dp_shard, "zero": degrees.zero}
        wish |= {"dp_replicate": degrees.dp_replicate, "micro_batch": degrees.micro_batch}
        staged = {"schedule": degrees.schedule, "virtual_stages": degrees.virtual_stages}
        counts = (
            {"micro_batches": degrees.micro_batches, **staged} if degrees.pp > 1 else {"accumulate": degrees.accumulate}
        )
        assert resolve_degrees({**wish, **counts}, 24, global_batch=48) == degrees


def test_degrees_that_are_no_powers_of_two() -> None:
    found = candidates(CONSTRAINTS)
    assert {3, 6} <= set(found.pp.tolist())
    assert 3 in found.tp
    assert set(found.dp.tolist()) >= {1, 2, 3, 4, 6, 8, 12, 24}


def test_what_runs_the_same_is_one_candidate() -> None:
    found = candidates(CONSTRAINTS)
    alone = found.dp == 1
    assert set(found.zero[alone].tolist()) == {0}
    assert set(found.dp_replicate[found.zero == 0].tolist()) == {1}
    assert set(found.dp_shard[(found.zero > 0)].tolist()).isdisjoint({1})
    assert set(found.schedule[found.pp == 1].tolist()) == {SCHEDULE_NAMES.index("1f1b")}


def test_ranks_of_pipelines_lie_together_where_that_keeps_them_in_a_host() -> None:
    constraints = replace(CONSTRAINTS, devices_per_host=4)
    found = candidates(constraints)
    inside = found.at(found.order == 1)
    listed = set(zip(inside.tp.tolist(), inside.pp.tolist(), strict=True))
    assert listed == {(1, 2), (1, 4), (2, 2)}
    default = found.at(found.order == 0)
    assert rows(default) == rows(candidates(CONSTRAINTS))  # one host, for all that is known
    fixed = candidates(constraints.narrowed({"order": "dp-pp-tp"}))
    assert len(fixed) and np.all((fixed.order == 1) & (fixed.pp > 1) & (fixed.dp > 1))
    assert set(rows(inside)) < set(rows(fixed))
    assert not np.any(candidates(replace(constraints, devices_per_host=24)).order)
    assert found.degrees(int(np.flatnonzero(found.order)[0])).order == "dp-pp-tp"


def test_wishes_narrow_the_space() -> None:
    every = candidates(CONSTRAINTS)
    found = candidates(CONSTRAINTS.narrowed(fix={"tp": 2, "zero": (1, 3)}, forbid={"schedule": "gpipe", "pp": (3, 6)}))
    assert set(found.tp.tolist()) == {2}
    assert set(found.zero.tolist()) == {1, 3}
    assert set(rows(found)) == {
        row
        for row, degrees in ((row, dict(zip(COLUMNS, row, strict=True))) for row in rows(every))
        if degrees["tp"] == 2
        and degrees["zero"] in (1, 3)
        and degrees["pp"] not in (3, 6)
        and SCHEDULE_NAMES[degrees["schedule"]] != "gpipe"
    }


def test_wishes_that_are_none_are_refused_all_at_once() -> None:
    with pytest.raises(InputError) as caught:
        CONSTRAINTS.narrowed(fix={"tpp": 8, "zero": 4, "pp": True}, forbid={"schedule": "1f2b"})
    text = str(caught.value)
    with pytest.raises(InputError, match="forbid order: must be one of pp-dp-tp, dp-pp-tp"):
        CONSTRAINTS.narrowed(forbid={"order": "dp"})
    for part in ("fix tpp", "tp", "fix zero", "0, 1, 2 or 3", "fix pp", "forbid schedule", "1f2b", "interleaved-1f1b"):
        assert part in text


def test_a_batch_that_cannot_be_split_in_time() -> None:
    constraints = Constraints(num_devices=8, global_batch=16, most_stages=4, tensor_degrees=(1, 2), accumulates=False)
    assert set(candidates(constraints).micro_batches.tolist()) == {1}


@pytest.mark.parametrize("singly", (True, False))
def test_micro_batches_of_one_sequence(singly: bool) -> None:
    constraints = Constraints(
        num_devices=2, global_batch=4, most_stages=4, tensor_degrees=(1, 2), accumulates_singly=singly
    )
    found = candidates(constraints)
    assert bool(np.any((found.micro_batch * found.dp == 1) & (found.micro_batches > 1))) is singly


def test_no_legal_candidate() -> None:
    constraints = Constraints(num_devices=8, global_batch=3, most_stages=1, tensor_degrees=(1,))
    assert len(candidates(constraints)) == 0


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


def test_data_parallel_ranks_divide_the_batch() -> None:
    found = candidates(Constraints(num_devices=6, global_batch=9, most_stages=6, tensor_degrees=(1, 2, 3, 6)))
    assert set(found.dp) == {1, 3}
