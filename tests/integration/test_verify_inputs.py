"""`verify` of models whose inputs are nested, are no tensors or decide branches, and whose loss is outside."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from suites import long, thinned

from autopar.commands.verify import verify
from autopar.errors import CaptureError, InputError, RankError
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.verify.verify import Report

TP, ZERO, PIPELINE = {"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "micro_batches": 1}
STRUCTURES = (
    "nested_in_a_tuple", "dataclass", "flags", "flags_in_a_tuple", "several_losses", "kept_loss", "three_arguments",
    "three_in_a_tuple", "whole_batch", "nested_target", "compiled",
)  # fmt: skip


def verified(name: str, ranks: Ranks, wish: dict[str, Any] | None = None, **options: Any) -> Report:
    report = verify(
        f"input_factories:{name}", world_size=ranks.world_size, degrees=wish, steps=2, ranks=ranks, **options
    )
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]
    assert "captured gradients" in {q.name for q in report.quantities}
    return report


@pytest.mark.parametrize("wish", (TP, long(ZERO), PIPELINE), ids=str)
def test_nested_inputs_constants_and_several_losses(wish: dict[str, Any], two_ranks: Ranks) -> None:
    verified("everything", two_ranks, wish)


@pytest.mark.parametrize("name", thinned(STRUCTURES, keep=STRUCTURES[::3]))
def test_every_structure(name: str, two_ranks: Ranks) -> None:
    verified(name, two_ranks, TP)


@pytest.mark.parametrize("wish", (TP, long(ZERO), PIPELINE), ids=str)
def test_a_branch_that_the_example_inputs_take(wish: dict[str, Any], two_ranks: Ranks) -> None:
    report = verified("padded", two_ranks, wish, specialise=True)
    assert any("the input 'padding' has the values of the example inputs" in note for note in report.notes)


@pytest.mark.parametrize("wish", (long(ZERO), {"dp": 1, "pp": 2, "micro_batches": 2}), ids=str)
def test_a_number_that_the_example_inputs_decide(wish: dict[str, Any], two_ranks: Ranks) -> None:
    """Random lengths would decide otherwise in every step, and a micro-batch alone decides otherwise than its step."""
    verified("lengths", two_ranks, wish, specialise=True)


@pytest.mark.parametrize("name", ("padded_with_output", "whole_with_output"))
def test_outputs_are_compared_where_every_micro_batch_takes_the_branch_alone(name: str, two_ranks: Ranks) -> None:
    report = verified(name, two_ranks, {"dp": 1, "tp": 2, "accumulate": 2}, specialise=True)
    is_said = any(note.startswith("outputs were not compared") for note in report.notes)
    assert is_said == (name == "padded_with_output")
    outputs = next(q for q in report.quantities if q.name == "outputs")
    assert (outputs.where == "embedded") != is_said, outputs


def test_without_the_option_a_branch_is_refused(two_ranks: Ranks) -> None:
    with pytest.raises(CaptureError, match=r"models.py:\d+: `if padding.any\(\):` reads True.*specialise=True"):
        verify("input_factories:padded", world_size=2, degrees=TP, ranks=two_ranks)


def test_a_micro_batch_that_decides_otherwise_is_an_error(two_ranks: Ranks) -> None:
    """The first of two micro-batches has no padding."""
    wish = {"dp": 1, "tp": 2, "accumulate": 2, "per_micro_batch": True}
    found = r"`if padding.any\(\):` read True of .*now read False.* or use micro_batches × accumulate = 1"
    with pytest.raises(RankError, match=found):
        verify("input_factories:padded", world_size=2, degrees=wish, ranks=two_ranks, specialise=True)


def test_a_plan_file_takes_the_same_branch_everywhere(
    tmp_path: Path, two_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search captures two rows, which have no padding. `verify` and `parallelize` capture more."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cli"))
    from input_factories import padded
    from run import autopar as command

    assert str(Path(__file__).parent / "ranks") in sys.path
    path = tmp_path / "plan.json"
    made = command("plan", "input_factories:padded", "-c", "2xcpu", "--tp", "2", "--specialise", "--out", str(path))
    assert made.exit_code == 0, made.stderr
    report = verified("padded", two_ranks, plan=path, specialise=True)
    assert report.plan.degrees.tp == 2
    model, batch = padded()
    rows = report.plan.degrees.local_batch
    own = {name: torch.cat([value] * (rows // len(value))) for name, value in batch.items()}
    losses = two_ranks.run("decision_ranks:loss_under_plan", str(path), own)
    assert losses[0] == losses[1] and abs(losses[0] - float(model(**own).detach())) < 1e-6


def test_a_model_whose_copy_would_fail(two_ranks: Ranks) -> None:
    """A function that it keeps holds the model itself."""
    verified("holding", two_ranks, TP)


def test_example_inputs_that_the_model_refuses(two_ranks: Ranks) -> None:
    with pytest.raises(InputError, match="the model fails on one device: RuntimeError: all elements of target should"):
        verify("input_factories:without_probabilities", world_size=2, degrees=TP, ranks=two_ranks)
