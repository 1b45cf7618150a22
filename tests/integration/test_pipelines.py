"""Pipelines over gloo ranks against one device, float64: schedules, ties, all dimensions together, any data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_models import tokens
from integration_models import Wanted, planned
from suites import long

from autopar.commands.verify import Report, verify
from autopar.ir.schedules.action import peak_in_flight
from autopar.ir.schedules.registry import actions
from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
Worlds = Callable[[int], Ranks]
WANTED = Wanted(spec="gpt2", layers=4)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble", "dualpipev")


def verified(spec: str, worlds: Worlds, batch: int, *, layers: int = 4, **wish: Any) -> Report:
    size = wish["pp"] * wish.get("tp", 1) * wish.get("dp", 1) * wish.get("dp_replicate", 1)
    report = verify(
        spec, world_size=size, degrees=wish, layers=layers, hidden=64, seq_len=16, batch=batch, ranks=worlds(size)
    )
    errors = {q.name: (q.max_error, q.where) for q in report.quantities}
    assert report.passed and max(q.scaled_error for q in report.quantities if "captured" not in q.name) < TOLERANCE, (
        errors
    )
    return report


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, worlds: Worlds) -> None:
    """Four stages on two ranks, or two; the table is tied to the logits and lies on both ranks, or twice on one."""
    report = verified("gpt2", worlds, 8, pp=2, schedule=schedule, micro_batches=4)
    stages = 1 + len(report.plan.cuts)
    assert stages == (2 if schedule in ("gpipe", "1f1b", "interleaved-zero-bubble") else 4)


@pytest.mark.parametrize(
    "wish",
    (
        long({"tp": 2, "sequence_parallel": True}),
        long({"dp": 2, "zero": 0}),
        long({"dp": 2, "zero": 1, "recompute": "full"}),
        long({"dp": 2, "zero": 2, "accumulate": 2, "micro_batches": 2}),
        long({"dp": 2, "zero": 3, "schedule": "interleaved-1f1b", "recompute": "full", "recompute_blocks": 1}),
        {"dp": 2, "zero": 2, "schedule": "zbv-zero-bubble", "accumulate": 2, "micro_batches": 2},
        {"dp": 2, "zero": 3, "schedule": "interleaved-1f1b", "recompute": "full", "recompute_blocks": (1, 0, 1, 0)},
        long({"tp": 2, "recompute": "full", "recompute_blocks": (2, 1)}),
        long({"dp": 2, "zero": 3, "schedule": "dualpipev", "recompute": "full"}),
        long({"tp": 2, "schedule": "interleaved-zero-bubble", "virtual_stages": 2}),
    ),
    ids=str,
)
def test_with_other_dimensions(wish: dict[str, Any], worlds: Worlds) -> None:
    verified("gpt2", worlds, 8, pp=2, **wish)


def test_all_dimensions_together(worlds: Worlds) -> None:
    wish = {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"}
    verified("llama3-8b", worlds, 4, layers=2, micro_batches=2, **wish)


@pytest.mark.parametrize(
    "wish",
    (
        {"tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"},
        long({"tp": 2, "zero": 1, "schedule": "interleaved-1f1b"}),
        long({"dp_replicate": 2, "zero": 2, "schedule": "zbv-zero-bubble"}),
        long({"pp": 4, "zero": 0}),
    ),
    ids=str,
)
def test_stages_inside_data_parallel_ranks(wish: dict[str, Any], worlds: Worlds) -> None:
    """The table is tied: the first and the last rank of a pipeline sum its gradient."""
    verified("gpt2", worlds, 4, **{"pp": 2, "dp": 2, "order": "dp-pp-tp", "micro_batches": 4} | wish)


def test_groups_hold_the_ranks_of_the_order(worlds: Worlds) -> None:
    def of_rank(rank: int, **degrees: Any) -> dict[str, Any]:
        found: dict[str, Any] = worlds(8).run("pipeline_ranks:groups_of_order", degrees)[rank]
        return found

    each = {"pp": 2, "dp": 2, "tp": 2}
    inside = {"tp": [6, 7], "pp": [4, 6], "ends": [4, 6], "dp": [2, 6], "dp_shard": [2, 6], "at": (1, 1, 0)}
    outside = {"tp": [6, 7], "pp": [2, 6], "ends": [2, 6], "dp": [4, 6], "dp_shard": [4, 6], "at": (1, 1, 0)}
    assert of_rank(6, **each, order="dp-pp-tp") == inside
    assert of_rank(6, **each, order="pp-dp-tp") == of_rank(6, **each) == outside
    found = of_rank(7, pp=4, dp=2, order="dp-pp-tp")
    assert (found["pp"], found["ends"], found["dp"]) == ([4, 5, 6, 7], [4, 7], [3, 7])
    found = of_rank(7, pp=4, dp=2)
    assert (found["pp"], found["ends"], found["dp"]) == ([1, 3, 5, 7], [1, 7], [6, 7])


@pytest.mark.parametrize("spec, layers", (("t5-large", 3), long("bert-large", 4), long("vit-l-16", 4)))
def test_other_models_on_four_stages(spec: str, layers: int, worlds: Worlds) -> None:
    """T5's encoder output goes to every layer of the decoder, its masks are made anew by every stage."""
    verified(spec, worlds, 4, layers=layers, pp=4, micro_batches=2)


