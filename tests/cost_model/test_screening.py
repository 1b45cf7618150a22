"""Very many layouts are priced as each one is: by the same formulas, only once for what they share."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.memory.formula import step_memory
from autopar.cost_model.pricing import Question, layouts_of
from autopar.cost_model.published.estimate import FULL
from autopar.cost_model.published.row import Row
from autopar.cost_model.screened_model import ScreenedModel, model_of_program, model_of_row
from autopar.cost_model.screening import PIECE, Target, screen, target_of
from autopar.cost_model.step.experts import with_experts
from autopar.cost_model.step.layouts import Layouts, strides
from autopar.cost_model.step.step import step_seconds
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.program import Program
from autopar.planning.degrees import resolve_degrees
from autopar.planning.estimate import priceable_of
from autopar.planning.fixed import capture_for

SAME = 1e-12
CLUSTER = ClusterSpec.preset("1024xh100-sxm")
DENSE = Row(
    id="dense", model="GPT", layers=50, hidden=8192, ffn_hidden=32768, n_heads=64, vocab=51200, seq_len=2048,
    gated_mlp=False, tied_embeddings=True,
)  # fmt: skip
GROUPED = replace(DENSE, model="Llama", n_kv_heads=8, gated_mlp=True, tied_embeddings=False)
EXPERTS = replace(GROUPED, model="Mixtral", moe_experts=8, moe_topk=2, moe_ffn_hidden=14336)
MIXED = replace(
    EXPERTS, model="DeepSeek-V3", attention_type="mla", head_dim=128, n_heads=64, n_kv_heads=64, moe_layers=47,
    moe_shared_ffn=2048, moe_ffn_hidden=2048,
)  # fmt: skip


def layouts_like(size: int, seed: int, **fixed: float) -> Layouts:
    """Random layouts of everything that pricing knows; `fixed` fields are arrays of one number."""
    chooser = np.random.default_rng(seed)

    def any_of(*values: float) -> Any:
        return np.asarray(values, dtype=float)[chooser.integers(0, len(values), size)]

    tp, pp, cp, dp = any_of(1, 2, 4, 6, 8, 16), any_of(1, 1, 2, 4, 5, 16), any_of(1, 2, 4), any_of(1, 2, 3, 8, 64, 500)
    columns = {
        "tp": tp,
        "sequence_parallel": any_of(0, 1) * (tp > 1),
        "pp": pp,
        "virtual": np.where(pp > 1, any_of(1, 2, 3), 1.0),
        "cp": cp,
        "ep": np.minimum(any_of(1, 2, 4, 8), dp * cp),
        "dp": dp,
        "shard": np.maximum(dp * cp / any_of(1, 2, 2.5), 1.0),
        "zero": any_of(0, 1, 2, 3),
        "micro_batch": any_of(1, 2, 3, 4, 8),
        "micro_batches": any_of(1, 1.5, 4, 32, 100),
        "recompute": any_of(0, 1, 2),
        **strides(any_of(0, 1).astype(int), tp=tp, pp=pp, data_ranks=dp * cp),
    }
    return Layouts(**{**columns, **{name: np.array([value]) for name, value in fixed.items()}})


def check(models: list[ScreenedModel], layouts: Layouts, target: Target) -> None:
    """Against the functions that price every field of every layout; `models` in the order of tensor degrees."""
    found = screen(models, layouts, target)
    size = len(found.seconds)
    whole = Layouts(**{name: np.broadcast_to(getattr(layouts, name), size) for name in Layouts.__slots__})
    for model in models:
        rows = np.arange(size) if model.tp is None else np.flatnonzero(whole.tp == model.tp)
        own = whole.at(rows)
        family = with_experts(model.blocks(own), own, target.mechanisms)
        shape, engine, fused = model.shape, target.engine, target.fused
        step = step_seconds(
            family, shape, own, target.machine, engine, target.mechanisms, in_float8=target.in_float8, fused=fused
        )
        cache, reserve = target.mechanisms.allocator_cache, target.reserve_bytes
        memory = step_memory(family, shape, own, engine, reserve_bytes=reserve, cache=cache, fused=fused)
        assert np.isfinite(step.seconds).all() and (step.seconds > 0).all()
        np.testing.assert_allclose(found.seconds[rows], step.seconds, rtol=SAME)
        np.testing.assert_allclose(found.peak_bytes[rows], memory.peak_bytes, rtol=SAME)
        np.testing.assert_array_equal(found.fits[rows], memory.needed_bytes <= FULL * target.memory_bytes)


@pytest.mark.parametrize("engine", ["autopar", "megatron", "megatron-2022", "deepspeed-zero3", "llm-foundry", "fsdp"])
@pytest.mark.parametrize("row", [DENSE, GROUPED, EXPERTS, MIXED], ids=lambda row: row.model)
def test_rows_as_one_by_one(row: Row, engine: str) -> None:
    target = target_of(CLUSTER, engine_named(engine), precision="bf16")
    check([model_of_row(row)], layouts_like(3000, 0), target)


def test_float8() -> None:
    target = target_of(CLUSTER, engine_named("megatron"), precision="fp8")
    check([model_of_row(EXPERTS)], layouts_like(1000, 1), target)


def test_more_layouts_than_a_piece() -> None:
    target = target_of(CLUSTER, engine_named("fsdp"), precision="bf16")
    check([model_of_row(GROUPED)], layouts_like(PIECE + 7, 2), target)
    check([model_of_row(GROUPED)], layouts_like(1, 3), target)


@pytest.mark.parametrize("zero", [0, 3])
def test_fields_that_all_share(zero: int) -> None:
    target = target_of(CLUSTER, engine_named("megatron"), precision="bf16")
    fixed = {"zero": zero, "cp": 1, "ep": 1, "virtual": 1, "recompute": 2}
    check([model_of_row(GROUPED)], layouts_like(500, 4, **fixed), target)


def test_fields_of_small_types() -> None:
    target = target_of(CLUSTER, engine_named("megatron"), precision="bf16")
    layouts = layouts_like(500, 5)
    layouts = replace(layouts, shard=layouts.dp * layouts.cp, micro_batches=np.ceil(layouts.micro_batches))
    small = Layouts(**{name: getattr(layouts, name).astype(np.int16) for name in Layouts.__slots__})
    found, expected = (screen([model_of_row(EXPERTS)], one, target) for one in (small, layouts))
    np.testing.assert_array_equal(found.seconds, expected.seconds)
    np.testing.assert_array_equal(found.peak_bytes, expected.peak_bytes)


@pytest.mark.parametrize("entries", [0, 2])
def test_fields_of_unlike_lengths(entries: int) -> None:
    target = target_of(CLUSTER, engine_named("megatron"), precision="bf16")
    layouts = replace(layouts_like(5, 10), zero=np.zeros(entries))
    with pytest.raises(InputError, match=f"must have as many entries as there are layouts.*zero {entries}"):
        screen([model_of_row(DENSE)], layouts, target)


# ---- captured programs ----


def captured(kind: str, **sizes: Any) -> Program:
    transformers = pytest.importorskip("transformers")
    config = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 8, **sizes}
    with torch.device("meta"):
        made = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))
    ids = torch.empty(2, 64, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids.clone()}
    return capture_for(made.to(torch.bfloat16).train(), inputs, resolve_degrees({"micro_batch": 2}, 8))


@pytest.fixture(scope="module")
def program() -> Program:
    return captured("Llama")


def labelled(program: Program, tp: int, engine: str = "autopar") -> ScreenedModel:
    wish = {"tp": tp, "dp": 2, "zero": 1, "micro_batch": 2, "sequence_parallel": tp > 1}
    spec = ClusterSpec.preset(f"{2 * tp}xh100-sxm")
    found = priceable_of(program, spec, resolve_degrees(wish, 2 * tp), engine_named(engine))
    return model_of_program(found.works)


def labelled_layouts(size: int, seed: int) -> Layouts:
    """Of the tensor degrees 1, 2 and 4, the latter with sequence parallelism."""
    layouts = layouts_like(size, seed)
    tp = np.array([1.0, 2.0, 4.0])[np.random.default_rng(seed).integers(0, 3, size)]
    return replace(layouts, tp=tp, sequence_parallel=tp > 1, ep=np.ones(1))


@pytest.mark.parametrize("engine", ["autopar", "megatron"])
def test_programs_of_several_tensor_degrees(program: Program, engine: str) -> None:
    target = target_of(CLUSTER, engine_named(engine), precision="bf16")
    check([labelled(program, tp, engine) for tp in (4, 1, 2)], labelled_layouts(3000, 6), target)


def test_programs_with_experts() -> None:
    program = captured("Mixtral", num_hidden_layers=2, num_local_experts=4, num_key_value_heads=4)
    target = target_of(CLUSTER, engine_named("autopar"), precision="bf16")
    layouts = replace(layouts_like(1000, 7), tp=np.full(1, 2.0), sequence_parallel=np.ones(1))
    check([labelled(program, 2)], layouts, target)


@pytest.mark.parametrize("wish", [{}, {"zero": 0}, {"tp": 2, "zero": 1, "recompute": "full"}, {"tp": 2, "zero": 2}])
def test_an_estimate_says_the_same(program: Program, wish: dict[str, Any]) -> None:
    spec = ClusterSpec.preset("8xh100-sxm")
    plan = {"micro_batch": 2, "sequence_parallel": wish.get("tp", 1) > 1, **wish}
    made = autopar.estimate(program, spec, plan)
    engine = engine_named("autopar")
    found = priceable_of(program, spec, resolve_degrees(plan, 8), engine)
    layouts = layouts_of(found.works, Question(cluster=spec, degrees=found.degrees, engine=engine))
    screened = screen([model_of_program(found.works)], layouts, target_of(spec, engine, precision="bf16"))
    assert screened.seconds[0] == pytest.approx(made.step_s, rel=SAME)
    assert screened.fits[0] == made.fits


def test_every_layout_has_one_program(program: Program) -> None:
    target = target_of(CLUSTER, engine_named("autopar"), precision="bf16")
    one, two = labelled(program, 1), labelled(program, 2)
    layouts = replace(labelled_layouts(3, 8), tp=np.array([1.0, 2.0, 4.0]), sequence_parallel=np.array([0.0, 1.0, 1.0]))
    with pytest.raises(InputError, match="no model is for layout 2, of tensor degree 4 and sequence parallelism True"):
        screen([one, two], layouts, target)
    with pytest.raises(InputError, match="two models are for the same layouts"):
        screen([one, two, one], layouts, target)


def test_shared_prices_cannot_read_other_fields() -> None:
    some = layouts_like(10, 9).only(("tp", "cp"), np.array([0, 3]))
    assert some.tp.shape == (2,)
    for name in ("pp", "num_devices", "data_ranks"):
        with pytest.raises(AttributeError):
            getattr(some, name)
