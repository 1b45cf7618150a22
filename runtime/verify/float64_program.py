"""Promotion: a program whose own casts to lower precision become float64, for verification.

transformers' norms, rotary tables and routers cast to float32 under any dtype of the model. Their rounding would drown
an equivalence of 1e-9. Both sides of a verification run the promoted program. The promoted reference is compared with
the unmodified model once, at float32 tolerance.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import private
from autopar._torch.operators import aten
from autopar.ir.precision import like_kind
from autopar.ir.program import Program
from autopar.rules.rule import TensorInfo
from autopar.rules.scaled_product import SCALED_LINEAR

_SDPA, _DROPOUT_P = aten.scaled_dot_product_attention.default, 4  # and the position of its argument
LOWER = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """A context with another default dtype of torch, in which integers become floating-point numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def promoted(program: Program, dtype: torch.dtype = torch.float64) -> Program:
    """A program in which every floating dtype, of parameters, inputs, casts and constants, is `dtype`."""
    blocks = tuple(replace(b, graph=promote_graph(b.graph, dtype)) for b in program.blocks)
    constants = replace(program.constants, graph=promote_graph(program.constants.graph, dtype))
    parameters = {n: replace(p, dtype=_higher(p.dtype, dtype)) for n, p in program.parameters.items()}
    inputs = tuple(replace(i, dtype=_higher(i.dtype, dtype)) for i in program.inputs)
    buffers = {n: replace(b, dtype=_higher(b.dtype, dtype)) for n, b in program.buffers.items()}
    return replace(program, blocks=blocks, constants=constants, parameters=parameters, inputs=inputs, buffers=buffers)


def without_attention_dropout(program: Program) -> Program:
    """The program with the dropout of `scaled_dot_product_attention` off: itself if it has none."""
    blocks = tuple(replace(b, graph=graph) if (graph := _quiet(b.graph)) else b for b in program.blocks)
    return program if all(map(operator.is_, blocks, program.blocks)) else replace(program, blocks=blocks)


def _quiet(graph: fx.Graph) -> fx.Graph | None:
    """A copy without dropout of attention. None if there is none."""
    copy, changed = deepcopy(graph), False
    for node in copy.nodes:
        if node.target is _SDPA and len(node.args) > _DROPOUT_P and node.args[_DROPOUT_P]:
            node.args, changed = (*node.args[:_DROPOUT_P], 0.0, *node.args[_DROPOUT_P + 1 :]), True
        if node.target is _SDPA and node.kwargs.get("dropout_p"):
            node.kwargs, changed = {**node.kwargs, "dropout_p": 0.0}, True
    return copy if changed else None


def casts_lower(program: Program) -> bool:
    """Whether a program computes values of a lower precision than float64."""
    graphs = [program.constants.graph, *(block.graph for block in program.blocks)]
    infos = (node.meta.get("info") for graph in graphs for node in graph.nodes)
    return any(info is not None and info.dtype in LOWER for info in infos)


def _higher(value: Any, dtype: torch.dtype) -> Any:
    return like_kind(value, dtype) if value in LOWER or value is torch.complex64 else value


def promote_graph(graph: fx.Graph, dtype: torch.dtype) -> fx.Graph:
    """A copy of a graph with every floating dtype literal and every `TensorInfo` promoted."""
    copy = deepcopy(graph)
    for old, node in zip(graph.nodes, copy.nodes, strict=True):
        if "info" in node.meta:
            info: TensorInfo = node.meta["info"]
            node.meta["info"] = replace(info, dtype=_higher(info.dtype, dtype))
        if isinstance(node.meta.get("literal"), torch.Tensor):
            literal = node.meta["literal"]
            node.meta["literal"] = literal.to(_higher(literal.dtype, dtype))
        node.args = tuple(_higher(a, dtype) if isinstance(a, torch.dtype) else a for a in node.args)
        node.kwargs = {k: _higher(v, dtype) if isinstance(v, torch.dtype) else v for k, v in node.kwargs.items()}
        if node.target is SCALED_LINEAR:  # operands of eight bits
            node.target, node.args = aten.linear.default, node.args[:2]
        if _has_default_dtype(old):
            node.kwargs = {**node.kwargs, "dtype": dtype}
    return copy


def _has_default_dtype(node: fx.Node) -> bool:
    """Whether a node makes a tensor of torch's default dtype of nothing, as `torch.randn(3)` does."""
    if node.op != "call_function" or node.all_input_nodes or not private.overloads_of(node.target):
        return False
    info = node.meta.get("info")
    place = next((i for i, a in enumerate(node.target._schema.arguments) if a.name == "dtype"), None)  # type: ignore[union-attr]
    if info is None or info.dtype not in LOWER or place is None:
        return False
    return node.kwargs.get("dtype") is None and len(node.args) <= place
