"""Training loops with averages, schedules, adapters, several models, generation, and checkpoints of torch."""

from typing import Any

import pytest
from more_loop_ranks import BY_ELEMENT, SCHEDULERS
from suites import long, thinned

from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
ZERO_3: dict[str, Any] = {"tp": 2, "dp": 2, "zero": 3}
ZERO_1: dict[str, Any] = {"tp": 2, "dp": 2, "zero": 1}
PLANS = (ZERO_3, long(ZERO_1), long({"dp": 4, "zero": 0}), long({"tp": 4}))


@pytest.mark.parametrize("name", [long("compiled"), "checkpointed", long("adapted"), long("grouped")])
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_models_with_their_authors_wrappers(wish: dict[str, Any], name: str, four_ranks: Ranks) -> None:
    assert max(four_ranks.run("more_loop_ranks:trained", wish, 4, name)) < TOLERANCE


@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_sequences_of_several_lengths(wish: dict[str, Any], four_ranks: Ranks) -> None:
    assert max(four_ranks.run("more_loop_ranks:of_lengths", wish, 4)) < TOLERANCE


@pytest.mark.parametrize("name", ["plain", long("grouped")])
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_averages_of_weights(wish: dict[str, Any], name: str, four_ranks: Ranks) -> None:
    assert max(four_ranks.run("more_loop_ranks:averaged", wish, 4, name)) < TOLERANCE


def test_an_average_that_would_mix_parameters_is_refused(four_ranks: Ranks) -> None:
    for message in four_ranks.run("more_loop_ranks:average_in_another_order", ZERO_3, 4):
        assert "pass use_buffers=True" in message


@pytest.mark.parametrize("name", thinned(SCHEDULERS, keep=("plateau",)))
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_schedules_of_the_learning_rate(wish: dict[str, Any], name: str, four_ranks: Ranks) -> None:
    assert max(four_ranks.run("more_loop_ranks:scheduled", wish, 4, name)) < TOLERANCE


@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_several_models_in_one_job(wish: dict[str, Any], four_ranks: Ranks) -> None:
    """A generator with its judge, and a student that learns from a teacher without gradients."""
    assert max(four_ranks.run("more_loop_ranks:of_two_models", wish, 4)) < TOLERANCE


@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_generation_between_steps(wish: dict[str, Any], four_ranks: Ranks) -> None:
    assert all(four_ranks.run("more_loop_ranks:generated", wish, 4))


@pytest.mark.parametrize("name", thinned(BY_ELEMENT, keep=("single",)))
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_optimizers_of_single_elements_on_parts(wish: dict[str, Any], name: str, four_ranks: Ranks) -> None:
    assert max(four_ranks.run("more_loop_ranks:by_element", wish, 4, name)) < TOLERANCE


@pytest.mark.parametrize("name", ["plain", long("grouped")])
@pytest.mark.parametrize(
    ("wish", "other"), [(ZERO_3, {"tp": 4}), long(ZERO_1, {"dp": 4, "zero": 3}), long({"tp": 4}, ZERO_1)], ids=str
)
def test_torch_saves_and_loads_under_another_plan(
    wish: dict[str, Any], other: dict[str, Any], name: str, four_ranks: Ranks
) -> None:
    assert max(four_ranks.run("more_loop_ranks:saved", wish, 4, name, other)) < TOLERANCE


@pytest.mark.parametrize("name", ["plain", long("grouped")])
@pytest.mark.parametrize("wish", [*PLANS, long({"pp": 2, "tp": 2})], ids=str)
def test_weights_are_loaded_by_name(wish: dict[str, Any], name: str, four_ranks: Ranks) -> None:
    if name == "grouped" and wish.get("pp"):
        pytest.skip("the model has one block")
    for worst, messages in four_ranks.run("more_loop_ranks:loaded", wish, 4, name):
        assert worst == 0.0
        expected = ["missing ['head.weight", "unknown ['other']", "has shape (7, 9)"]
        assert len(messages) == 3
        assert all(one in message for one, message in zip(expected[1:], messages[1:], strict=True)), messages


@pytest.mark.parametrize("name", [long("plain"), "grouped"])
@pytest.mark.parametrize(
    "wish",
    [
        long({"dp": 4, "zero": 0}),
        {"tp": 2, "dp": 2, "zero": 3},
        long({"dp": 4, "zero": 1}),
        long({"tp": 2, "dp": 2, "zero": 0}),
        long({"tp": 4}),
    ],
    ids=str,
)
def test_terms_on_parameters(wish: dict[str, Any], name: str, four_ranks: Ranks) -> None:
    for found in four_ranks.run("more_loop_ranks:with_terms", wish, 4, name):
        assert {name: worst for name, worst in found.items() if not worst < TOLERANCE} == {}


def test_terms_on_parameters_of_a_stage(four_ranks: Ranks) -> None:
    """Each stage adds the terms of its own parameters behind the step."""
    for found in four_ranks.run("more_loop_ranks:with_terms", {"pp": 2, "tp": 2, "micro_batches": 2}, 4, "plain"):
        assert {name: worst for name, worst in found.items() if not worst < TOLERANCE} == {}


def test_a_term_beside_gradients_that_wait_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run("more_loop_ranks:with_terms_in_no_sync", {"dp": 2, "zero": 0}, 2):
        assert "leave out parallel.no_sync()" in message
