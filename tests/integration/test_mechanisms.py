"""Mechanisms of other people's models on gloo ranks: loss and gradients of the unmodified module on the whole batch."""

from pathlib import Path
from typing import Any

import pytest
from suites import long

from autopar.commands.verify import verify
from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
ACCUMULATED, PIPELINE = {"dp": 2, "accumulate": 2}, {"pp": 2, "micro_batches": 2}
SPLIT = {"tp": 2, "accumulate": 2}
MICRO_BATCHES = [
    long("padded_on_the_right", PIPELINE),
    ("padded_on_the_left", ACCUMULATED),
    long("packed_positions", PIPELINE),
    long("packed_positions", ACCUMULATED),
    long("padded_on_the_right", ACCUMULATED),
    long("padded_on_the_left", PIPELINE),
    long("packed_positions", SPLIT),
    long("last_token_of_each_row", ACCUMULATED),
    long("last_token_of_each_row", PIPELINE),
    ("tokens_by_row_and_number", PIPELINE),
    long("tokens_by_row_and_number", SPLIT),
    long("best_tokens_of_each_row", PIPELINE),
]


@pytest.mark.parametrize(("name", "wish"), MICRO_BATCHES, ids=str)
def test_rows_by_their_own_number_in_micro_batches(name: str, wish: dict[str, Any], two_ranks: Ranks) -> None:
    assert max(two_ranks.run("mechanism_ranks:worst_error", 2, name, wish)) < TOLERANCE


ZERO = [long({"dp": 2, "zero": n, "accumulate": 2}) for n in (1, 2)] + [{"dp": 2, "zero": 3}]


@pytest.mark.parametrize("wish", ZERO, ids=str)
@pytest.mark.parametrize("name", ["weights_of_two_dtypes", "a_block_of_two_dtypes_that_runs_twice"])
def test_weights_of_several_dtypes_are_sharded(name: str, wish: dict[str, Any], two_ranks: Ranks) -> None:
    assert max(two_ranks.run("mechanism_ranks:worst_error", 2, name, wish)) < 1e-5  # most weights are float32


@pytest.mark.parametrize("wish", [*ZERO, {"tp": 2}], ids=str)
def test_a_complex_weight_is_sharded(wish: dict[str, Any], two_ranks: Ranks) -> None:
    assert max(two_ranks.run("mechanism_ranks:worst_error", 2, "a_complex_weight", wish)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "wish"),
    [("a_complex_weight", {"tp": 2}), ("noise_in_evaluation", {"tp": 2}), ("noise_in_evaluation", ACCUMULATED)],
)
def test_steps_of_adam_and_outputs(name: str, wish: dict[str, Any], two_ranks: Ranks) -> None:
    report = verify(f"mechanism_models:{name}", world_size=2, degrees=wish, ranks=two_ranks)
    assert report.passed, report


@pytest.mark.parametrize("wish", [{"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_buffer_may_have_the_name_of_a_method(wish: dict[str, Any], two_ranks: Ranks) -> None:
    assert max(two_ranks.run("mechanism_ranks:worst_error", 2, "names_of_methods", wish)) < TOLERANCE


@pytest.mark.parametrize(
    "wishes",
    [[{"tp": 2}, {"dp": 2, "zero": 3}], [{"dp": 2, "zero": 1}, {"tp": 2}], long([{"dp": 2}, {"dp": 2, "zero": 2}])],
    ids=str,
)
def test_a_complex_weight_under_adamw_and_in_a_checkpoint(
    wishes: list[dict[str, Any]], two_ranks: Ranks, tmp_path: Path
) -> None:
    """On another split after the checkpoint. Infinite imaginary parts are not saved."""
    asked = ("a_complex_weight", wishes, str(tmp_path))
    assert max(two_ranks.run("mechanism_ranks:resumed_error", 2, *asked)) < TOLERANCE


def test_padding_by_name(two_ranks: Ranks) -> None:
    assert max(two_ranks.run("mechanism_ranks:worst_error", 2, "padding_by_name", {"tp": 2})) < TOLERANCE


BUFFERS = [
    long("spectral_norm", {"tp": 2}),
    long("spectral_norm", {"dp": 2, "zero": 3, "accumulate": 2}),
    long("spectral_norm", {"pp": 2, "micro_batches": 2}),
    long("spectral_norm_by_a_hook", {"dp": 2, "zero": 1, "recompute": "full"}),
    ("a_scale_that_grows", {"tp": 2, "accumulate": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(("name", "wish"), BUFFERS, ids=str)
def test_a_buffer_that_a_step_changes_and_its_backward_pass_reads(
    name: str, wish: dict[str, Any], two_ranks: Ranks
) -> None:
    """Micro-batches of one step read the value before the step, as the whole batch does."""
    assert max(two_ranks.run("mechanism_ranks:worst_error", 2, name, wish)) < TOLERANCE
