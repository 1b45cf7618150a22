"""Weights that only rank 0 has: every rank gets its parts, and no others."""

from pathlib import Path
from typing import Any

import pytest
from suites import long, thinned

from autopar.runtime.distributed.launch import Ranks

OWN, STATE, UNEQUAL, EQUAL = (
    "rank 0's model",
    "rank 0's state",
    "all models, unequal",
    "all states, one model",
)
ZERO, STAGES, COPIES = {"tp": 2, "dp": 2, "zero": 3}, {"pp": 2, "tp": 2}, {"tp": 2, "dp": 2, "zero": 0}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("kept", ZERO, OWN),
    ("kept", STAGES, STATE),
    ("kept", STAGES, UNEQUAL),
    ("kept", ZERO, EQUAL),
    ("phi3", STAGES, OWN),
    ("experts", {"dp": 4, "ep": 2, "zero": 1}, OWN),
    ("kept", {"dp": 4, "zero": 3}, STATE),
    ("kept", {"pp": 2, "dp": 2, "zero": 1, "order": "dp-pp-tp"}, OWN),
    ("kept", {"tp_dims": [2, 2]}, OWN),
    ("phi3", {"tp": 2, "dp": 2, "precision": "bf16"}, OWN),
    ("experts", {"dp": 2, "ep": 2, "tp": 2, "zero": 3}, UNEQUAL),
    ("phi3", {"pp": 2, "micro_batches": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "tp": 2}, UNEQUAL),
]


@pytest.mark.parametrize(("name", "wish", "who"), thinned(CASES, keep=CASES[:6:2]))
def test_the_weights_of_rank_0_count(name: str, wish: dict[str, Any], who: str, four_ranks: Ranks) -> None:
    """Every parameter and buffer is bit-equal, a step has the loss of one device, and the users' models stay."""
    results = four_ranks.run("weight_ranks:weights", 4, name, wish, who)
    tolerance = 2e-2 if "precision" in wish else 1e-5
    for found in results:
        assert found["wrong"] == found["changed"] == []
        loss, expected = found["loss"]
        assert loss == pytest.approx(expected, rel=tolerance)
    assert set().union(*(found["names"] for found in results)) == set(results[0]["expected"])


@pytest.mark.parametrize("wish", [COPIES, STAGES], ids=str)
def test_a_rank_receives_its_parts_alone(wish: dict[str, Any], four_ranks: Ranks) -> None:
    """In a pipeline these are the parts of its own stages. Each comes once."""
    for rank, found in enumerate(four_ranks.run("weight_ranks:weights", 4, "phi3", wish, OWN)):
        assert found["held"] < 0.6 * found["whole"]
        assert found["received"] == (found["held"] + found["buffers"] if rank else 0)


@pytest.mark.parametrize("plan", [long({"tp": 2, "dp": 2}), None], ids=str)
def test_rank_0_alone_captures(plan: dict[str, Any] | None, tmp_path: Path, four_ranks: Ranks) -> None:
    """At the next start it reads what it kept, also for another shape and for evaluation."""
    for captures in (2, 0):  # at two sizes, or not at all
        first, *others = four_ranks.run("weight_ranks:exports", 4, plan, str(tmp_path))
        assert first[0] == captures and [count > 0 for count in first] == [captures > 0] * 3, first
        assert others == [[0, 0, 0]] * 3


REFUSALS = {
    "another dtype": "InputError: rank 1 built another model than rank 0: 'scale' is bfloat16 []",
    "another tie": "InputError: rank 1 built another model than rank 0: 'head.weight' is float32 [24, 12] there, and",
    "another number": "InputError: rank 1 built another model than rank 0: attribute '0.scale' is 2.0 there",
    "not on rank 0": "InputError: ranks 1, 2, 3 of 4 hold weights, and rank 0 holds none",
    "a state that does not fit": "InputError: the state does not fit the model",
    "two values of one parameter": "InputError: embedding.weight and head.weight are one parameter",
    "a branch on a buffer": "CaptureError: ",
}


@pytest.mark.parametrize(("what", "expected"), REFUSALS.items())
def test_a_refusal_is_the_same_on_all_ranks(what: str, expected: str, four_ranks: Ranks) -> None:
    found = four_ranks.run("weight_ranks:refused", 4, what)
    assert len(set(found)) == 1
    assert found[0].startswith(expected), found[0]
