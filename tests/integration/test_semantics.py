"""docs/semantics.md line by line: the tests of each numbered statement, and tests that no other file has."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_models import Wanted, built, planned
from suites import long

from autopar.commands.verify import verify
from autopar.ir.degrees import Degrees
from autopar.lowering.randomness import dropout
from autopar.runtime.codegen.randomness import RandomStream
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.distributed.mesh import MeshDim
from autopar.runtime.verify.error_metrics import (
    NOISE_FACTOR,
    TOLERANCES,
    error,
    measured_one,
    measured_weights,
    size_of_zero,
)
from autopar.runtime.verify.random_batches import random_batches
from autopar.runtime.verify.verify import split_micro_batches, this_ranks_part

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "semantics.md"
HELD_BY = {
    "S1": (
        "../runtime/verify/test_random_batches.py::test_a_model_that_halves_its_batch_is_noted",
        "test_verify.py::test_tensor_parallel",
        "test_verify.py::test_tensor_and_data_parallel",
        "test_verify.py::test_data_parallel",
        "test_verify.py::test_accumulation_of_three_micro_batches",
        "test_verify.py::test_replicated_shards",
        "test_parallelize.py::test_losses_equal_the_single_device",
    ),
    "S2": (
        "test_verify.py::test_tensor_and_data_parallel",
        "test_semantics.py::test_ranks_and_micro_batches_have_different_numbers_of_targets",
    ),
    "S3": ("test_semantics.py::test_gradients_add_over_calls",),
    "S4": (
        "test_odd_models.py::test_samples_that_depend_on_each_other",
        "test_buffers.py::test_batch_norm_over_ranks",
        "test_buffers.py::test_accumulation_is_refused",
        "test_per_micro_batch.py::test_equal_to_one_device_that_does_the_same",
        "test_per_micro_batch.py::test_a_loss_that_could_be_summed",
    ),
    "S5": (
        "test_data.py::test_three_steps_of_two_optimizer_groups",
        "test_data.py::test_short_batches_without_a_mask",
        "test_data.py::test_the_mask_is_found_on_the_graph",
        "test_data.py::test_ranks_that_do_not_agree",
        "test_faults.py::test_unfit_batches_are_refused_on_all_ranks",
    ),
    "S6": (
        "test_odd_models.py::test_three_ranks",
        "test_odd_models.py::test_two_by_two",
        "test_odd_models.py::test_rows_that_the_ranks_do_not_divide",
        "test_data.py::test_three_steps_of_two_optimizer_groups",
        "test_data.py::test_tied_parameters_without_tensor_parallelism",
        "test_data.py::test_tied_parameters_with_tensor_parallelism",
    ),
    "S7": ("test_computed_whole.py::test_heads_that_no_degree_divides", "test_faults.py::test_bad_wishes"),
    "S8": ("test_semantics.py::test_error_measure",),
    "S9": ("test_semantics.py::test_weights_by_reach", "test_semantics.py::test_a_rolled_tensor_fails"),
    "S10": (
        "test_verify.py::test_tensor_parallel",
        "test_verify.py::test_single_precision",
        "test_odd_models.py::test_half_precision",
    ),
    "S11": (
        "test_training_loops.py::test_ranks_that_hold_the_same_elements_draw_alike",
        "test_semantics.py::test_random_streams",
        "test_data.py::test_recomputation_draws_the_same_numbers",
        "test_semantics.py::test_both_sides_draw_the_same_numbers",
        "test_odd_models.py::test_two_by_two",
    ),
    "S12": ("test_zero_table.py::test_calls_and_elements",),
    "S13": ("test_semantics.py::test_deferred_sums_happen_once_a_step",),
    "S14": ("test_block_collectives.py::test_generated_block", "test_block_collectives.py::test_profiled_step"),
    "S15": (
        "test_checkpoint.py::test_what_is_saved",
        "test_checkpoint.py::test_loads_bit_equal_and_goes_on",
        "test_checkpoint.py::test_loads_on_one_device",
        "test_buffers.py::test_batch_norm_over_ranks",
        "test_buffers.py::test_a_loss_outside_and_the_state",
        "test_packed_projections.py::test_state_has_the_models_names",
        "test_packed_projections.py::test_loads_bit_equal_and_goes_on",
        "test_packed_projections.py::test_loads_on_one_device",
    ),
    "S16": (
        "test_parallelize.py::test_losses_equal_the_single_device",
        "test_initial_weights.py::test_the_weights_of_rank_0_count",
    ),
    "S17": ("test_faults.py::test_plan_of_something_else",),
    "S18": ("test_faults.py::test_a_failing_rank_ends_all", "test_faults.py::test_a_failing_rank_ends_torchrun"),
    "S19": (
        "test_data.py::test_ranks_that_do_not_agree",
        "test_training_loops.py::test_weights_that_differ_are_found_after_the_first_step",
    ),
    "S20": ("test_data.py::test_as_many_batches_as_every_rank_has",),
    "S21": (
        "test_data.py::test_other_lengths_and_numbers_of_sequences",
        "test_data.py::test_each_shape_is_captured_once_and_announced",
        "test_data.py::test_old_shapes_are_forgotten",
        "test_data.py::test_ranks_that_do_not_agree",
    ),
    "S22": (
        "../runtime/model/test_original_model.py::test_a_model_in_evaluation_mode_trains_as_it_is",
        "../runtime/model/test_original_model.py::test_a_frozen_part_in_evaluation_mode_stays_so",
        "test_data.py::test_eval_mode_is_that_of_the_unmodified_model",
        "test_modes.py::test_batch_norm_uses_what_training_recorded",
        "test_modes.py::test_shards_of_unequal_parts_and_of_two_mesh_dimensions",
    ),
    "S23": (
        "test_pipelines.py::test_schedules",
        "test_pipelines.py::test_with_other_dimensions",
        "test_pipelines.py::test_all_dimensions_together",
        "test_pipelines.py::test_other_models_on_four_stages",
        "test_pipelines.py::test_batches_and_parameters_of_every_kind",
        "test_pipelines.py::test_other_shapes_and_eval_mode",
    ),
    "S24": (
        "test_pipelines.py::test_schedules",
        "test_pipelines.py::test_batches_and_parameters_of_every_kind",
        "test_plan_pairs.py::test_gpt2",
    ),
    "S25": (
        "test_pipelines.py::test_with_other_dimensions",
        "test_pipelines.py::test_recomputation_draws_the_same_numbers",
    ),
    "S26": ("test_pipeline_faults.py::test_first_cause_and_stage_are_named",),
    "S27": (
        "test_indices.py::test_a_split_vocabulary_refuses_what_one_device_refuses",
        "test_indices.py::test_the_bad_batch_of_one_rank_is_refused_by_all",
        "test_indices.py::test_stages_that_do_not_read_an_input_refuse_it_too",
        "test_indices.py::test_other_shapes_and_modes",
        "test_indices.py::test_what_a_mask_hides_may_be_anything",
        "test_indices.py::test_indices_that_are_computed",
        "test_indices.py::test_rows_that_only_fill_a_batch_are_not_compared",
    ),
    "S28": (
        "test_decisions.py::test_a_new_decision_is_captured_and_a_known_one_runs",
        "test_decisions.py::test_padding_on_one_rank_is_padding_of_the_batch",
        "test_decisions.py::test_a_number_is_compared_with_the_whole_batch",
        "test_decisions.py::test_micro_batches_decide_together",
        "test_decisions.py::test_micro_batches_must_decide_alike_if_no_extreme_joins_them",
        "test_decisions.py::test_a_check_raises_its_own_error_on_all_ranks",
    ),
    "S29": (
        "../capture/export/test_data_reads.py::test_activations_are_captured_without_overflow",
        "../capture/export/test_data_reads.py::test_values_that_may_be_infinite_without_overflow_are_refused",
    ),
    "S30": (
        "../runtime/model/test_original_model.py::test_a_change_is_named_at_the_next_step",
        "../runtime/model/test_original_model.py::test_what_no_capture_reads_may_change",
        "../capture/test_gradient_hooks.py::test_hooks_that_forward_sets_are_refused_with_their_line",
        "../capture/export/test_distributions.py::test_a_distribution_of_activations_is_captured",
        "../capture/export/test_distributions.py::test_checks_of_activations_that_a_model_asks_for_are_noted",
        "../capture/export/test_own_changes.py::test_the_mode_of_the_inputs_is_captured",
    ),
    "S31": (
        "test_loader.py::test_losses_of_a_run_under_several_plans_are_those_of_one_device",
        "test_loader.py::test_replicas_read_equal_data",
    ),
    "S32": (
        "test_precision.py::test_steps_are_within_the_bound",
        "test_precision.py::test_an_overflow_on_one_rank",
        "test_precision.py::test_an_overflow_in_one_ranks_shard",
        "test_precision.py::test_scalers_that_differ",
    ),
    "S33": (
        "test_offload.py::test_training_has_equal_bits",
        "test_offload.py::test_steps_in_the_backward_pass_have_equal_bits",
        "test_optimizer_state.py::test_state_in_files_has_equal_bits",
    ),
}


def test_every_statement_is_held_by_tests() -> None:
    statements = re.findall(r"^\*\*(S\d+)\.\*\*", DOCUMENT.read_text(), re.MULTILINE)
    assert statements == [f"S{i}" for i in range(1, len(statements) + 1)]
    assert statements == list(HELD_BY)
    for statement, tests in HELD_BY.items():
        assert tests, statement
        for test in tests:
            file, _, name = test.partition("::")
            functions = {n.name for n in ast.parse((HERE / file).read_text()).body if isinstance(n, ast.FunctionDef)}
            assert name in functions, (statement, test)


def test_the_documented_numbers_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\d.e-]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {name: float(value) for name, value in rows} == TOLERANCES
    assert f"the larger of the tolerance and {NOISE_FACTOR} × its noise" in DOCUMENT.read_text()


def test_ranks_and_micro_batches_have_different_numbers_of_targets() -> None:
    """The data of every verification: a mean of means would differ from the mean that is compared."""
    degrees = Degrees(dp_shard=2, micro_batch=2, accumulate=3)
    program, _ = built(Wanted(spec="gpt2", batch=6), degrees)
    batch = random_batches(program, degrees, 1, 0)[0]
    counts = [
        [int((piece["labels"] != -100).sum()) for piece in split_micro_batches(program, part, degrees.accumulate)]
        for part in (this_ranks_part(program, batch, degrees, rank) for rank in range(2))
    ]
    assert len({sum(rank) for rank in counts}) == 2
    assert len({sum(pieces) for pieces in zip(*counts, strict=True)}) > 1


@pytest.mark.parametrize("wish", (long({"zero": 0}), {"zero": 3}, long({"zero": 2, "accumulate": 2})), ids=str)
def test_gradients_add_over_calls(wish: dict[str, int], four_ranks: Ranks) -> None:
    wanted = Wanted(spec="llama3-8b", float64=True)
    _, plan = planned(wanted, 4, {"tp": 2, "dp": 2, "sequence_parallel": True, **wish})
    assert max(four_ranks.run("integration_ranks:repeated_calls", wanted, plan)) < 1e-12


def some(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_error_measure() -> None:
    reference, tolerance = some(0, 40, 30), TOLERANCES["float64"]
    assert error(reference * (1 + 1e-6), reference) == pytest.approx(1e-6, rel=1e-6)
    assert error(reference[:-1], reference) == float("inf")
    assert not error(reference * float("nan"), reference) <= tolerance
    nothing = reference * float("nan")
    assert error(nothing, nothing) == 0.0
    assert error(torch.ones(3) * 1e-20, torch.zeros(3)) == float("inf")


def test_noise_is_no_difference() -> None:
    """A tensor that rounding alone makes may differ by a multiple of its measured noise, and no further."""
    rounding, tolerance = 1e-17 * some(0, 40, 30), TOLERANCES["float64"]
    moved = [1e-17 * some(seed, 40, 30) for seed in (1, 2)]
    assert not measured_one(1e-17 * some(3, 40, 30), rounding, []).passes(tolerance)
    small = size_of_zero(rounding, float(some(4, 40, 30).norm()))
    assert measured_one(1e-17 * some(3, 40, 30), rounding, moved, small).passes(tolerance)
    assert not measured_one(3e-16 * some(3, 40, 30), rounding, moved, small).passes(tolerance)
    zero = torch.zeros_like(rounding)
    assert measured_one(moved[0], zero, moved[1:], small).passes(tolerance)
    assert not measured_one(moved[0] * 100, zero, moved[1:], small).passes(tolerance)
    assert not measured_one(None, zero, moved, small).passes(tolerance)


def test_noise_explains_no_large_error() -> None:
    """A tensor that is not zero in exact arithmetic cannot be judged if rounding moves it by much of its size."""
    reference, tolerance = some(0, 40, 30), TOLERANCES["float64"]
    zero = size_of_zero(reference, float(reference.norm()))

    def outcome(error: float, noise: float) -> str:
        found, moved = (reference + size * some(seed, 40, 30) for seed, size in ((1, error), (2, noise)))
        return measured_one(found, reference, [moved], zero).outcome(tolerance)

    assert [outcome(error, 0.005) for error in (0.01, 0.06)] == ["equal", "different"]
    assert [outcome(error, 1.0) for error in (0.05, 0.5, 20.0)] == ["equal", "cannot be judged", "different"]


def weights_passed(found: torch.Tensor, reference: torch.Tensor, gradient: torch.Tensor, reach: float) -> int | None:
    """The number of elements compared by reach, or None if the weights differ."""
    one, shift = {"w": reference}, {"w": gradient + 1e-16 * some(7, *gradient.shape)}
    errors, by_reach = measured_weights({"w": found}, one, [one], {"w": gradient}, [shift], reach)
    return by_reach if errors["w"].passes(TOLERANCES["float64"]) else None


def test_weights_by_reach() -> None:
    """Noise where the gradient is zero may move a weight by what the optimizer can reach, and no further."""
    reference, gradient = some(0, 40, 30), some(1, 40, 30)
    gradient[:, :5] = 0.0
    moved = reference.clone()
    moved[:, :5] += 1e-3
    assert weights_passed(moved, reference, gradient, 2e-3) == 200
    assert weights_passed(moved, reference, gradient, 5e-4) is None
    moved[:, 5] += 1e-3
    assert weights_passed(moved, reference, gradient, 2e-3) is None


@pytest.mark.parametrize("share", (0.0, 0.5, 1.0))
@pytest.mark.parametrize("dim", (0, 1))
def test_a_rolled_tensor_fails(dim: int, share: float) -> None:
    """However many of its gradients are zero: values differ by more than an optimizer can reach."""
    gradient = some(1, 40, 30)
    gradient[: int(40 * share)] = 0.0
    reference = some(0, 40, 30) * 0.02
    assert weights_passed(reference.roll(1, dim), reference, gradient, 6e-3) is None
    assert error(gradient.roll(1, dim), gradient) > TOLERANCES["bfloat16"] or share == 1.0


def stream(coordinates: dict[str, int], seed: int = 0) -> RandomStream:
    group: torch.distributed.ProcessGroup = None  # type: ignore[assignment]
    dims = [MeshDim(name, 2, group, at, 1) for name, at in coordinates.items()]
    return RandomStream(dims, seed, torch.device("cpu"))


def test_random_streams() -> None:
    def mask(coordinates: dict[str, int], step: int = 0, micro_batch: int = 0, seed: int = 0) -> torch.Tensor:
        drawing = stream(coordinates, seed)
        drawing.begin(step, micro_batch)
        return drawing.keep_mask(torch.empty(50, 20), 0.3)

    own = mask({"dp": 0})
    assert torch.equal(own, mask({"dp": 0}))  # whatever the coordinate on dimensions that do not split the value
    others = (mask({"dp": 1}), mask({"tp": 0}), mask({"dp": 0}, 1), mask({"dp": 0}, 0, 1), mask({"dp": 0}, seed=1))
    assert not any(torch.equal(own, other) for other in others)
    assert 0.6 < own.double().mean() < 0.8
    drawing, ones = stream({"dp": 0}), torch.ones(50, 20)
    drawing.begin(0, 0)
    assert set(dropout(ones, 0.5, drawing).unique().tolist()) == {0.0, 2.0}
    drawing.training = False
    assert torch.equal(dropout(ones, 0.5, drawing), ones)


@pytest.mark.parametrize(
    ("spec", "wish"),
    [
        ("drawing", {"tp": 2, "dp": 2, "zero": 3, "accumulate": 2}),
        long("drawing", {"pp": 2, "dp": 2, "accumulate": 2}),
        long("drawing", {"tp": 4, "recompute": "full"}),
        long("noisy", {"tp": 2, "dp": 2}),
    ],
    ids=str,
)
def test_both_sides_draw_the_same_numbers(spec: str, wish: dict[str, Any], four_ranks: Ranks) -> None:
    report = verify(f"integration_models:{spec}", world_size=4, degrees=wish, steps=2, ranks=four_ranks)
    assert report.passed, report.quantities
    assert any("both sides drew the same random numbers" in note for note in report.notes)


def test_deferred_sums_happen_once_a_step(two_ranks: Ranks) -> None:
    """Norm weights under sequence parallelism: one bucket, for one, two and three micro-batches."""
    calls, elements = [], []
    for n in (1, 2, 3):
        wanted = Wanted(spec="llama3-8b", batch=2 * n)
        _, plan = planned(wanted, 2, {"tp": 2, "sequence_parallel": True, "accumulate": n})
        found = two_ranks.run("integration_ranks:profiled_step", wanted, plan)[0]
        calls.append(found["all-reduce"][0])
        elements.append(found["all-reduce"][1])
    per_micro_batch = calls[2] - calls[1]
    assert calls[1] - calls[0] == per_micro_batch
    assert calls[0] - per_micro_batch == 1
    norms = (2 * wanted.layers + 1) * wanted.hidden
    assert elements[0] - (elements[2] - elements[1]) == norms
