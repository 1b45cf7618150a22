"""How the numbers of a captured graph depend on the batch size, found from two captures at different sizes."""

from typing import Any

import torch
from torch import fx

from autopar.capture.flat_graph import Flat, literal_of
from autopar.capture.forms import Sizes, batch_exponent
from autopar.capture.nodes import ARITHMETIC, numbers_of, operator_name

_SIZED = frozenset(["expand", "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "repeat", "zeros"])
_FACTORS = {"mul": 1, "div": -1}  # the sign of the exponent of a number in the second place


def mark_batch_powers(flat: Flat, small: Flat, sizes: Sizes, others: Sizes) -> None:
    """Set ``meta["batch_power"]`` of compared nodes: the power of the batch to which a number is proportional."""
    for node, twin in zip(flat.graph.nodes, small.graph.nodes, strict=True):
        if node.op == "call_function":
            node.meta["batch_power"] = twin.meta["batch_power"] = _power(node, twin, sizes, others)
        elif (literal := literal_of(flat, node)) is not None:
            is_equal = _is_equal(literal, literal_of(small, twin))
            node.meta["batch_power"] = twin.meta["batch_power"] = 0 if is_equal else None


def mark_without_twin(flat: Flat, batch: int) -> None:
    """Set ``meta["batch_power"]`` without a second capture: None for a whole factor that may be the batch size."""
    for node in flat.graph.nodes:
        if operator_name(node) in _FACTORS:
            whole = [number for number in numbers_of(node.args) if isinstance(number, int) and number]
            node.meta["batch_power"] = None if any(number % batch == 0 for number in whole) else 0


def _power(node: fx.Node, twin: fx.Node, sizes: Sizes, others: Sizes) -> int | None:
    numbers, theirs = (numbers_of([n.args, *n.kwargs.values()]) for n in (node, twin))
    if len(numbers) != len(theirs):
        return None
    differing = [(a, b) for a, b in zip(numbers, theirs, strict=True) if repr(a) != repr(b)]
    exponents = {batch_exponent(a, b, sizes, others) for a, b in differing} - {0}
    if not exponents:
        return 0
    name = operator_name(node)
    if name in ARITHMETIC:
        exponent = exponents.pop()
        is_factor = name in _FACTORS and not exponents and not node.kwargs and isinstance(node.args[0], fx.Node)
        return _FACTORS[name] * exponent if is_factor and exponent is not None else None
    scalars = [[a for a in (*n.args, *n.kwargs.values()) if isinstance(a, (int, float))] for n in (node, twin)]
    return 1 if name in _SIZED and scalars[0] == scalars[1] else None


def _is_equal(literal: torch.Tensor, other: Any) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and literal.shape == other.shape
        and (literal.is_meta or torch.equal(literal, other))
    )
