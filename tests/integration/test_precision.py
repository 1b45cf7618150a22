"""Precision: fp16 with an overflow on one rank equals torch's scaler on one device, and steps are within the bound."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from precision_ranks import batches, single_steps
from suites import long

from autopar.commands.verify import verify
from autopar.runtime.distributed.launch import Ranks

pytestmark = pytest.mark.timeout(240)
OVERFLOWS = (1, 4)


@pytest.mark.parametrize(
    ("degrees", "kind"),
    [
        ({"dp": 2, "tp": 2, "zero": 3}, "torch"),
        ({"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2}, "torch"),
        long({"dp": 4, "zero": 0}, "autopar"),
        long({"dp": 2, "tp": 2, "zero": 0, "accumulate": 2}, "autopar"),
        long({"dp": 2, "tp": 2, "zero": 1}, "loop"),
        long({"pp": 4, "micro_batches": 4}, "autopar"),
    ],
)
def test_an_overflow_on_one_rank(degrees: dict[str, Any], kind: str, worlds: Callable[[int], Ranks]) -> None:
    """Step by step: the same scale, the same steps skipped, and weights that differ by the rounding of float16."""
    count = degrees.get("micro_batches", 1) * degrees.get("accumulate", 1)
    expected = single_steps(batches(OVERFLOWS), count)
    scales = [scale for scale, _ in expected]
    assert any(later < earlier for earlier, later in pairwise(scales))
    for found in worlds(4).run("precision_ranks:scaled_steps", degrees, OVERFLOWS, kind):
        assert scales == [scale for scale, _ in found]
        before: dict[str, torch.Tensor] = {}
        for step, ((_, own), (_, weights)) in enumerate(zip(expected, found, strict=True)):
            for name, value in weights.items():
                assert (value - own[name]).norm() <= 2e-2 * own[name].norm() + 2e-2, (step, name)
                if step in OVERFLOWS:
                    assert torch.equal(value, before[name]), (step, name)
            before = weights


def test_a_nan_names_parameter_and_ranks(worlds: Callable[[int], Ranks]) -> None:
    messages = set(worlds(4).run("precision_ranks:nonfinite_norm"))
    (message,) = messages
    assert "the gradient of 'first.weight' (module first) has NaN or infinite elements on ranks" in message


@pytest.mark.parametrize(
    ("model", "precision", "degrees"),
    [
        ("llama3-8b", "bf16", {"dp": 2, "tp": 2, "zero": 3}),
        ("gpt2", "fp16", {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2}),
        long("gpt2", "bf16", {"dp": 2, "tp": 2, "zero": 0, "accumulate": 2}),
        long("t5-large", "bf16", {"dp": 2, "tp": 2, "zero": 3}),
        long("mixtral-8x7b", "fp16", {"dp": 2, "tp": 2, "zero": 1}),
        long("llama3-8b", "bf16", {"dp": 2, "tp": 2, "zero": 2, "reduce_dtype": "bf16"}),
        long("llama3-8b", "fp32", {"dp": 2, "tp": 2, "zero": 2}),
    ],
)
def test_steps_are_within_the_bound(
    model: str, precision: str, degrees: dict[str, Any], worlds: Callable[[int], Ranks]
) -> None:
    count = degrees.get("micro_batches", 1) * degrees.get("accumulate", 1)
    report = verify(
        model, world_size=4, degrees={**degrees, "precision": precision}, layers=2, hidden=64, seq_len=16,
        batch=2 * count, steps=3, ranks=worlds(4),
    )  # fmt: skip
    assert report.passed, [(q.name, q.max_error, q.limit, q.where) for q in report.quantities]
    assert f"precision: {precision}" in report.plan.explain()
