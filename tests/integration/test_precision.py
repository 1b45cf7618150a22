"""Precision: fp16 with an overflow on one rank equals torch's scaler on one device, and steps are within the bound."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
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


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "tp": 2, "zero": 3},
        {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2},
        long({"dp": 2, "tp": 2, "zero": 0}),
        long({"dp": 4, "zero": 1}),
    ],
)
def test_an_overflow_in_one_ranks_shard(degrees: dict[str, Any], worlds: Callable[[int], Ranks]) -> None:
    """No sum of gradients tells the other ranks. They skip the step too, and lower their scales."""
    for found in worlds(4).run("precision_ranks:overflow_in_a_shard", degrees):
        assert found == (128.0, True, True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scale", "rank 1 passed a scaler with other settings than ranks 0, 2, 3; here init_scale"),
        ("missing", "rank 1 passed no scaler, or a disabled one, and ranks 0, 2, 3 passed a scaler"),
        ("disabled", "rank 1 passed no scaler, or a disabled one, and ranks 0, 2, 3 passed a scaler"),
        ("interval", "rank 1 passed a scaler with other settings than ranks 0, 2, 3"),
        ("another class", "rank 1 passed a scaler with other settings than ranks 0, 2, 3; here "),
        ("loaded", "rank 1 passed a scaler with other settings than ranks 0, 2, 3"),
        ("set", "rank 1 passed a scaler with other settings than ranks 0, 2, 3"),
        ("loop", "ranks have scalers with other settings; rank "),
    ],
)
def test_scalers_that_differ(kind: str, message: str, worlds: Callable[[int], Ranks]) -> None:
    """One error on every rank before a hang. The ranks go on with equal scalers afterwards."""
    for found in worlds(4).run("precision_ranks:different_scalers", {"dp": 2, "tp": 2, "zero": 1}, kind):
        refusal, loss = found
        assert message in refusal
        assert math.isfinite(float(loss))


def test_scalers_that_differ_on_stages(worlds: Callable[[int], Ranks]) -> None:
    degrees = {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2}
    for refusal, _ in worlds(4).run("precision_ranks:different_scalers", degrees, "missing"):
        assert "passed no scaler" in refusal


def test_skipped_steps_are_logged(tmp_path: Path, worlds: Callable[[int], Ranks]) -> None:
    """The scaler of every rank says which steps were left out, and the run counts them."""
    skips = [step in OVERFLOWS for step in range(6)]
    for found in worlds(4).run("precision_ranks:logged_skips", str(tmp_path)):
        assert [False, *skips] == found
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert skips == [line.get("skipped", False) for line in lines if "loss" in line]


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
