"""The range of integers that every input may hold, found from the operators of the captured graph.

A lookup bounds its index operand: by the rows of an embedding table, the classes of a cross-entropy, or the length of
an indexed dimension (`autopar.capture.lookups`). The bounds of a result pass backward to its operands through views,
casts, shifts and masked fills (`_bounds_before`). An input must suit all its uses, so its range is the intersection of
their bounds.

`safe_ranges` are the ranges that are enough: no lookup meets an index outside if all inputs and constants are inside.
They are not needed in full, because a mask or a slice may hide an element from every lookup.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import mul
from typing import Any

import torch
from torch import fx

from autopar.capture.known_range import Ends, KnownRange, chosen_from, num_summed
from autopar.capture.lookups import Lookup, bounded, indices, mask_among_indices
from autopar.capture.nodes import before_copies, copies, operator_name, positional
from autopar.capture.value_range import Rising, ValueRange
from autopar.errors import InputError
from autopar.ir.program import Block, Program

_LOSSES_BY_PROBABILITY = frozenset(["binary_cross_entropy", "binary_cross_entropy_with_logits"])
_Bounds = Iterable[tuple[fx.Node, ValueRange]]


def input_ranges(program: Program, constants: Mapping[str, Ends] | None = None) -> dict[str, ValueRange]:
    """The range of every integer input, and of floating inputs that an operator bounds. `constants` are known ends."""
    bounds = _passed_back(program, lambda _, node: _bounds_of_uses(node), constants or {}).ranges
    names = {
        info.name
        for info in program.inputs
        if info.dtype is not torch.bool
        and (not info.dtype.is_floating_point or bounds.get(info.name, ValueRange()).is_bounded)
    }
    for name in sorted(names & bounds.keys()):
        if bounds[name].is_empty:
            raise InputError(
                f"no value of the input {name!r} is legal for every operator that reads it: "
                f"{'; '.join(bounds[name].bounded_by)}; change the model so that these bounds overlap"
            )
    return {name: bounds.get(name, ValueRange()) for name in sorted(names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeRanges:
    """Ranges by the name of an input or a constant."""

    ranges: Mapping[str, ValueRange]
    is_complete: bool  # then values inside keep the index of every lookup inside its own range


def safe_ranges(program: Program, lookups: Iterable[Lookup]) -> SafeRanges:
    """The ranges of inputs and constants that are enough for the given lookups."""
    by_node: dict[tuple[int, fx.Node], list[tuple[fx.Node, ValueRange]]] = {}
    for lookup in lookups:
        by_node.setdefault((lookup.call, lookup.node), []).append((lookup.index, lookup.allowed))
    return _passed_back(program, lambda call, node: by_node.get((call, node), ()), {})


def _passed_back(
    program: Program, uses: Callable[[int, fx.Node], _Bounds], constants: Mapping[str, Ends]
) -> SafeRanges:
    """The bounds of values by name that follow from `uses`, the bounds that a node of a call gives its operands."""
    bounds: dict[str, ValueRange] = {}
    is_complete = True
    for index, call in reversed(list(enumerate(program.calls))):
        block = program.blocks[call.block]
        wanted = {
            out: bounds[result] for out, result in zip(block.outputs, call.results, strict=True) if result in bounds
        }
        ports = {
            p: constants[a]
            for p, a in zip(block.ports, call.arguments, strict=True)
            if isinstance(a, str) and a in constants
        }
        ranges, all_passed = _port_bounds(block, wanted, partial(uses, index), ports)
        is_complete &= all_passed
        for port, allowed in ranges.items():
            argument = call.arguments[port]
            if isinstance(argument, str):
                bounds[argument] = bounds.get(argument, ValueRange()).both(allowed)
            else:
                is_complete &= allowed.allows(argument)
    return SafeRanges(ranges=bounds, is_complete=is_complete)


def _port_bounds(
    block: Block, wanted: Mapping[str, ValueRange], uses: Callable[[fx.Node], _Bounds], ends: Mapping[str, Ends]
) -> tuple[dict[int, ValueRange], bool]:
    """The bounds of a block's ports by position for results `wanted`, and whether they are enough."""
    bounds: dict[fx.Node, ValueRange] = {}
    known, all_passed = KnownRange({node: ends[node.name] for node in block.graph.nodes if node.name in ends}), True
    for node in reversed(block.graph.nodes):
        if node.name in wanted:
            bounds[node] = bounds.get(node, ValueRange()).both(wanted[node.name])
        if node.op != "call_function":
            continue
        pairs = list(uses(node))
        if node in bounds and not bounds[node].covers(*known.of(node)):
            before, passes_all = _bounds_before(node, bounds[node], known)
            pairs += before
            all_passed &= passes_all
        for operand, r in pairs:
            bounds[operand] = bounds.get(operand, ValueRange()).both(r)
    places = {port: place for place, port in enumerate(block.ports)}
    ports = {n: r for n, r in bounds.items() if n.op == "placeholder" and not r.covers(*known.of(n))}
    return {places[n.name]: r for n, r in ports.items()}, all_passed


