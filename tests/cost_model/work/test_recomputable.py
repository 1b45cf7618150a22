"""Bytes that a block saves under selective recomputation: the expressions of the cost model against torch's autograd.

The dry run executes the recomputation of the runtime on tensors without data. Sizes are those of real models, so the
parts of a block's bytes are too.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from suites import long
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.cost_model.work.block_work import BlockWork, evaluate, sizes_on
from autopar.cost_model.work.export import block_runs, flow_of, work_of
from autopar.cost_model.work.polynomials import Polynomial
from autopar.cost_model.work.program_costs import program_works
from autopar.cost_model.work.recomputable import Recomputable, needed, recomputable
from autopar.cost_model.work.sizes import Naming
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.stages import recomputed_calls, stages_of
from autopar.planning.fixed import label_plan
from autopar.runtime.dry_run.rank_view import rank_view
from autopar.runtime.dry_run.stage_run import StageRun, run_stage

BATCH, TOKENS = 2, 4096
CLUSTER = ClusterSpec.preset("8xh100")


def llama(layers: int) -> torch.nn.Module:
    """Llama 3 8B, with a small vocabulary."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
            num_hidden_layers=layers, vocab_size=256, use_cache=False,
        )
    )  # fmt: skip


def gpt2(layers: int) -> torch.nn.Module:
    """With dropout, whose masks autograd saves, and attention that writes its scores."""
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=1024, n_head=16, n_layer=layers, vocab_size=256, n_positions=TOKENS, use_cache=False,
            attn_implementation="eager", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[int], torch.nn.Module]] = {"llama": llama, "gpt2": gpt2}


@cache
def program(name: str, layers: int) -> Program:
    with torch.device("meta"):
        model = MODELS[name](layers).bfloat16()
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="meta")
    return capture_program(model, {"input_ids": ids, "labels": ids.clone()})


def planned(name: str, layers: int, **wish: Any) -> Plan:
    return label_plan(program(name, layers), CLUSTER, Degrees(micro_batch=BATCH, **wish), name)


def run(name: str, plan: Plan, layers: int) -> StageRun:
    captured = program(name, layers)
    setting = rank_view(captured, plan, 0)
    return run_stage(setting, setting.stages[0])


def saved_of_a_layer(name: str, plans: dict[int, Plan]) -> int:
    return run(name, plans[3], 3).saved_bytes - run(name, plans[2], 2).saved_bytes


def work_of_a_layer(name: str, plan: Plan) -> BlockWork[float]:
    """The numbers of the repeated block under a plan's labels."""
    captured = program(name, 3)
    works = program_works(captured, analyse(captured, plan.mesh), plan.blocks, plan.mesh)
    found: BlockWork[float] = evaluate(works.family.block(works.counts[0][0], "tp"), sizes_on(plan.mesh, TOKENS, BATCH))
    return found


def values_of_a_layer(name: str, plan: Plan) -> Recomputable[Polynomial]:
    captured = program(name, 3)
    analysis = analyse(captured, plan.mesh)
    (index,) = (i for i, one in enumerate(plan.blocks) if one.recomputed)
    runs, naming = block_runs(captured, analysis)[index], Naming(analysis, plan.mesh)
    flow = flow_of(captured, index, plan.blocks[index], naming, runs, True)
    work = work_of(flow)
    return recomputable(flow, (*work.products, *work.eager))


@pytest.mark.parametrize("tp", (long(1), 2))
@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_of_selective_and_full_recomputation(name: str, tp: int) -> None:
    """Within 2 % of the count of the block's own expressions."""
    for how in ("selective", "full"):
        plans = {layers: planned(name, layers, tp=tp, recompute=how) for layers in (2, 3)}
        work = work_of_a_layer(name, plans[3])
        expected = work.input_bytes if how == "full" else work.selected.saved_bytes if work.selected else 0.0
        assert saved_of_a_layer(name, plans) == pytest.approx(expected, rel=0.02), how


@pytest.mark.parametrize("seed", [0, 1, long(2), long(3)])
@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_of_any_operators(name: str, seed: int) -> None:
    """Of a random set, without the operators whose results the backward pass does not read."""
    draw = random.Random(seed)
    plans = {layers: planned(name, layers, recompute="selective") for layers in (2, 3)}
    values = values_of_a_layer(name, plans[3])
    again = needed(values, {k for k in range(len(values.operators)) if draw.random() < 0.5})
    keys = tuple(key for k in sorted(again) for key in values.operators[k].keys)
    for layers, plan in plans.items():
        blocks = tuple(replace(one, recomputed=keys) if one.recomputed else one for one in plan.blocks)
        plans[layers] = replace(plan, blocks=blocks)
    work = work_of_a_layer(name, plans[3])
    assert work.selected is not None
    assert saved_of_a_layer(name, plans) == pytest.approx(work.selected.saved_bytes, rel=0.02)


def test_a_llama_block_frees_60_percent_of_its_bytes_for_10_percent_more_flop() -> None:
    work = work_of_a_layer("llama", planned("llama", 3, recompute="selective"))
    none = saved_of_a_layer("llama", {layers: planned("llama", layers) for layers in (2, 3)})
    plans = {layers: planned("llama", layers, recompute="selective") for layers in (2, 3)}
    assert saved_of_a_layer("llama", plans) <= 0.4 * none
    assert work.selected is not None
    more = sum(one.flops for one in work.selected.operators)
    assert 0 < more <= 0.1 * 3 * sum(one.flops for one in work.products)


def test_scores_norms_and_activation_functions_come_first() -> None:
    """Attention that writes its scores saves most; nothing that sends a collective is recomputed."""
    (block,) = (one for one in planned("gpt2", 3, tp=2, recompute="selective").blocks if one.recomputed)
    operators = {key.split(":")[-2] for key in block.recomputed}
    assert {"softmax", "layer_norm"} <= operators
    work = work_of_a_layer("gpt2", planned("gpt2", 3, tp=2, recompute="selective"))
    assert work.selected is not None
    assert work.selected.saved_bytes < 0.25 * work.saved_eager_bytes


def test_fully_recomputed_blocks_come_first_and_then_selective_ones() -> None:
    captured = program("llama", 3)
    degrees = Degrees(recompute="auto", recompute_blocks=1, selective_blocks=1)
    found = recomputed_calls(captured, degrees, stages_of(captured, ()))
    layers = [i for i, call in enumerate(captured.calls) if call.path.startswith("model.layers.")]
    assert found == {layers[0]: "full", layers[1]: "selective"}
