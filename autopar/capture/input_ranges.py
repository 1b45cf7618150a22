"""The range of integers that every input may hold, found from the operators of the captured graph.

A lookup bounds its index operand: by the rows of an embedding table, the classes of a cross-entropy, or the length of
an indexed dimension (`_bounds_of_uses`). The bounds of a result pass backward to its operands through views, casts,
shifts and masked fills (`_bounds_before`). An input must suit all its uses, so its range is the intersection of their
bounds.
"""

from collections.abc import Iterator, Mapping
from math import ceil, floor, inf
from typing import Any

import torch
from torch import fx

from autopar.capture.nodes import operator_name
from autopar.capture.value_range import ValueRange
from autopar.errors import InputError
from autopar.ir.program import Block, Program

_SELECTING = """
    alias as_strided clone constant_pad_nd contiguous detach diagonal expand expand_as flatten flip gather index
    index_select lift_fresh_copy movedim narrow permute repeat repeat_interleave reshape roll select slice squeeze t
    tile to _to_copy transpose tril triu unflatten unfold unsqueeze view view_as
    amax amin cummax cummin kthvalue max median min sort topk
"""
# operators whose result holds elements of their first operand, and constants from their arguments
_SELECTIONS = frozenset(_SELECTING.split())
# operators whose result holds elements of several operands, with the positions of these operands
_CHOICES: Mapping[str, tuple[int, ...]] = {
    "masked_fill": (0, 2),
    "where": (1, 2),
    "index_put": (0, 2),
    "index_add": (0,),
    "index_copy": (0, 3),
    "scatter": (0, 3),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "copy": (0, 1),
}
_LOOKUPS_ALONG_A_DIM = frozenset(
    ["gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill"]
)
_LOSSES_BY_CLASS = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"])
_LOSSES_BY_PROBABILITY = frozenset(["binary_cross_entropy", "binary_cross_entropy_with_logits"])
_SAME_ELEMENTS = frozenset(["alias", "clone", "contiguous", "detach", "lift_fresh_copy", "to", "_to_copy"])
_IGNORE_INDEX = 4  # the position of the argument in every loss by class


def input_ranges(program: Program) -> dict[str, ValueRange]:
    """The range of every integer input. It is unbounded if no operator bounds the input.

    Raises `InputError` if no value of an input suits all operators that read it.
    """
    names = {i.name for i in program.inputs if not i.dtype.is_floating_point and i.dtype is not torch.bool}
    bounds: dict[str, ValueRange] = {}
    for call in reversed(program.calls):
        block = program.blocks[call.block]
        wanted = {
            out: bounds[result] for out, result in zip(block.outputs, call.results, strict=True) if result in bounds
        }
        for port, found in _port_bounds(block, wanted).items():
            argument = call.arguments[port]
            if isinstance(argument, str):
                bounds[argument] = bounds.get(argument, ValueRange()).both(found)
    for name in sorted(names & bounds.keys()):
        if bounds[name].is_empty:
            raise InputError(
                f"no value of the integer input {name!r} is legal for every operator that reads it: "
                f"{'; '.join(bounds[name].bounded_by)}; change the model so that these bounds overlap"
            )
    return {name: bounds.get(name, ValueRange()) for name in sorted(names)}


def _port_bounds(block: Block, wanted: Mapping[str, ValueRange]) -> dict[int, ValueRange]:
    """The bounds of a block's ports by position, if the results must stay within `wanted`."""
    bounds: dict[fx.Node, ValueRange] = {}
    for node in reversed(block.graph.nodes):
        if node.name in wanted:
            bounds[node] = bounds.get(node, ValueRange()).both(wanted[node.name])
        if node.op != "call_function":
            continue
        pairs = list(_bounds_of_uses(node))
        if node in bounds:
            pairs += _bounds_before(node, bounds[node])
        for operand, found in pairs:
            bounds[operand] = bounds.get(operand, ValueRange()).both(found)
    places = {port: place for place, port in enumerate(block.ports)}
    return {places[n.name]: found for n, found in bounds.items() if n.op == "placeholder"}