def _bounds_of_uses(node: fx.Node) -> Iterator[tuple[fx.Node, ValueRange]]:
    """The operands of an operator that must be within bounds, and their bounds."""
    yield from indices(node)
    if operator_name(node) in _LOSSES_BY_PROBABILITY:
        yield from bounded(node, 1, 0, 2, "a probability")


# ---- operators that pass values on ----


def _bounds_before(
    node: fx.Node, allowed: ValueRange, known: KnownRange
) -> tuple[list[tuple[fx.Node, ValueRange]], bool]:
    """The bounds of an operator's operands that follow from the bounds of its result, and whether they are enough."""
    name = operator_name(node)
    chosen = chosen_from(node)
    if chosen is not None:
        mask, first_if = _chooser(node, name)
        numbers = [each for each in chosen if not isinstance(each, fx.Node)]
        are_allowed = all(isinstance(number, (int, float)) and allowed.allows(number) for number in numbers)
        bounds = [
            (each, _unless_replaced(each, mask, allowed, kept_if=first_if == (k == 0), may_replace=are_allowed))
            for k, each in enumerate(chosen)
            if isinstance(each, fx.Node)
        ]
        return bounds, are_allowed
    bounds = [(operand, allowed.before(*functions)) for operand, *functions in _functions(node, name, allowed, known)]
    bounds = [(operand, before) for operand, before in bounds if not before.is_empty]
    are_enough = bool(bounds)
    for operand, other in (node.args[:2], node.args[1::-1]) if name == "mul" else ():
        mask = _mask_of(other) if isinstance(other, fx.Node) else None
        if mask is not None and isinstance(operand, fx.Node):
            bounds.append((operand, _unless_replaced(operand, mask, allowed, kept_if=True)))
            are_enough |= allowed.allows(0)
    if name == "remainder" and isinstance(number := positional(node, 1), int) and number > 0:
        bounds.append((positional(node, 0), allowed.both(ValueRange(low=0, high=number))))  # it is its own remainder
        are_enough = True
    is_integer = not node.meta["info"].dtype.is_floating_point  # fractions may pass an end that integers do not
    return bounds, are_enough and is_integer


