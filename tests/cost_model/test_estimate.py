"""Estimates of one plan: what adds up, what every part follows, and that published rows are priced the same way."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_step import step_s
from planned import make_plan
from pytest import MonkeyPatch
from torch import nn

import autopar
from autopar.capture.request import Request
from autopar.cost_model.estimate import Estimate, run_cost
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.pipeline.closed_forms import unequal_step_s
from autopar.cost_model.pipeline.stages import MOST_ACTIONS, pipelines_of, stages_at
from autopar.cost_model.step.context import Passes
from autopar.errors import ClusterError, InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.device import HostGroup
from autopar.ir.program import Program
from autopar.planning import estimate as estimation
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for

LAYERS, SEQUENCE = 6, 64


def llama(**sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
    }
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, **sizes})).to(torch.bfloat16)
    return made.train()


def tokens(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch, SEQUENCE, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def program() -> Program:
    degrees = resolve_degrees({"micro_batch": 2}, 8)
    return capture_for(Request.of(llama(), tokens(2)), degrees)


def priced(program: Program, plan: dict[str, Any], cluster: str = "8xh100", **options: Any) -> Estimate:
    return autopar.estimate(program, cluster, {"micro_batch": 2, **plan}, **options)


PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"zero": 0},
    {"zero": 2, "accumulate": 4},
    {"tp": 2, "zero": 1, "sequence_parallel": True},
    {"tp": 2, "zero": 1, "sequence_parallel": False, "recompute": "full"},
    {"pp": 2, "tp": 2, "zero": 1, "micro_batches": 4},
    {"pp": 4, "zero": 1, "micro_batches": 8, "accumulate": 2},
    {"pp": 2, "zero": 3, "schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batches": 4},
    {"pp": 2, "zero": 1, "micro_batches": 4, "recompute": "full", "recompute_blocks": 1},
)


def test_replicas_alone_sum_gradients_as_plain_data_parallelism(program: Program) -> None:
    """Without shards the sum over replicas is one all-reduce, as it is without ZeRO."""
    shapes = ({"zero": 0, "dp": 8}, {"zero": 1, "dp": 1, "dp_replicate": 8})
    plain, replicas = (
        sum(one.exposed_s + one.hidden_s for one in priced(program, plan, engine="megatron").collectives)
        for plan in shapes
    )
    assert plain > 0
    assert replicas == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_parts_add_up(program: Program, plan: dict[str, Any]) -> None:
    for engine in ("autopar", "megatron"):
        found = priced(program, plan, engine=engine)
        exposed = sum(one.exposed_s for one in found.collectives)
        assert sum(found.compute_s.values()) + exposed + sum(found.other_s.values()) == pytest.approx(found.step_s)
        assert sum(found.memory_bytes.values()) == pytest.approx(found.peak_bytes)
        assert min(*found.compute_s.values(), *found.other_s.values(), *found.memory_bytes.values()) >= 0
        assert min(one.hidden_s for one in found.collectives) >= 0
        assert found.tokens_per_s == pytest.approx(found.global_batch * SEQUENCE / found.step_s)
        assert 0 < found.mfu <= found.hfu < 1
        assert json.loads(json.dumps(found.to_dict()))["step_s"] == found.step_s


def test_model_flops_are_those_of_the_model(program: Program) -> None:
    """6 FLOP per parameter of a product and token, and 12·s·h per block for attention without its mask."""
    found = priced(program, {"tp": 2})
    embedding, norms = 512 * 256, (2 * LAYERS + 1) * 256
    products = found.num_parameters - embedding - norms
    per_token = 6 * products + LAYERS * 12 * SEQUENCE * 256
    flops = per_token * found.global_batch * SEQUENCE
    assert found.tflops_per_device * 1e12 * found.step_s * 8 == pytest.approx(flops, rel=1e-9)
    assert found.mfu == pytest.approx(found.tflops_per_device * 1e12 / 989.4e12, rel=1e-3)


def test_a_captured_program_is_labelled_and_written_down_once(program: Program, monkeypatch: MonkeyPatch) -> None:
    plan = {"pp": 4, "tp": 2, "zero": 1, "micro_batches": 16}
    first, _ = priced(program, plan), priced(program, plan, engine="megatron")
    for name in ("analyse", "choose_labels", "works_under"):
        monkeypatch.setattr(estimation, name, None)  # fails where it is called
    assert priced(program, plan) == first
    assert priced(program, plan, engine="fsdp").step_s != priced(program, plan, engine="megatron").step_s
    with pytest.raises(TypeError, match="not callable"):
        priced(program, {**plan, "tp": 4, "pp": 2})


def test_recomputation_trades_memory_for_time(program: Program) -> None:
    none, full = priced(program, {}), priced(program, {"recompute": "full"})
    assert full.step_s > none.step_s and full.hfu / full.mfu > 1.2 > none.hfu / none.mfu == 1
    assert full.memory_bytes["activations in flight"] < none.memory_bytes["activations in flight"]
    some = priced(program, {"recompute": "full", "recompute_blocks": 3})
    assert none.step_s < some.step_s < full.step_s


@pytest.mark.parametrize(("precision", "bytes_of"), [(None, (2, 2, 4)), ("bf16", (4, 4, 8))])
def test_state_is_divided_by_zero(program: Program, precision: str | None, bytes_of: tuple[int, int, int]) -> None:
    """All state of a model in bfloat16 is so, or is float32. Blocks have copies in bfloat16, which ZeRO 3 frees."""
    parts = ("parameters", "gradients", "optimizer state")
    elements = priced(program, {}).num_parameters
    for zero in range(4):
        found = priced(program, {"zero": zero, "precision": precision, "accumulate": 2}).memory_bytes
        each = [size / (8 if zero >= stage else 1) for size, stage in zip(bytes_of, (1, 2, 1), strict=True)]
        each[0] += 2 if zero in (1, 2) or (zero == 0 and precision is not None) else 0
        assert [found[part] for part in parts] == pytest.approx([elements * size for size in each])


def test_attention_by_parts_has_the_speed_of_flash_attention_2() -> None:
    """Exchanged heads have whole sequences, for which the device has a faster kernel: 2.2 times on an H100."""
    length = 32768
    found = {
        (device, context): autopar.estimate(
            llama(num_hidden_layers=2),
            f"2x{device}",
            {"cp": 2, "context": context, "zero": 0},
            example_inputs={name: torch.empty(1, length, dtype=torch.long, device="meta") for name in tokens(1)},
        ).compute_s["attention"]
        for device in ("h100", "a100")
        for context in ("heads", "queries", "ring")
    }
    for device, slower in (("h100", mechanisms().native_attention), ("a100", 1.0)):
        for context in ("queries", "ring"):
            assert found[device, context] / found[device, "heads"] == pytest.approx(slower, rel=0.02)


def test_scaling_efficiency(program: Program) -> None:
    assert priced(program, {"tp": 8}).scaling_efficiency == 1
    found = priced(program, {"tp": 2, "zero": 1})
    assert found.least_devices == 2 and 0 < found.scaling_efficiency < 1.2


def test_a_run_costs(program: Program) -> None:
    spec = ClusterSpec.preset("8xh100")
    group: HostGroup = replace(spec.groups[0], price_usd_per_device_hour=2.0)
    found = run_cost(replace(spec, groups=(group,)), 1e9, 1e6, 3.6, 400.0)
    assert (found.steps, found.device_hours, found.days) == pytest.approx((1000, 8, 1 / 24))
    assert found.price_usd == pytest.approx(16) and found.energy_kwh == pytest.approx(8 * 0.7)
    assert found.co2_kg == pytest.approx(0.4 * 8 * 0.7)
    plain = priced(program, {}, tokens=1e9).run
    assert plain is not None and plain.price_usd is None and plain.co2_kg is None
    assert priced(program, {}).run is None


def test_what_is_not_run_is_marked(program: Program) -> None:
    assert priced(program, {}).formula_only == ()
    found = autopar.estimate(program, "8xh100", {"tp": 2, "cp": 2, "micro_batch": 2}, engine="megatron")
    (text,) = found.formula_only
    assert text.startswith("engine megatron")
    context = next(one for one in found.collectives if one.mesh_dim == "cp")
    assert context.exposed_s > 0 and context.hidden_s > context.exposed_s


def test_a_plan_is_priced_as_its_degrees(program: Program) -> None:
    spec, model = ClusterSpec.preset("8xh100"), llama()
    wish = {"pp": 2, "tp": 2, "zero": 1, "micro_batch": 2, "micro_batches": 4}
    captured, plan = make_plan(model, spec, tokens(8), resolve_degrees(wish, 8, 8))
    by_plan, by_module = (
        autopar.estimate(captured, spec, plan),
        autopar.estimate(model, spec, wish, example_inputs=tokens(8)),
    )
    assert by_plan.step_s == pytest.approx(by_module.step_s) and by_plan.degrees["cuts"] == list(plan.cuts)


def test_float32_is_priced_on_a_cpu() -> None:
    model = llama(num_hidden_layers=2).float()
    found = autopar.estimate(model, "4xcpu", {"tp": 2, "zero": 0, "accumulate": 2}, example_inputs=tokens(4))
    assert found.precision == "fp32" and found.device_bytes > found.peak_bytes
    state = [found.memory_bytes[part] for part in ("parameters", "gradients", "optimizer state")]
    assert state == pytest.approx([state[0], state[0], 2 * state[0]])


def test_a_model_s_dtype_is_what_is_priced_and_said_where_it_is_not_the_devices() -> None:
    model = llama(num_hidden_layers=2).float()

    def found(cluster: str, **options: Any) -> autopar.Estimate:
        return autopar.estimate(model, cluster, {"tp": 2, "zero": 0}, example_inputs=tokens(2), **options)

    def said(made: autopar.Estimate) -> list[str]:
        return [one for one in made.assumptions if "the model is" in one]

    whole, half = found("4xh100", precision="fp32"), found("4xh100")
    assert (whole.precision, half.precision) == ("fp32", "bf16")
    assert whole.compute_s["matrix products"] > half.compute_s["matrix products"]
    assert ["without TF32" in one for one in said(whole)] == [True]
    assert said(half) == []  # it computes and sends in bfloat16 beside float32 weights
    assert said(found("4xcpu")) == []


def test_refusals(program: Program) -> None:
    with pytest.raises(InputError, match="unknown engine 'megatrom'; did you mean 'megatron'"):
        priced(program, {}, engine="megatrom")
    assert priced(program, {"tp": 2}, engine="torchtitan").engine == "fsdp"
    with pytest.raises(PlanError, match="tp: must divide the 8 ranks"):
        priced(program, {"tp": 3})
    with pytest.raises(InputError, match="unknown precision 'bf17'"):
        priced(program, {}, precision="bf17")
    with pytest.raises(InputError, match="has no unit for fp8; use"):
        priced(program, {}, cluster="8xa100-80gb", precision="fp8")
    with pytest.raises(PlanError, match="cp: must divide the 8 ranks"):
        priced(program, {"cp": 3})
    with pytest.raises(PlanError, match="the model has no experts"):
        priced(program, {"ep": 2})
    with pytest.raises(InputError, match="tokens: must be a number greater than 0"):
        priced(program, {}, tokens=-1.0)
    with pytest.raises(ClusterError, match="is of a cpu device"):
        priced(program, {}, profile=device_profile("cpu"))
    with pytest.raises(InputError, match="a module needs example_inputs"):
        autopar.estimate(llama(), "8xh100")


# ---- pipelines ----


def _passes(forward: float, backward: float, weight: float = 0.0) -> Passes:
    return Passes(forward=np.array([forward]), backward=np.array([backward]), weight=np.array([weight]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble"])
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_stages_agree_with_the_closed_form(schedule: str, micro_batches: int) -> None:
    virtual = 2 if schedule.startswith("interleaved") else 1
    stages = stages_at(
        ["layer"] * 8,
        range(8 // (4 * virtual), 8, 8 // (4 * virtual)),
        Degrees(schedule=schedule, pp=4, virtual_stages=virtual, micro_batches=micro_batches, accumulate=3),
    )
    found = pipelines_of([stages], engine_named("autopar"), 1.0)({"layer": _passes(1.0, 2.0, 0.8)}, np.zeros(1))
    whole = step_s(
        schedule, pp=4, virtual_stages=virtual, micro_batches=micro_batches, forward_s=2.0, backward_s=4.0, weight_s=1.6
    )
    assert float(3 * micro_batches * found.busy[0] + found.idle[0]) == pytest.approx(3 * whole)
    assert found.blocks == 2


def test_uneven_stages_agree_with_the_closed_form_of_long_lists() -> None:
    """The last stage is the slowest, where the bound of unequal ranks is exact."""
    roles = ["first", *["layer"] * 6, "last"]
    passes = {"first": _passes(0.1, 0.2), "layer": _passes(1.0, 2.0), "last": _passes(1.5, 3.0)}
    short = stages_at(roles, (3, 5), Degrees(pp=3, micro_batches=12))
    found = pipelines_of([short], engine_named("autopar"), 1.0)(passes, np.zeros(1))
    forward, backward = np.array([2.1, 2.0, 3.5]), np.array([4.2, 4.0, 7.0])
    whole = unequal_step_s("1f1b", micro_batches=12, forward_s=forward, backward_s=backward)
    assert float(12 * found.busy[0] + found.idle[0]) == pytest.approx(whole)
    long = replace(short, micro_batches=MOST_ACTIONS)
    assert long.num_actions > MOST_ACTIONS
    found = pipelines_of([long], engine_named("autopar"), 1.0)(passes, np.zeros(1))
    whole = unequal_step_s("1f1b", micro_batches=MOST_ACTIONS, forward_s=forward, backward_s=backward)
    assert float(MOST_ACTIONS * found.busy[0] + found.idle[0]) == pytest.approx(whole)
