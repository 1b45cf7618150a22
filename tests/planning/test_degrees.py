"""Degrees from a partial wish."""

from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.planning.degrees import nearest_divisors, nearest_multiples, resolve_degrees


@pytest.mark.parametrize(
    ("wish", "local_batch", "global_batch", "expected"),
    [
        (None, 8, None, (1, 4, 8, 1)),  # pure FSDP
        ({"tp": 2}, 8, None, (2, 2, 8, 1)),
        ({"tp": 4}, None, None, (4, 1, 2, 1)),
        ({"tp": 2, "micro_batch": 2}, 8, None, (2, 2, 2, 4)),
        ({"tp": 2, "accumulate": 2}, 8, None, (2, 2, 4, 2)),
        ({"tp": 2, "accumulate": 2}, None, 16, (2, 2, 4, 2)),
        ({"tp": 2, "micro_batch": 1}, None, 16, (2, 2, 1, 8)),
        ({"tp": 2, "micro_batch": 1, "accumulate": 3}, None, None, (2, 2, 1, 3)),
        ({"tp": 4, "micro_batch": 1}, None, 3, (4, 1, 1, 3)),  # single sequences over all ranks
    ],
)
def test_the_missing_one_is_derived(
    wish: Any, local_batch: int | None, global_batch: int | None, expected: tuple[int, ...]
) -> None:
    found = resolve_degrees(wish, 4, local_batch, global_batch=global_batch)
    assert expected == (found.tp, found.dp, found.micro_batch, found.accumulate)


@pytest.mark.parametrize(
    ("wish", "local_batch", "global_batch", "says"),
    [
        ({"tp": 3}, 8, None, ["tp: must divide the 4 ranks; got 3 (nearest: 2 or 4)"]),
        ({"tp": 8}, 8, None, ["tp: must divide the 4 ranks; got 8 (nearest: 4)"]),
        ({"tp": 2, "dp": 1}, 8, None, ["must be the number of ranks, 4 (use dp_shard 2)"]),
        ({"tp": 2, "accumulate": 3}, 8, None, ["accumulate: must divide the 8 sequences", "(nearest: 2 or 4)"]),
        ({"tp": 2, "micro_batch": 3}, 8, None, ["micro_batch: must divide the 8 sequences", "(nearest: 2 or 4)"]),
        ({"tp": 2, "micro_batch": 2, "accumulate": 2}, 8, None, ["use micro_batch 4"]),
        ({"tp": 2}, None, 9, ["global_batch: must be divisible by the 2", "(nearest: 8 or 10)"]),
        ({"tp": 2}, 4, 12, ["the example inputs have 4", "(use 8)"]),
        ({"pp": 4, "order": "dp-pp-tp"}, 8, None, ["order: needs pp and dp above 1; got 'dp-pp-tp' (leave it out"]),
        ({"dp": 4, "order": "dp-pp-tp"}, 8, None, ["order: needs pp and dp above 1"]),
        ({"tp": 3, "dp": 3, "accumulate": 5}, 8, None, ["tp: ", "dp_shard: ", "accumulate: "]),
        (
            {"pp": 2, "recompute": "full", "recompute_blocks": [1, 0, 0]},
            8,
            None,
            ["recompute_blocks: must be one number for all stages, or 2 numbers, one for each stage; got '1, 0, 0'"],
        ),
    ],
)
def test_violations_are_listed_with_the_nearest_legal_values(
    wish: Any, local_batch: int | None, global_batch: int | None, says: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        resolve_degrees(wish, 4, local_batch, global_batch=global_batch)
    assert all(words in str(caught.value) for words in says), str(caught.value)


def test_nearest() -> None:
    assert [nearest_divisors(12, value) for value in (1, 5, 12, 40)] == [[1], [4, 6], [12], [12]]
    assert [nearest_multiples(4, value) for value in (1, 5, 8)] == [[4], [4, 8], [8, 12]]
