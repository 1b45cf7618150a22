"""The ends between which a value lies whatever the batch holds, found forward through the captured graph.

A comparison gives 0 or 1, `argmax` gives a position, `full` gives its number. Sums, products and copies of such values
have ends too. RoBERTa's positions, the running sum of a comparison, are an example.
"""

from collections.abc import Iterable, Mapping
from math import inf, prod
from typing import Any

import torch
from torch import fx

from autopar.capture.nodes import argument, operator_name, positional, shape

_SELECTING = """
    alias as_strided clone constant_pad_nd contiguous detach diagonal expand expand_as flatten flip gather index
    index_select lift_fresh_copy movedim narrow permute repeat repeat_interleave reshape roll select slice squeeze t
    tile to _to_copy transpose tril triu unflatten unfold unsqueeze view view_as
    expert_rows expert_take expert_untake
    amax amin cummax cummin kthvalue max median min sort topk
"""
# operators whose result holds elements of their first operand, and constants from their arguments
_SELECTIONS = frozenset(_SELECTING.split())
# operators whose result holds elements of several operands, with the positions of these operands
_CHOICES = {
    "masked_fill": (0, 2),
    "where": (1, 2),
    "maximum": (0, 1),
    "minimum": (0, 1),
    "index_put": (0, 2),
    "index_copy": (0, 3),
    "scatter": (0, 3),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "copy": (0, 1),
}
_POSITIONS = frozenset(["argmax", "argmin", "argsort"])
_FILLED = {"zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1}
_FILLED_WITH = {"full_like": 1, "new_full": 2}  # the position of the number
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes whose arithmetic does not wrap around
Ends = tuple[float, float]
_ANY: Ends = (-inf, inf)


class KnownRange:
    """The least and the largest number that the values of one graph can be. `ports` are those of placeholders."""

    def __init__(self, ports: Mapping[fx.Node, Ends] | None = None) -> None:
        self._found: dict[fx.Node, Ends] = dict(ports or {})

    def of(self, value: Any) -> Ends:
        """Both ends of a node's value, or of a number. They are infinite if nothing is known."""
        if isinstance(value, (bool, int, float)):
            return float(value), float(value)
        if not isinstance(value, fx.Node):
            return _ANY
        if value not in self._found:
            self._found[value] = self._ends(value)
        return self._found[value]

    def _ends(self, node: fx.Node) -> Ends:
        info = node.meta.get("info")  # a lifted scalar has none
        if info is not None and info.dtype is torch.bool:
            return 0, 1
        if info is None or node.op != "call_function":
            return _ANY
        name = operator_name(node)
        if name in _POSITIONS or holds_positions(node):
            return 0, _num_positions(node) - 1
        if name in _FILLED:
            return self.of(_FILLED[name])
        if name in _FILLED_WITH:
            return self.of(positional(node, _FILLED_WITH[name]))
        chosen = chosen_from(node)
        if chosen is not None:
            return _joined(self.of(each) for each in chosen)
        return self._of_arithmetic(node, name) if info.dtype in _EXACT else _ANY

    def _of_arithmetic(self, node: fx.Node, name: str) -> Ends:
        operand, other = positional(node, 0), positional(node, 1)
        first, second = self.of(operand), self.of(other)
        if name == "add" and node.kwargs.get("alpha", 1) == 1:
            return first[0] + second[0], first[1] + second[1]
        if name == "sub" and node.kwargs.get("alpha", 1) == 1:
            return first[0] - second[1], first[1] - second[0]
        if name == "mul":
            return _product(first, second)
        if name in ("cumsum", "sum"):
            count = num_summed(node)
            return _joined((first, _product(first, (count, count))))
        if name == "remainder" and isinstance(other, int) and other > 0:
            return 0, other - 1
        return _ANY


def chosen_from(node: fx.Node) -> list[Any] | None:
    """The tensors and numbers that the elements of a result are taken from. None for an operator that computes."""
    name = operator_name(node)
    if name in _CHOICES:
        is_changed = node.kwargs.get("reduce") is not None or (name == "index_put" and bool(positional(node, 3)))
        return None if is_changed else [positional(node, position) for position in _CHOICES[name]]
    if name in ("cat", "stack"):
        return list(node.args[0])  # type: ignore[arg-type]
    if name not in _SELECTIONS or holds_positions(node):
        return None
    values = [node.args[0]]
    if name == "constant_pad_nd":
        values.append(positional(node, 2, 0))
    if name in ("tril", "triu"):
        values.append(0)
    return values


def holds_positions(node: fx.Node) -> bool:
    """Whether a node is the second output of an operator such as `topk`, which holds positions, not elements."""
    return operator_name(node) in _SELECTIONS and str(node.target).endswith("_1")


def num_summed(node: fx.Node) -> int:
    """The largest number of elements that an element of a `sum` or `cumsum` adds up."""
    operand, dim = shape(node.args[0]), positional(node, 1)
    if operator_name(node) == "cumsum":
        return operand[dim] if operand else 1
    return prod(operand) // max(prod(shape(node)), 1)


def _num_positions(node: fx.Node) -> int:
    """The size of the dimension that positions count."""
    operand, dim = shape(node.args[0]), argument(node, "dim")
    return operand[dim] if isinstance(dim, int) and operand else prod(operand)


def _joined(ends: Iterable[Ends]) -> Ends:
    lows, highs = zip(*ends, strict=True)
    return min(lows), max(highs)


def _product(first: Ends, second: Ends) -> Ends:
    corners = [a * b if a and b else 0.0 for a in first for b in second]
    return min(corners), max(corners)
