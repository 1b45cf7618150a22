"""The operators of mixtures of experts, in a form that the rules know and every device runs.

Tokens are sorted by expert, counted by a histogram, and multiplied in groups (`autopar.rules.grouped_product`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import Compute, Rewrite, arg, argument, before
from autopar.capture.nodes import value as _value
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.operators import output_of

_TOP = output_of(aten.topk.default, 1)
SCATTER_ADD = "torchtitan.deterministic_scatter_add.default"
FALLBACK = "transformers.grouped_mm_fallback.default"
_VIEWS = ("reshape", "to", "flatten")  # and casts that keep the order of elements


def operators_of_libraries(graph: fx.Graph) -> None:
    """Replace operators that libraries define by torch's operators that compute the same."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) == SCATTER_ADD and len(node.args) == 3 and not node.kwargs:
            out, index, source = node.args
            node.target, node.args = aten.scatter_add.default, (out, 0, index, source)


def one_grouped_product(graph: fx.Graph) -> None:
    """Replace PyTorch's grouped product of rows, and its fallback in transformers, by `GROUPED_MM`."""
    for node in list(graph.nodes):
        torchs = node.op == "call_function" and node.target is aten._grouped_mm.default
        if not torchs and str(node.target) != FALLBACK:
            continue
        x, weight, ends = (arg(node, 0), arg(node, 1), argument(node, "offs")) if torchs else node.args[:3]
        if ends is None or _value(x).dim() != 2 or _value(weight).dim() != 3:
            continue
        plain = not torchs or (argument(node, "bias") is None and _value(node).dtype == _value(x).dtype)
        if plain:
            node.target, node.args, node.kwargs = GROUPED_MM, (x, weight, ends), {}


def _histogram(emit: Compute, node: fx.Node) -> fx.Node | None:
    """A count that has an integer kernel, of ``histc(x, n, 0, n - 1)``, or up to n for positions among n."""
    source, (bins, low, high) = arg(node, 0), (argument(node, name) for name in ("bins", "min", "max"))
    if source.target is aten.to.dtype and _is_integer(arg(source, 0)):
        source = arg(source, 0)
    if not _is_integer(source) or _value(source).dim() != 1 or low != 0:
        return None
    if high != bins - 1 and not (high == bins and _are_positions(source, bins)):
        return None
    numbers = {"dtype": _value(source).dtype, "device": _value(source).device}
    columns = emit(aten.arange.default, bins, **numbers)
    equal = emit(aten.eq.Tensor, emit(aten.unsqueeze.default, source, 1), columns)
    return emit(aten.sum.dim_IntList, equal, [0], False, dtype=_value(node).dtype)


HISTOGRAMS: Mapping[Any, Rewrite] = {aten.histc.default: _histogram}


def _are_positions(node: fx.Node, size: int) -> bool:
    """Whether a node holds positions in a dimension of at most `size`."""
    top = before(node, _VIEWS)
    return top.target is _TOP and bool(_value(top.args[0]).shape[argument(top, "dim")] <= size)


def are_distinct(node: fx.Node) -> bool:
    """Whether a node holds positions whose last dimension has none of them twice."""
    top = before(node, _VIEWS)
    if top.target is not _TOP or argument(top, "dim") not in (-1, _value(top).dim() - 1):
        return False
    return bool(_value(top).shape[-1] == _value(node).shape[-1])


def _is_integer(node: Any) -> bool:
    value = _value(node)
    return not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype is not torch.bool
