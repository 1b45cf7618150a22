"""One block as a graph: the drawing has every operator that runs."""

from functools import cache

import pytest
import torch

from autopar.capture.program import capture_program
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planning.fixed import label_plan
from autopar.report.block_graph import block_graph
from autopar.search.result.report_data import BlockGraph

CLUSTER = "4xcpu"


@cache
def planned(name: str) -> tuple[Program, Plan]:
    transformers = pytest.importorskip("transformers")
    tokens = torch.zeros(4, 16, dtype=torch.long, device="meta")
    with torch.device("meta"):
        if name == "gpt2":
            config = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=8, vocab_size=160, n_positions=32)
            model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.LlamaConfig(
                hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
                num_key_value_heads=4, vocab_size=160,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config)
    program = capture_program(model, {"input_ids": tokens, "labels": tokens})
    degrees = Degrees(tp=2, dp_shard=2, micro_batch=2)
    return program, label_plan(program, ClusterSpec.preset(CLUSTER), degrees, name)


@cache
def drawn(name: str) -> BlockGraph:
    found = block_graph(*planned(name))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_rise_along_every_edge(name: str) -> None:
    found = drawn(name)
    assert found.num_calls == 3
    for edge in found.edges:
        assert found.nodes[edge.source].layer < found.nodes[edge.target].layer
    assert {node.kind for node in found.nodes} >= {"input", "output", "product", "attention", "other", "collective"}
    used = {edge.source for edge in found.edges} | {edge.target for edge in found.edges}
    assert used == set(range(len(found.nodes)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_collectives_are_those_of_the_summary(name: str) -> None:
    program, plan = planned(name)
    assert plan.summary is not None
    of_block = next(one for one in plan.summary.blocks if one.name == drawn(name).name)
    forward = sum(one.count for one in of_block.traffic if one.when == "forward")
    assert sum(node.kind == "collective" for node in drawn(name).nodes) == forward > 0
    block = next(block for block in program.blocks if block.name == drawn(name).name)
    assert [weight[0] for weight in drawn(name).weights] == [
        name for name, role in block.ports.items() if role == "parameter"
    ]


def test_placements_are_on_the_edges() -> None:
    placements = {edge.placement for edge in drawn("llama").edges}
    assert any("batch / dp" in one for one in placements)
    assert any("partial" in one or "a sum over tp" in one for one in placements)
