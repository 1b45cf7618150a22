"""Counted memory in an estimate: of the fullest rank, under the labels of the estimate."""

from typing import Any

import pytest
import torch
from step_traffic import run_stages
from suites import thinned
from torch import nn

import autopar
from autopar.capture.request import Request
from autopar.cost_model.estimate import Estimate
from autopar.cost_model.parts import MEMORY
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.program import Program
from autopar.ir.schedules.registry import actions
from autopar.ir.trained import trained_from
from autopar.models.adapters import with_trained
from autopar.planning.degrees import resolve_degrees
from autopar.planning.exact_memory import WAITING
from autopar.planning.fixed import capture_for, label_plan
from autopar.runtime.dry_run.memory import memory_of
from autopar.runtime.dry_run.rank_view import rank_view

BATCH, STATE = 4, ("parameters", "gradients", "optimizer state")


@pytest.fixture(scope="module")
def program() -> Program:
    """A small Llama in float32, captured at four sequences over all data-parallel ranks."""
    return capture_for(Request.of(_llama(torch.float32), _tokens()), resolve_degrees({"micro_batch": BATCH}, 1))


def _llama(dtype: torch.dtype) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4}
    with torch.device("meta"):
        made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=8))
    return made.train().to(dtype)


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.empty(BATCH, 32, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def _wish(**wish: Any) -> dict[str, Any]:
    return {"micro_batch": BATCH // wish.get("dp", 1), **wish}


def _exact(program: Program, wish: dict[str, Any], cluster: str = "4xcpu", **options: Any) -> Estimate:
    return autopar.estimate(program, cluster, wish, exact_memory=True, **options)


PLANS = (
    _wish(tp=4),
    _wish(tp=2, dp=2, zero=0),
    _wish(tp=2, dp=2, zero=1, accumulate=2),
    _wish(dp=4, zero=3, accumulate=2, recompute="full"),
    _wish(pp=2, tp=2, micro_batches=4),
    _wish(pp=2, dp=2, zero=1, micro_batches=2, schedule="interleaved-1f1b", virtual_stages=2),
)


@pytest.mark.parametrize("wish", thinned(PLANS, keep=(PLANS[2], PLANS[3], PLANS[5])), ids=str)
def test_memory_is_that_of_the_fullest_rank(program: Program, wish: dict[str, Any]) -> None:
    found = _exact(program, wish)
    plan = label_plan(program, ClusterSpec.preset("4xcpu"), resolve_degrees(wish, 4), "")
    ranks = [rank_view(program, plan, rank) for rank in range(4)]
    held = max((memory_of(rank, run_stages(rank)) for rank in ranks), key=lambda one: one.total_bytes)
    counted = {
        "parameters": held.parameter_bytes,
        "gradients": held.gradients_beside_bytes,
        "optimizer state": held.optimizer_bytes,
        "gathered": held.gathered_bytes,
        "activations": held.saved_bytes,
    }
    assert {name: found.memory_bytes[MEMORY[name]] for name in counted} == counted
    outside = found.memory_bytes[MEMORY["cache"]] + found.memory_bytes[MEMORY["reserve"]]
    assert found.peak_bytes - outside == pytest.approx(held.total_bytes)
    assert found.peak_bytes == pytest.approx(sum(found.memory_bytes.values()))
    given = _exact(program, plan)  # type: ignore[arg-type]
    assert given.memory_bytes == found.memory_bytes and given.step_s == pytest.approx(found.step_s)


@pytest.mark.parametrize("wish", [_wish(tp=4), _wish(tp=2, dp=2, zero=0), _wish(dp=4, zero=3)], ids=str)
def test_formulas_of_state_agree(program: Program, wish: dict[str, Any]) -> None:
    """With gradients of an earlier micro-batch, and where weights are not gathered for a whole step.

    Adam's counts of steps, 4 bytes each, are no formula's.
    """
    wish = {**wish, "accumulate": 2}
    exact, priced = _exact(program, wish), autopar.estimate(program, "4xcpu", wish)
    for name in STATE:
        assert priced.memory_bytes[MEMORY[name]] == pytest.approx(exact.memory_bytes[MEMORY[name]], rel=0.01), name
    assert priced.step_s == exact.step_s


KINDS = (("float32", "bf16"), ("float32", "fp32"), ("bfloat16", None))
STATES = [(*kind, zero, offload) for kind in KINDS for zero in range(4) for offload in (None, "optimizer")]


@pytest.mark.parametrize(("dtype", "precision", "zero", "offload"), thinned(STATES, keep=STATES[::3]))
def test_formulas_of_state_agree_in_every_precision(
    dtype: str, precision: str | None, zero: int, offload: str | None
) -> None:
    """Together with the casts of weights. Under ZeRO 1, gradients are whole until the sum, which is counted beside."""
    wish = {"dp": 2, "zero": zero, "micro_batch": 1, "accumulate": 2, "precision": precision, "offload": offload}
    wish = {word: value for word, value in wish.items() if value is not None}
    degrees = resolve_degrees(wish, 2)
    program = capture_for(Request.of(_llama(getattr(torch, dtype)), _tokens()), degrees)
    exact = _exact(program, wish, "2xcpu").memory_bytes
    priced = autopar.estimate(program, "2xcpu", wish).memory_bytes
    names = STATE if zero == 3 else (*STATE, "gathered")
    counted = sum(exact[MEMORY[name]] for name in names)
    if zero == 1:  # shards of gradients after the sum are no formula's; the whole gradients before it are
        counted += exact[WAITING] - exact[MEMORY["gradients"]]
    assert sum(priced[MEMORY[name]] for name in names) == pytest.approx(counted, rel=0.01)


def test_what_cannot_be_counted_is_refused(program: Program) -> None:
    with pytest.raises(InputError, match="needs engine autopar"):
        _exact(program, _wish(tp=4), engine="megatron")
    with pytest.raises(InputError, match="captured at 4"):
        _exact(program, {"tp": 4, "micro_batch": 2})


def test_a_plan_that_does_not_fit_is_counted_all_the_same(program: Program) -> None:
    sizes = ClusterSpec.preset("1xcpu").to_dict()
    sizes["groups"][0]["device"]["memory_gb"] = 1e-3
    found = autopar.estimate(program, ClusterSpec.from_dict(sizes), _wish(), exact_memory=True)
    assert not found.fits and found.peak_bytes > found.device_bytes


def test_tensors_wait_for_the_part_of_the_backward_pass_that_reads_them(program: Program) -> None:
    """Tensors that the weights' part reads live until then, and the others until the inputs' part."""
    wish = _wish(pp=2, tp=2, micro_batches=6, schedule="interleaved-zero-bubble", virtual_stages=1)
    plan = label_plan(program, ClusterSpec.preset("4xcpu"), resolve_degrees(wish, 4), "")
    view = rank_view(program, plan, 2)
    runs, (_, order) = run_stages(view), actions("interleaved-zero-bubble", 2, 1, 6)
    at = {(kind, stage, batch): place for place, (stage, kind, batch) in enumerate(order)}
    live = [0] * len(order)
    for (kind, stage, batch), begin in at.items():
        if kind == "F":
            run, whole = runs[stage], at.get(("B", stage, batch))
            for part, count in (("I", run.saved_bytes - run.kept_bytes), ("W", run.kept_bytes)):
                end = at[part, stage, batch] if whole is None else whole
                live[begin:end] = [one + count for one in live[begin:end]]
    assert all(0 < run.kept_bytes < run.saved_bytes for run in runs.values())
    assert memory_of(view, runs).saved_bytes == max(live)


TRAINED = ("lora:r=4", "lora:r=8,targets=q_proj+down_proj,also=lm_head", "frozen:embed_tokens+lm_head")
FROZEN = [
    (trains, zero, tp, precision)
    for trains in TRAINED
    for zero in range(4)
    for tp in (1, 2)
    for precision in ("bf16", "fp32", None)
]


@pytest.mark.parametrize(("trains", "zero", "tp", "precision"), thinned(FROZEN, keep=FROZEN[5::14]))
def test_formulas_of_state_agree_beside_frozen_parameters(
    trains: str, zero: int, tp: int, precision: str | None
) -> None:
    """A frozen parameter has no gradient, no optimizer state and no master weight, and ZeRO gathers it all the same."""
    pytest.importorskip("peft")
    wish = {"dp": 2, "tp": tp, "zero": zero, "micro_batch": 1, "accumulate": 2, "precision": precision}
    degrees = resolve_degrees({word: value for word, value in wish.items() if value is not None}, 2 * tp)
    model = with_trained(_llama(torch.float32), trained_from(trains))
    program = capture_for(Request.of(model, _tokens()), degrees)
    exact = _exact(program, wish, f"{2 * tp}xcpu").memory_bytes
    priced = autopar.estimate(program, f"{2 * tp}xcpu", wish).memory_bytes
    names = STATE if zero == 3 else (*STATE, "gathered")
    counted = sum(exact[MEMORY[name]] for name in names)
    if zero == 1:
        counted += exact[WAITING] - exact[MEMORY["gradients"]]
    assert sum(priced[MEMORY[name]] for name in names) == pytest.approx(counted, rel=0.02)
