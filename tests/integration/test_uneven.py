"""Degrees that divide neither heads nor widths nor the vocabulary, and fewer key heads than ranks, on gloo ranks."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from integration_models import Wanted, built, planned
from integration_models import padded as padded_model
from suites import long

from autopar.commands.verify import verify
from autopar.ir.plan import Plan
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.verify.random_batches import random_batches


@pytest.mark.parametrize(
    ("spec", "wish"),
    (
        long("padded", {"tp": 4, "sequence_parallel": False}),
        ("padded", {"tp": 4, "sequence_parallel": True}),
        long("padded_by_two", {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True}),
        long("padded_by_two", {"tp": 2, "dp": 2, "zero": 1, "accumulate": 2}),
        long("padded_by_two", {"tp": 2, "dp_shard": 1, "dp_replicate": 2, "zero": 0}),
        long("grouped", {"tp": 4, "sequence_parallel": False}),
        long("grouped", {"tp": 4, "sequence_parallel": True}),
        ("grouped", {"tp_dims": [2, 2], "sequence_parallel": True}),
    ),
    ids=str,
)
def test_equal_to_one_device(spec: str, wish: dict[str, Any], four_ranks: Ranks) -> None:
    report = verify(f"integration_models:{spec}", world_size=4, degrees=wish, steps=2, ranks=four_ranks)
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]
    notes = " ".join(report.plan.notes)
    assert ("padding" in notes) == spec.startswith("padded"), notes
    assert (report.plan.degrees.tp_dims is not None) == (spec == "grouped")


@pytest.mark.long
def test_grouped_heads_with_zero(worlds: Any) -> None:
    wish = {"tp": 4, "dp": 2, "zero": 3}
    report = verify("integration_models:grouped", world_size=8, degrees=wish, steps=2, ranks=worlds(8))
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]


@pytest.mark.parametrize("spec", ("padded", long("grouped")))
def test_a_checkpoint_knows_nothing_of_it(spec: str, four_ranks: Ranks, tmp_path: Any) -> None:
    """Saved where parts are uneven, or split by two mesh dimensions; loaded under ZeRO-3 and on one device."""
    wanted = Wanted(spec=f"integration_models:{spec}", float64=True, as_it_is=True)
    plan: Plan = planned(wanted, 4, {"tp": 4})[1]
    data = random_batches(built(wanted, plan.degrees)[0], plan.degrees, 4, 0)
    _, saved = four_ranks.run("integration_ranks:train_and_save", wanted, plan, data, 2, str(tmp_path))[0]
    elsewhere: Plan = planned(wanted, 4, {"tp": 2, "dp": 2, "zero": 3})[1]
    other = random_batches(built(wanted, elsewhere.degrees)[0], elsewhere.degrees, 2, 0)
    _, found = four_ranks.run("integration_ranks:load_and_train", wanted, elsewhere, other, str(tmp_path))[0]
    for part, values in saved.items():
        for name, value in values.items():
            assert torch.equal(found[part][name], value), (part, name)
    if spec == "padded":
        plain = padded_model()[0].double().state_dict()
        dcp.load({"model": plain}, checkpoint_id=str(tmp_path))
        assert all(torch.equal(plain[name], value) for name, value in saved["model"].items())
