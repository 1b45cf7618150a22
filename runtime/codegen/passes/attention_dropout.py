"""Dropout of attention off, for verification: a fused operator draws its mask, so no rank can take a part of it."""

from dataclasses import replace

from torch import fx

from autopar._torch.operators import aten
from autopar.ir.program import Program

_SDPA = aten.scaled_dot_product_attention.default
_DROPOUT_P = 4  # position of the argument


def without_attention_dropout(program: Program) -> tuple[Program, bool]:
    """The program with the dropout of `scaled_dot_product_attention` off, and whether it had any."""
    has_dropout = False
    blocks = []
    for block in program.blocks:
        graph, changed = _quiet(block.graph)
        has_dropout |= changed
        blocks.append(replace(block, graph=graph) if changed else block)
    return (replace(program, blocks=tuple(blocks)) if has_dropout else program), has_dropout


def _quiet(graph: fx.Graph) -> tuple[fx.Graph, bool]:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    changed = False
    for old, node in zip(graph.nodes, copy.nodes, strict=True):
        node.meta = dict(old.meta)
        if node.target is _SDPA and len(node.args) > _DROPOUT_P and node.args[_DROPOUT_P]:
            node.args, changed = (*node.args[:_DROPOUT_P], 0.0, *node.args[_DROPOUT_P + 1 :]), True
        if node.target is _SDPA and node.kwargs.get("dropout_p"):
            node.kwargs, changed = {**node.kwargs, "dropout_p": 0.0}, True
    return copy, changed
