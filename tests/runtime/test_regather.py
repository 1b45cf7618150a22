"""Regathering: the same results and fewer saved bytes; gathers that cannot be fused stay as they are."""

import pytest
import tiny_models
import torch
from equivalence import case_of, check, labelled
from torch import fx

from autopar.ir.sharding import Mesh
from autopar.lowering.functions import all_gather_to_replicate
from autopar.lowering.gather_linear import gather_linear, kept_gather_linear
from autopar.lowering.local_graph import fuse_gathers, local_graph

aten = torch.ops.aten


@pytest.mark.parametrize("tp", [2, 3])
def test_megatron_layers(tp: int) -> None:
    case, mesh = case_of(tiny_models.megatron(3 if tp == 3 else 2)), Mesh.of(dp=1, tp=tp)
    labels = labelled(case, mesh, True)
    check(case, labels, mesh)
    check(case, labels, mesh, regather=True)
    check(case, labels, mesh, fuse=True)
    index = next(i for i, b in enumerate(case.program.blocks) if b.name.startswith("layers"))
    block = case.program.blocks[index]
    for target, options in ((gather_linear, {"regather": True}), (kept_gather_linear, {"fuse": True})):
        graph = local_graph(case.analysis(mesh), block, index, labels[index], mesh, **options).graph
        fused = [n for n in graph.nodes if n.target is target]
        assert [len(n.args[3:]) // 2 for n in fused] == [3, 1]  # query, key and value; the MLP's first product
        assert not [n for n in graph.nodes if n.target is all_gather_to_replicate]


def gathered(*uses: str) -> fx.Graph:
    """A gather with the given uses."""
    graph = fx.Graph()
    x, weight, mesh = graph.placeholder("x"), graph.placeholder("weight"), graph.placeholder("mesh")
    whole = graph.call_function(all_gather_to_replicate, (x, mesh, 1))
    made: list[fx.Node] = []
    for use in uses:
        if use == "linear":
            made.append(graph.call_function(aten.linear.default, (whole, weight)))
        elif use == "chained":
            made.append(graph.call_function(aten.linear.default, (whole, made[-1])))
        elif use == "weight":
            made.append(graph.call_function(aten.linear.default, (weight, whole)))
        else:
            made.append(graph.call_function(aten.relu.default, (whole,)))
    graph.output(tuple(made))
    return graph


@pytest.mark.parametrize(
    ("uses", "fuses"),
    [
        (("linear",), True),
        (("linear", "linear"), True),
        (("linear", "relu"), False),
        (("weight",), False),
        (("linear", "chained"), False),
        ((), False),
    ],
)
def test_which_gathers_are_fused(uses: tuple[str, ...], fuses: bool) -> None:
    graph = gathered(*uses)
    before = [n.target for n in graph.nodes]
    fuse_gathers(graph, gather_linear)
    graph.lint()
    assert (gather_linear in [n.target for n in graph.nodes]) == fuses
    assert fuses or [n.target for n in graph.nodes] == before
