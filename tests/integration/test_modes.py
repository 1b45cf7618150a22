"""Eval mode and other shapes after training, where statistics are recorded and where parameters lie unevenly."""

from collections.abc import Callable
from typing import Any

import pytest
from suites import long

from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
CASTS = 1e-5  # these models cast to float32 in norms and rotary tables, on both sides


@pytest.mark.parametrize("wish", ({"dp": 2, "zero": 3}, {"tp": 2}), ids=str)
def test_batch_norm_uses_what_training_recorded(wish: dict[str, Any], two_ranks: Ranks) -> None:
    for found in two_ranks.run("mode_ranks:with_batch_norm", 2, wish):
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(
    ("spec", "wish"),
    (
        ("padded_by_two", {"tp": 2}),
        long("padded", {"tp": 4}),
        long("grouped", {"tp": 4}),
    ),
    ids=str,
)
def test_shards_of_unequal_parts_and_of_two_mesh_dimensions(
    spec: str, wish: dict[str, Any], worlds: Callable[[int], Ranks]
) -> None:
    for found in worlds(wish["tp"]).run("mode_ranks:other_layouts", wish["tp"], spec, wish):
        assert max(found.values()) < CASTS, found