@pytest.mark.parametrize("schedule", (long("interleaved-zero-bubble"), "zbv-zero-bubble", long("dualpipev")))
def test_backward_in_parts_where_layers_share_a_table(schedule: str, worlds: Worlds) -> None:
    """T5's relative positions are computed from a weight alone and added in every layer."""
    wish = {"pp": 2, "virtual_stages": 2, "micro_batches": 4, "schedule": schedule}
    verified("t5-large", worlds, 8, layers=3, **wish)


def test_experts_and_uneven_cuts(worlds: Worlds) -> None:
    """A balance loss looks at all samples at once, so micro-batches count by themselves."""
    wish = {"pp": 2, "micro_batches": 2, "per_micro_batch": True, "cut_at": "model.layers.2"}
    report = verified("mixtral-8x7b", worlds, 4, layers=3, **wish)
    assert report.plan.cuts == (3,)


FULL_SHORT_EMPTY = [((4, 4), 8), ((3, 1), 8), ((2, 0), 8)]


@pytest.mark.parametrize(
    "wish",
    (
        long({"pp": 2, "dp": 2, "zero": 3, "micro_batches": 2}),
        {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 4, "schedule": "zbv-zero-bubble"},
        long({"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2, "accumulate": 2, "schedule": "gpipe"}),
    ),
    ids=str,
)
@pytest.mark.parametrize("tied", (long(False), True))
def test_batches_and_parameters_of_every_kind(wish: dict[str, Any], tied: bool, four_ranks: Ranks) -> None:
    """A full batch, a padded one, one that is empty on some ranks; frozen, unused, scalar, empty and tied parameters;
    two optimizer groups."""
    wish = wish | ({"cut_at": "layers.0,layers.1,epilogue"} if wish.get("schedule") == "zbv-zero-bubble" else {})
    found = four_ranks.run("data_ranks:training_anyhow", 4, wish, FULL_SHORT_EMPTY, {"tied": tied})
    assert max(max(rank.values()) for rank in found) < TOLERANCE, found


@pytest.mark.parametrize(
    "wish",
    (
        {"cut_at": "layers.1"},
        long({}),
        {"cut_at": "layers.0,layers.1,epilogue", "schedule": "zbv-zero-bubble"},
    ),
    ids=str,
)
def test_stages_without_a_trained_parameter(wish: dict[str, Any], two_ranks: Ranks) -> None:
    """Tables and first layer are frozen: cut by hand, the first stages have nothing to train; else every stage has."""
    steps = [((4,), 8), ((3,), 8)]
    wish = {"pp": 2, "micro_batches": 2} | wish
    found = two_ranks.run("data_ranks:training_anyhow", 2, wish, steps, {"freezes_first": True})
    assert max(max(rank.values()) for rank in found) < TOLERANCE, found


def test_buffers_belong_to_the_stage_that_changes_them(two_ranks: Ranks) -> None:
    """Batch norm in two stages; evaluation uses what each has recorded."""
    for found in two_ranks.run("mode_ranks:with_batch_norm", 2, {"pp": 2, "micro_batches": 1}):
        assert max(found.values()) < TOLERANCE, found


def test_other_shapes_and_eval_mode(four_ranks: Ranks) -> None:
    """Captured again, the model is cut where its parameters are."""
    wish = {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 2}
    steps = [((4, 4), 8), ((4, 4), 12), ((2, 4), 4)]
    found = four_ranks.run("data_ranks:training_anyhow", 4, wish, steps, {})
    assert max(max(rank.values()) for rank in found) < TOLERANCE, found
    wish = wish | {"micro_batches": 1}
    found = four_ranks.run("data_ranks:evaluations_in_stages", 4, wish)
    assert max(max(rank.values()) for rank in found) < TOLERANCE, found
    for text in four_ranks.run("data_ranks:refused_evaluation", 4, wish):
        assert "'epilogue' of pipeline stage 1 takes 'temperature', which stage 0 holds" in text, text


@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "interleaved-1f1b", "zbv-zero-bubble"))
def test_memory_follows_the_schedule(schedule: str, two_ranks: Ranks) -> None:
    """Micro-batches whose activations a rank holds, counted while they run: as the list of actions says."""
    cuts = {} if schedule in ("gpipe", "1f1b") else {"cut_at": "layers.0,layers.1,epilogue"}
    wish = {"pp": 2, "micro_batches": 4, "schedule": schedule, **cuts}
    stages = 1 if not cuts else 2
    wanted = [peak_in_flight(order) for order in actions(schedule, 2, stages, 4)]
    assert two_ranks.run("pipeline_ranks:live_micro_batches", 2, wish, 8) == wanted


