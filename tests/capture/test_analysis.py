"""Axes of whole models: found from the operators alone, refined where several mesh dimensions compete."""

from functools import cache
from math import prod

import pytest
import tiny_models
import torch
from torch import nn

from autopar.capture.analysis import Analysis, analyse
from autopar.capture.program import capture_program
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh


@cache
def traced(model: str) -> Program:
    return capture_program(*getattr(tiny_models, model)(4))


def analysed(model: str, mesh: Mesh | None = None) -> tuple[Program, Analysis]:
    return traced(model), analyse(traced(model), mesh)


@pytest.mark.parametrize("model", ["llama", "gpt2", "mlp", "megatron"])
@pytest.mark.parametrize("mesh", [None, Mesh.of(dp=2, tp=2), Mesh.of(tp=2, tq=2)], ids=str)
def test_dims_have_the_shapes_of_their_values(model: str, mesh: Mesh | None) -> None:
    program, analysis = analysed(model, mesh)
    for i, block in enumerate(program.blocks):
        for node in block.graph.nodes:
            if "info" in node.meta:
                dims = analysis.dims[i][node.name]
                assert dims.shape == node.meta["info"].shape
                assert all(size > 1 for sizes in dims.sizes for size in sizes)
        for name, bound in analysis.bounds[i].items():
            assert bound.rule.known, name
            for factor, size in bound.rule.sizes.items():
                assert prod(s for _, s in bound.factors[factor]) == size


def test_grouped_queries() -> None:
    """Rows of the query projection are (kv repeat width), those of keys and values (kv width)."""
    _, analysis = analysed("llama")
    axes = [analysis.outer[f"model.layers.0.self_attn.{p}_proj.weight"].axes[0] for p in "qkv"]
    sizes = [analysis.outer[f"model.layers.0.self_attn.{p}_proj.weight"].sizes[0] for p in "qkv"]
    assert sizes[0] == (4, 2, 4) or prod(sizes[0]) == 32
    assert axes[0][0] == axes[1][0] == axes[2][0]  # one axis of key heads
    output = analysis.outer["model.layers.0.self_attn.o_proj.weight"].axes[1]
    assert output[0] == axes[0][0]
    up, gate, down = (analysis.outer[f"model.layers.0.mlp.{p}_proj.weight"].axes for p in ("up", "gate", "down"))
    assert up[0] == gate[0] == down[1]


def test_a_packed_projection() -> None:
    """GPT-2's columns are (3 heads width): heads lie inside."""
    _, analysis = analysed("gpt2")
    packed = analysis.outer["transformer.h.0.attn.c_attn.weight"]
    assert packed.sizes[1][0] == 3
    heads = packed.axes[1][1]
    assert heads in analysis.outer["transformer.h.0.attn.c_proj.weight"].axes[0]


def test_all_layers_share_the_residual_axes() -> None:
    _, analysis = analysed("llama")
    hidden = analysis.outer["model.embed_tokens.weight"].axes[1]
    for i in range(2):
        assert analysis.outer[f"model.layers.{i}.input_layernorm.weight"].axes[0] == hidden
    assert set(hidden) <= analysis.hidden_axes
    assert analysis.batch_axes and analysis.sequence_axes
    assert not analysis.batch_axes & analysis.sequence_axes


def test_the_vocabulary_is_one_axis_of_a_tied_table() -> None:
    program, analysis = analysed("gpt2")
    table = analysis.outer["transformer.wte.weight"].axes[0]
    logits = analysis.outer[program.outputs["logits"]]
    assert logits.axes[-1] == table


def test_competing_mesh_dimensions_refine_axes() -> None:
    _, plain = analysed("llama")
    _, refined = analysed("llama", Mesh.of(tp=2, tq=2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert len(refined.outer[name].sizes[0]) > len(plain.outer[name].sizes[0])
    assert refined.outer[name].sizes[0][0] == 2
    _, data = analysed("llama", Mesh.of(dp=2, tp=2))
    assert data.outer[name].sizes == plain.outer[name].sizes  # dp owns the batch and competes for nothing


class Crossing(nn.Module):
    """The same twelve columns as 3 × 4 and as 4 × 3: no common refinement."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.reshape(-1, 3, 4).softmax(-1).sum() + y.reshape(-1, 4, 3).softmax(-1).sum()


def test_crossing_views_are_whole() -> None:
    program = capture_program(Crossing(), {"x": torch.zeros(2, 12)})
    analysis = analyse(program)
    unknown = [n for bounds in analysis.bounds for n, b in bounds.items() if not b.rule.known]
    assert len(unknown) == 1
