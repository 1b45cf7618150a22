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
from suites import long, thinned

from autopar.commands.verify import verify
from autopar.errors import PlanError
from autopar.runtime.distributed.launch import Ranks

OVERFLOWS = (1, 4)


@pytest.mark.parametrize(
    ("degrees", "kind"),
    [
        ({"dp": 2, "tp": 2, "zero": 3}, "torch"),
        long({"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2}, "torch"),
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
        long({"dp": 2, "tp": 2, "zero": 3}),
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
        long("scale", "rank 1 passed a scaler with other settings than ranks 0, 2, 3; here init_scale"),
        ("missing", "rank 1 passed no scaler, or a disabled one, and ranks 0, 2, 3 passed a scaler"),
        long("disabled", "rank 1 passed no scaler, or a disabled one, and ranks 0, 2, 3 passed a scaler"),
        long("interval", "rank 1 passed a scaler with other settings than ranks 0, 2, 3"),
        ("another class", "rank 1 passed a scaler with other settings than ranks 0, 2, 3; here "),
        long("loaded", "rank 1 passed a scaler with other settings than ranks 0, 2, 3"),
        long("set", "rank 1 passed a scaler with other settings than ranks 0, 2, 3"),
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


PLANS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "dp 2, ZeRO 0": {"dp": 2, "zero": 0, "accumulate": 2},
    "dp 2, ZeRO 1": {"dp": 2, "zero": 1, "accumulate": 2},
    "dp 2, ZeRO 2": {"dp": 2, "zero": 2, "accumulate": 2},
    "tp 2 x dp 2, ZeRO 3": {"tp": 2, "dp": 2, "zero": 3},
    "pp 2 x dp 2, ZeRO 2": {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2},
    "reduce_dtype": {"dp": 2, "tp": 2, "zero": 2, "reduce_dtype": "bf16"},
}
OF_TABLE = [plan for plan in PLANS if plan != "reduce_dtype"]
GRID = [
    *[
        (model, dtype, p)
        for model in ("llama3-8b", "gpt2", "mixtral-8x7b")
        for dtype in ("bf16", "fp16")
        for p in OF_TABLE
    ],
    *[("t5-large", "bf16", plan) for plan in OF_TABLE],
    ("llama3-8b", "bf16", "reduce_dtype"),
    ("llama3-8b", "fp32", "dp 2, ZeRO 2"),
]
SHORT = [
    ("llama3-8b", "bf16", "tp 2 x dp 2, ZeRO 3"),
    ("gpt2", "fp16", "pp 2 x dp 2, ZeRO 2"),
]


@pytest.mark.parametrize(("model", "precision", "plan"), thinned(GRID, keep=SHORT), ids=str)
def test_steps_are_within_the_bound(model: str, precision: str, plan: str, worlds: Callable[[int], Ranks]) -> None:
    """The table of docs/precision.md: 2 layers, 32 tokens in each micro-batch of a data-parallel rank."""
    degrees = {**PLANS[plan], "precision": precision}
    count = degrees.get("micro_batches", 1) * degrees.get("accumulate", 1)
    size = math.prod(degrees.get(name, 1) for name in ("tp", "dp", "pp"))
    report = verify(
        model, world_size=size, degrees=degrees, layers=2, hidden=64, seq_len=16, batch=2 * count, steps=3,
        ranks=worlds(size),
    )  # fmt: skip
    assert report.passed, [(q.name, q.max_error, q.limit, q.where) for q in report.quantities]
    assert f"precision: {precision}" in report.plan.explain()


@pytest.mark.parametrize("seed", [long(0), long(1), long(2), long(3)])
@pytest.mark.parametrize(
    "degrees", thinned([{"tp": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "dp": 2, "zero": 3}], keep=[{"tp": 2}]), ids=str
)
def test_t5_in_float16(degrees: dict[str, Any], seed: int, worlds: Callable[[int], Ranks]) -> None:
    """With 1,024 tokens: rounding flips the sign of single inputs of ReLU, which a few tokens do not average out."""
    size = math.prod(degrees.get(name, 1) for name in ("tp", "dp"))
    report = verify(
        "t5-large", world_size=size, degrees={**degrees, "precision": "fp16"}, layers=2, hidden=64, seq_len=64,
        batch=16, steps=3, seed=seed, ranks=worlds(size),
    )  # fmt: skip
    assert report.passed, [(q.name, q.max_error, q.limit, q.where) for q in report.quantities]


@pytest.mark.parametrize("seed", [long(0), long(1), long(2), long(3)])
def test_t5_without_relu_in_float16(seed: int, tmp_path: Path, worlds: Callable[[int], Ranks]) -> None:
    """With a smooth activation 32 tokens are enough, and gradients are as near to float32 as those of Llama."""
    config = {"model_type": "t5", "d_model": 64, "d_kv": 64, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2}
    config |= {"num_heads": 1, "vocab_size": 512, "feed_forward_proj": "gelu", "decoder_start_token_id": 0}
    config |= {"architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    report = verify(
        str(tmp_path / "config.json"), world_size=2, degrees={"tp": 2, "precision": "fp16"}, seq_len=16, batch=2,
        steps=3, seed=seed, ranks=worlds(2),
    )  # fmt: skip
    assert report.passed, [(q.name, q.max_error, q.limit, q.where) for q in report.quantities]
    assert next(q for q in report.quantities if q.name == "gradients").max_error < 0.005


def test_t5_in_float16_is_not_cut_into_micro_batches(worlds: Callable[[int], Ranks]) -> None:
    """It clamps activations if any sample is infinite: in float16 alone its samples depend on each other."""
    given: dict[str, Any] = {"layers": 2, "hidden": 64, "seq_len": 16, "batch": 4, "ranks": worlds(2)}
    degrees = {"dp": 2, "accumulate": 2, "precision": "fp16"}
    with pytest.raises(PlanError, match=r"aten.any.default.*needs all samples at once.*--per-micro-batch"):
        verify("t5-large", world_size=2, degrees=degrees, **given)


@pytest.mark.long
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 1}], ids=str)
def test_t5_in_float16_does_not_overflow(degrees: dict[str, Any], worlds: Callable[[int], Ranks]) -> None:
    """20 steps from torch's first scale of 65,536, none of them skipped."""
    for skipped, scale, losses in worlds(degrees.get("tp", 1)).run("precision_ranks:steps_of_t5", degrees):
        assert (skipped, scale) == (0, 65536.0)
        assert losses[-1] < losses[0]