# ---- operators that look up ----


def _bounds_of_uses(node: fx.Node) -> Iterator[tuple[fx.Node, ValueRange]]:
    """The index operands of an operator, and the values that they may hold."""
    name = operator_name(node)
    if name in ("embedding", "embedding_bag"):
        yield from _bounded(node, 1, 0, _shape(node.args[0])[0], "rows of a table")
    elif name == "one_hot" and isinstance(_arg(node, 1), int) and _arg(node, 1) >= 0:
        yield from _bounded(node, 0, 0, _arg(node, 1), "classes")
    elif name in _LOSSES_BY_CLASS:
        logits = _shape(node.args[0])
        ignored = _arg(node, _IGNORE_INDEX, -100)
        yield from _bounded(node, 1, 0, logits[min(1, len(logits) - 1)], "classes", ignored)
    elif name in _LOSSES_BY_PROBABILITY:
        yield from _bounded(node, 1, 0, 2, "a probability")
    elif name in _LOOKUPS_ALONG_A_DIM:
        shape, dim = _shape(node.args[0]), node.args[1]
        assert isinstance(dim, int), node
        yield from _bounded(node, 2, 0, shape[dim] if shape else 1, "positions")
    elif name in ("index", "index_put") and _masks(node) is None:
        shape, indices = _shape(node.args[0]), node.args[1]
        assert isinstance(indices, (list, tuple)), node
        for size, index in zip(shape, indices, strict=False):
            if isinstance(index, fx.Node):
                yield index, _range(node, -size, size, "positions")


def _bounded(
    node: fx.Node, position: int, low: int, high: int, what: str, ignored: int | None = None
) -> Iterator[tuple[fx.Node, ValueRange]]:
    operand = _arg(node, position)
    if isinstance(operand, fx.Node):
        yield operand, _range(node, low, high, what, ignored)


def _range(node: fx.Node, low: int, high: int, what: str, ignored: int | None = None) -> ValueRange:
    skipped = frozenset() if ignored is None else frozenset({ignored})
    where = node.meta.get("key", node.name)
    bound = f"{where} reads {low} to {high - 1} ({what})"
    return ValueRange(low=low, high=high, extra=skipped, ignored=skipped, bounded_by=(bound,))


# ---- operators that pass values on ----


def _bounds_before(node: fx.Node, found: ValueRange) -> list[tuple[fx.Node, ValueRange]]:
    """The bounds of an operator's operands that follow from the bounds of its result. Empty for an unknown operator."""
    name = operator_name(node)
    if str(node.target).endswith(("_1", "_2")):  # a second or third output holds positions, not elements
        return []
    if name in _CHOICES:
        places = [_arg(node, position) for position in _CHOICES[name]]
        mask, first_if = _chooser(node, name)
        return [
            (operand, _unless_replaced(operand, mask, found, kept_if=first_if == (k == 0)))
            for k, operand in enumerate(places)
            if isinstance(operand, fx.Node)
        ]
    if name in ("cat", "stack"):
        operands = node.args[0]
        assert isinstance(operands, (list, tuple)), node
        return [(operand, found) for operand in operands if isinstance(operand, fx.Node)]
    operand = _arg(node, 0)
    if name == "mul":
        return _bounds_of_factors(node, found)
    if not isinstance(operand, fx.Node):
        return []
    if name in _SELECTIONS:
        return [(operand, found)]
    before = _bounds_before_arithmetic(node, name, found)
    return [] if before is None else [(operand, before)]


def _bounds_before_arithmetic(node: fx.Node, name: str, found: ValueRange) -> ValueRange | None:
    """The bounds of the first operand of an arithmetic operator whose other operands are numbers."""
    if name in ("clamp", "clamp_min", "clamp_max", "relu"):
        low = 0 if name == "relu" else None if name == "clamp_max" else _arg(node, 1)
        high = _arg(node, 1 if name == "clamp_max" else 2) if name in ("clamp", "clamp_max") else None
        return _before_clamp(found, low, high)
    number = _arg(node, 1)
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    if name in ("add", "sub"):
        step = number * int(node.kwargs.get("alpha", 1)) * (1 if name == "add" else -1)  # type: ignore[arg-type]
        return found.shifted(-step)
    if number <= 0:
        return None
    if name == "remainder":  # every operand gives a result from 0 to number - 1
        return None if found.low <= 0 and number <= found.high else found.both(ValueRange(low=0, high=number))
    if name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc")):
        return found.between(found.low * number, found.high * number)
    return None


