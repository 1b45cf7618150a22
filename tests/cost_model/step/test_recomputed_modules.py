"""Selective recomputation by modules: bytes and operators in every family, and published runs of four lists."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from autopar.cost_model.machine.engine import Module, engine_named
from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.row import Row, RowEstimate, read_row_file, read_rows
from autopar.cost_model.step.experts import has_experts
from autopar.cost_model.step.layouts import Shape, layouts_from
from autopar.cost_model.step.recomputed_modules import module_savings
from autopar.cost_model.step.saved_bytes import activations
from autopar.cost_model.work.block_work import evaluate, family, family_names

UNSEEN = Path(__file__).parents[3] / "benchmarks" / "data" / "unseen_runs.csv"
MODULES = get_args(Module)
SIZES = {
    "b": 2.0,
    "s": 1024.0,
    "S": 1024.0,
    "h": 2048.0,
    "a": 16.0,
    "g": 8.0,
    "e": 128.0,
    "f": 6144.0,
    "v": 32000.0,
    "t": 2.0,
    "d": 1.0,
    "ep": 1.0,
    "x": 64.0,
    "y": 4.0,
    "m": 1408.0,
    "w": 2816.0,
    "l": 1024.0,
    "q": 1536.0,
    "c": 512.0,
    "r": 64.0,
    "u": 128.0,
}
every_block = pytest.mark.parametrize(
    "name, role",
    [(name, role) for name in family_names() for role in family(name).roles if "layer" in role],
)


def block(name: str, role: str) -> Any:
    return evaluate(family(name), SIZES).block(role, "tp")


def freed(name: str, role: str, *modules: Any) -> float:
    found = module_savings(block(name, role), role, SIZES["h"], modules)
    return float(found.results_bytes + found.operands_bytes)


@every_block
def test_modules_free_what_is_saved_and_no_more(name: str, role: str) -> None:
    work = block(name, role)
    for one in MODULES:
        assert 0 <= freed(name, role, one) < work.saved_fused_bytes
    everything = freed(name, role, *MODULES)
    # the inputs of a block, of attention and of its output product stay
    assert everything <= work.saved_fused_bytes - work.input_bytes


@every_block
def test_a_module_beside_another_frees_as_much_as_alone(name: str, role: str) -> None:
    inside = [{"moe", "moe_act"}, {"moe", "shared_experts"}]
    for one, other in combinations(MODULES, 2):
        both, alone = freed(name, role, one, other), (freed(name, role, one), freed(name, role, other))
        assert both == pytest.approx(max(alone) if {one, other} in inside else sum(alone))


@every_block
def test_only_blocks_with_experts_have_their_modules(name: str, role: str) -> None:
    for module in ("moe", "moe_act"):
        assert (freed(name, role, module) > 0) == has_experts(role)
    if has_experts(role):
        assert freed(name, role, "mlp") == 0


def test_latent_attention_alone_has_up_projections() -> None:
    found = module_savings(block("deepseek-v3", "layer"), "layer", SIZES["h"], ["mla_up_proj"])
    assert [one.name for one in found.operators] == ["q_b_proj", "kv_b_proj"]
    assert freed("llama", "layer", "mla_up_proj") == 0


def test_operands_in_8_bits_free_half() -> None:
    found = module_savings(block("llama", "layer"), "layer", SIZES["h"], ["mlp"])
    works = evaluate(family("llama"), SIZES)
    shape = Shape(
        counts=(("layer", np.ones(1)),), hidden=np.full(1, SIZES["h"]), sequence=np.full(1, SIZES["s"]),
        experts_per_token=np.ones(1), is_tied=np.zeros(1) > 0,
    )  # fmt: skip
    layouts = layouts_from(
        tp=2, pp=1, dp=1, shard=1, zero=0, micro_batch=2, micro_batches=1, sequence_parallel=0, recompute=1
    )
    for precision, part in (("bf16", 1.0), ("fp8", 0.5)):
        engine = engine_named("megatron").model_copy(update={"selective": ["mlp"]}).computing_in(precision)
        saved = activations(works, shape, layouts, engine)
        assert saved.again == pytest.approx(found.results_bytes + part * found.operands_bytes)
        assert saved.none - saved.selective == pytest.approx(saved.again)


# ---- rows ----


@pytest.fixture(scope="module")
def lists() -> dict[str, Row]:
    rows = read_rows(UNSEEN)
    return {" ".join(row.recompute_modules or ()): row for row in rows if row.source_key == "bridge_modules"}


def predicted(row: Row) -> RowEstimate:
    (found,) = estimate_rows([row.without_result()])
    assert isinstance(found, RowEstimate)
    return found


def test_published_lists_cost_what_was_measured(lists: dict[str, Row]) -> None:
    """Llama 3 70B on 32 H100: mlp took 18.6 % more time than core_attn; both took 1.2 % more than mlp alone."""
    seconds = {name: predicted(row).seconds for name, row in lists.items()}
    assert seconds["mlp"] / seconds["core_attn"] == pytest.approx(704 / 593.6, abs=0.03)
    assert seconds["mlp core_attn"] / seconds["mlp"] == pytest.approx(593.6 / 586.8, abs=0.01)
    assert seconds["core_attn layernorm"] / seconds["core_attn"] == pytest.approx(704 / 702, abs=0.01)


def test_a_list_without_a_word_of_recomputation_is_selective(lists: dict[str, Row]) -> None:
    row = lists["mlp"]
    assert predicted(replace(row, recompute=None)) == predicted(row)
    other = predicted(replace(row, recompute="full"))
    assert "recompute_modules are not used, because recompute is full" in other.warnings
    assert other.seconds > predicted(row).seconds


def test_exchanges_of_experts_run_again_with_the_whole_layer() -> None:
    row = next(row for row in read_rows(UNSEEN) if row.moe_experts and row.recompute_modules)
    few, more = (predicted(replace(row, recompute_modules=names)) for names in (("moe_act",), ("moe",)))
    assert more.peak_bytes < few.peak_bytes
    again = more.parts["recomputation"] - few.parts["recomputation"]
    assert again > few.parts["expert collectives"] / 3


@pytest.mark.parametrize("text", ["mlp, core_attn", "MLP core_attn", "mlp+core_attn", '["mlp", "core_attn"]'])
def test_a_list_is_read_with_any_marks(text: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    names = "layers,hidden,ffn_hidden,n_heads,vocab,seq_len,gpu_type,num_gpus,tp,pp,precision,recompute_modules"
    quoted = text.replace('"', '""')
    path.write_text(f'{names}\n2,64,256,4,100,32,H100,8,1,1,bf16,"{quoted}"\n')
    assert read_row_file(path).rows[0].recompute_modules == ("mlp", "core_attn")
    path.write_text(f"{names}\n2,64,256,4,100,32,H100,8,1,1,bf16,mlp attn\n2,64,256,4,100,32,H100,8,1,1,bf16,\n")
    (left,) = read_row_file(path).left_out
    assert "must be names out of core_attn" in left.reason and "mlp attn" in left.reason