def _functions(
    node: fx.Node, name: str, allowed: ValueRange, known: KnownRange
) -> Iterator[tuple[Any, *tuple[Rising, ...]]]:
    """The operands of arithmetic with known numbers, and the result, or its ends, for an operand's value."""
    x, other = positional(node, 0), positional(node, 1)
    rounds = name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc"))
    if name in ("clamp", "clamp_min", "clamp_max", "relu"):
        low = 0 if name == "relu" else None if name == "clamp_max" else other
        high = other if name == "clamp_max" else positional(node, 2) if name == "clamp" else None
        least, most = (-inf if low is None else low), (inf if high is None else high)
        if not isinstance(least, fx.Node) and not isinstance(most, fx.Node):
            yield x, lambda v: min(max(v, least), most)
    elif name == "cumsum":
        count = num_summed(node)
        yield x, lambda v: min(v, v * count), lambda v: max(v, v * count)
    elif name in ("add", "sub"):
        alpha: Any = node.kwargs.get("alpha", 1)
        if name == "add" and alpha == 1 and isinstance(other, fx.Node) and _is_finite(known.of(x)):
            x, other = other, x
        ends = sorted(end * alpha * (1 if name == "add" else -1) for end in known.of(other))
        if isinstance(x, fx.Node) and _is_finite(ends):
            yield x, lambda v: v + ends[0], lambda v: v + ends[1]
    elif name == "mul":
        for operand, number in ((x, other), (other, x)):
            if isinstance(operand, fx.Node) and isinstance(number, int) and number > 0:
                yield operand, partial(mul, number)
    elif rounds and isinstance(other, int) and other > 0 and allowed.high > 0:  # else they round to different numbers
        yield x, lambda v: v // other


def _is_finite(ends: Sequence[float]) -> bool:
    return -inf < ends[0] and ends[1] < inf


def _chooser(node: fx.Node, name: str) -> tuple[Any, bool]:
    """The mask of an operator that chooses between two operands, and the mask value that chooses the first."""
    if name == "masked_fill":
        return positional(node, 1), False
    if name == "where":
        return positional(node, 0), True
    return (mask_among_indices(node), False) if name == "index_put" else (None, False)


def _unless_replaced(
    operand: fx.Node, mask: Any, allowed: ValueRange, *, kept_if: bool, may_replace: bool = True
) -> ValueRange:
    """The bounds of an operand whose elements are read only at positions where `mask` has the value `kept_if`."""
    while isinstance(mask, fx.Node) and operator_name(mask) in ("logical_not", "bitwise_not"):
        mask, kept_if = mask.args[0], not kept_if
    if not isinstance(mask, fx.Node) or mask.op != "call_function" or len(mask.args) < 2:
        return allowed
    compared, number = mask.args[:2]
    if not isinstance(compared, fx.Node) or not isinstance(number, int):
        return allowed
    (base, step), (other, passed) = _shifted(operand), _shifted(compared)
    if base is not other:
        return allowed
    number += step - passed
    name = operator_name(mask)
    kept = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq", "not_equal": "eq"}
    name = name if kept_if else kept.get(name, "")  # the comparison that an element meets if it is read
    if name in ("ne", "not_equal"):
        return replace(allowed, extra=allowed.extra | {number}) if may_replace else allowed
    least = {"ge": number, "gt": number + 1}.get(name)
    most = {"lt": number - 1, "le": number}.get(name)
    if may_replace:
        lower = -inf if least is not None and least >= allowed.low else allowed.low
        upper = inf if most is not None and most < allowed.high else allowed.high
    else:
        lower = allowed.low if least is None else max(allowed.low, least)
        upper = allowed.high if most is None else min(allowed.high, most + 1)
    return replace(allowed, low=lower, high=upper)


# ---- nodes ----


def _shifted(node: fx.Node) -> tuple[fx.Node, int]:
    """The value of which a node is a copy plus an integer, and that integer."""
    node = before_copies(node)
    operand, number = node.args[:2] if operator_name(node) in ("add", "sub") and not node.kwargs else (node, 0)
    if not isinstance(operand, fx.Node) or not isinstance(number, int):
        return node, 0
    return before_copies(operand), number if operator_name(node) == "add" else -number


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The mask, a value of truth, that a node is a copy or cast of. None if it is of no mask."""
    last = None
    for copy in copies(node):
        info = copy.meta.get("info")  # a lifted scalar has none
        if info is not None and info.dtype is torch.bool:
            last = copy
        elif last is not None:
            break
    return last
