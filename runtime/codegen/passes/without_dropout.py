"""Dropout off, for verification: equality can be asked only of what does not draw random numbers."""

from dataclasses import replace

from torch import fx

from autopar._torch.operators import aten
from autopar.errors import InputError
from autopar.ir.program import Program

_SDPA = aten.scaled_dot_product_attention.default
_DROPOUT_P, TRAIN = 4, 2  # positions of arguments
OTHERS = (aten.bernoulli.default, aten.bernoulli.p, aten.rand_like.default, aten.randn_like.default)


def without_dropout(program: Program) -> tuple[Program, bool]:
    """The program with every dropout off, and whether it had any. Raises `InputError` where it draws otherwise."""
    found = False
    blocks = []
    for block in program.blocks:
        graph, changed = _quiet(block.graph, block.name)
        found |= changed
        blocks.append(replace(block, graph=graph) if changed else block)
    return (replace(program, blocks=tuple(blocks)) if found else program), found


def _quiet(graph: fx.Graph, where: str) -> tuple[fx.Graph, bool]:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    changed = False
    for old, node in zip(graph.nodes, copy.nodes, strict=True):
        node.meta = dict(old.meta)
        if node.target in OTHERS:
            raise InputError(
                f"block {where}: {node.target} draws random numbers, which one device and many ranks draw differently; "
                "verify the model without it"
            )
        if node.target is aten.dropout.default and node.args[TRAIN]:
            node.args, changed = (*node.args[:TRAIN], False), True
        if node.target is _SDPA and len(node.args) > _DROPOUT_P and node.args[_DROPOUT_P]:
            node.args, changed = (*node.args[:_DROPOUT_P], 0.0, *node.args[_DROPOUT_P + 1 :]), True
        if node.target is _SDPA and node.kwargs.get("dropout_p"):
            node.kwargs, changed = {**node.kwargs, "dropout_p": 0.0}, True
    return copy, changed