def _bounds_of_factors(node: fx.Node, found: ValueRange) -> list[tuple[fx.Node, ValueRange]]:
    """The bounds of a factor whose other factor is a positive number, or a mask of zeros and ones."""
    factors = node.args[:2]
    bounds = []
    for operand, other in (factors, factors[::-1]):
        if not isinstance(operand, fx.Node):
            continue
        if isinstance(other, int) and other > 0:
            last = floor((found.high - 1) / other) + 1 if found.high != inf else inf
            first = ceil(found.low / other) if found.low != -inf else -inf
            bounds.append((operand, found.between(first, last)))
        elif isinstance(other, fx.Node) and _is_mask(other):
            bounds.append((operand, _unless_replaced(operand, _root(other), found, kept_if=True)))
    return bounds


def _before_clamp(found: ValueRange, low: Any, high: Any) -> ValueRange:
    lower = -inf if isinstance(low, int) and found.low <= low < found.high else found.low
    upper = inf if isinstance(high, int) and found.low <= high < found.high else found.high
    return found.between(lower, upper)


def _chooser(node: fx.Node, name: str) -> tuple[Any, bool]:
    """The mask of an operator that chooses between two operands, and the mask value that chooses the first."""
    if name == "masked_fill":
        return _arg(node, 1), False
    if name == "where":
        return _arg(node, 0), True
    return (_masks(node), False) if name == "index_put" else (None, False)


def _masks(node: fx.Node) -> fx.Node | None:
    """The first mask among the indices of an `index` or `index_put`. None if there is no mask."""
    indices = node.args[1]
    assert isinstance(indices, (list, tuple)), node
    masks = [i for i in indices if isinstance(i, fx.Node) and i.meta["info"].dtype in (torch.bool, torch.uint8)]
    return masks[0] if masks else None


def _unless_replaced(operand: fx.Node, mask: Any, found: ValueRange, *, kept_if: bool) -> ValueRange:
    """The bounds of an operand whose elements are read only at positions where `mask` has the value `kept_if`.

    If the mask compares the operand itself with a number, some values are never read.
    """
    while isinstance(mask, fx.Node) and _operator_name(mask) in ("logical_not", "bitwise_not"):
        mask, kept_if = mask.args[0], not kept_if
    if not isinstance(mask, fx.Node) or mask.op != "call_function" or len(mask.args) < 2:
        return found
    compared, number = mask.args[:2]
    if not isinstance(compared, fx.Node) or _root(compared) is not _root(operand) or not isinstance(number, int):
        return found
    name = operator_name(mask)
    kept = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq", "not_equal": "eq"}
    name = name if kept_if else kept.get(name, "")  # the comparison that an element meets if it is read
    if name in ("ne", "not_equal"):
        return found.also(number)
    least = {"ge": number, "gt": number + 1}.get(name)
    most = {"lt": number - 1, "le": number}.get(name)
    lower = -inf if least is not None and least >= found.low else found.low
    upper = inf if most is not None and most < found.high else found.high
    return found.between(lower, upper)


# ---- nodes ----


def _operator_name(node: fx.Node) -> str | None:
    return operator_name(node) if node.op == "call_function" else None


def _root(node: fx.Node) -> fx.Node:
    """The value before all copies and casts."""
    while _operator_name(node) in _SAME_ELEMENTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_mask(node: fx.Node) -> bool:
    return _root(node).meta["info"].dtype is torch.bool


def _shape(node: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = tuple(node.meta["info"].shape)
    return shape


def _arg(node: fx.Node, position: int, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else default