def test_no_rank_makes_parameters_of_other_stages(two_ranks: Ranks) -> None:
    _, plan = planned(WANTED, 2, {"pp": 2, "micro_batches": 2})
    (first, held_first), (second, held_second) = two_ranks.run("pipeline_ranks:asked_for", WANTED, plan)
    assert (first, second) == (held_first, held_second)
    assert first & second == {"transformer.wte.weight"}  # tied


@pytest.mark.parametrize("wish", (long({"pp": 2, "micro_batches": 2}), {"pp": 2, "schedule": "dualpipev"}), ids=str)
def test_weights_of_the_first_rank_count(wish: dict[str, Any], two_ranks: Ranks) -> None:
    """Ranks built other weights, and ask for other names."""
    wish = wish | ({"cut_at": "layers.0,layers.1,epilogue", "micro_batches": 4} if "schedule" in wish else {})
    expected = tokens(seed=0).state_dict()
    found = two_ranks.run("pipeline_ranks:weights_of_first_rank", 2, wish)
    assert {name for state in found for name in state} == expected.keys()
    assert all(torch.equal(value, expected[name]) for state in found for name, value in state.items())


def test_recomputation_draws_the_same_numbers(two_ranks: Ranks) -> None:
    """Dropout in stages, with and without recomputation, and without stages: one and the same gradients."""
    wishes: list[dict[str, Any]] = [
        {"pp": 2, "micro_batches": 2},
        {"pp": 2, "micro_batches": 2, "recompute": "full"},
        {"pp": 2, "micro_batches": 2, "schedule": "interleaved-zero-bubble", "recompute": "full"},
        {"pp": 2, "micro_batches": 2, "recompute": "selective"},
        {"pp": 2, "micro_batches": 2, "schedule": "interleaved-zero-bubble", "recompute": "selective"},
    ]
    found = []
    for wish in wishes:
        parts = two_ranks.run("pipeline_ranks:with_dropout", 2, wish, 4)
        found.append({name: gradient for part in parts for name, gradient in part.items()})
    (alone,) = worlds_of_one(wishes[0])
    for gradients in found:
        assert gradients.keys() == alone.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[name], rtol=1e-10, atol=1e-12)
    assert any(bool(gradient.abs().max() > 1e-3) for gradient in alone.values() if gradient.numel())


def worlds_of_one(wish: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    with Ranks(1, timeout_s=600) as world:
        return world.run("pipeline_ranks:with_dropout", 1, {"tp": 1, "accumulate": wish["micro_batches"]}, 4)
