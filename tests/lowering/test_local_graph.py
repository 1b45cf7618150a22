"""The names in generated code: no variable hides a function, and a converted value is named after its source."""

import tiny_models
from equivalence import case_of, labelled

from autopar.ir.sharding import Mesh
from autopar.lowering.conversions import BY_FUNCTION
from autopar.lowering.local_graph import local_graph


def test_converted_values_are_named_after_their_value() -> None:
    case, mesh = case_of(tiny_models.megatron()), Mesh.of(dp=2, tp=2)
    labels = labelled(case, mesh, True)
    found = set()
    for index, block in enumerate(case.program.blocks):
        nodes = local_graph(case.analysis(mesh), block, index, labels[index], mesh).graph.nodes
        called = {n.target.__name__ for n in nodes if callable(n.target)}
        assert not called & {n.name for n in nodes}
        for node in nodes:
            if getattr(node.target, "__name__", "") in BY_FUNCTION:
                source = node.all_input_nodes[0]
                assert node.name.startswith(f"{source.name}_")
                found.add(node.name.removeprefix(f"{source.name}_").rstrip("_0123456789"))
    assert {"scattered", "gathered", "summed"} <= found
