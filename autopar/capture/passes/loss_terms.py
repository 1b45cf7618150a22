"""A loss with several terms, such as a mean over valid targets plus a mean over tokens, over micro-batches.

The terms are those of a sum with factors: ``a / n + 0.1 * b``. A factor may be a number, or any value that is equal in
all micro-batches: a total over the batch (`autopar.capture.passes.batch_sums`), or a function of parameters.

The micro-batches' losses are added. So a term that is no sum over the batch, such as a mean, is divided by the number
of micro-batches (`OVER_MICRO_BATCHES`) if another term is a sum. A number that is added, as in ``loss + 0.0``, is a
term too. `autopar.capture.micro_batches` decides whether the result is right.
"""

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, compute, operator_name, value
from autopar.capture.passes.batch_sums import BatchSums
from autopar.rules.operators import OVER_MICRO_BATCHES

_UNARY = frozenset(["neg", "to", "_to_copy", "clone", "squeeze", "unsqueeze", "reshape"])
_PRODUCTS = frozenset(["mul", "div"])
_OVER_ALL = frozenset(["sum", "mean"])
_SUMS = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "rsub": aten.rsub.Tensor}
_Place = tuple[fx.Node, fx.Node]  # a node and an operand of it, which is a term
IsFree = Callable[[fx.Node], bool]


def numbers_as_terms(loss: fx.Node) -> None:
    """Replace a number that is added to a term of the loss by a constant tensor, unless the batch size decides it."""
    stack, seen = [loss], {loss}
    while stack:
        node = stack.pop()
        if _adds_a_number(node):
            like = value(node)
            number = compute(node, aten.full.default, [], node.args[1], dtype=like.dtype, device=like.device)
            node.target = _SUMS[operator_name(node)]
            node.args = (node.args[0], number, *node.args[2:])
        terms = [operand for operand in _linear_in(node, lambda _: True) if operand not in seen]
        seen.update(terms)
        stack += terms


def _adds_a_number(node: fx.Node) -> bool:
    if operator_name(node) not in _SUMS or node.meta.get("batch_power", 0) != 0:
        return False
    is_one = isinstance(value(node), torch.Tensor) and value(node).numel() == 1
    return is_one and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], Real)


def average_terms(loss: fx.Node, sums: BatchSums) -> None:
    """Divide the terms that are no sums over the batch by the number of micro-batches, if others are sums."""
    places = list(dict.fromkeys(_terms(loss, sums.free.__contains__)))
    powers = {term: _power(term, sums.free.__contains__) for _, term in places}
    if set(powers.values()) > {0}:
        for user, term in places:
            if powers[term] != 0:
                count = sums.num_micro_batches(term)
                user.replace_input_with(term, compute(user, OVER_MICRO_BATCHES, term, count))


def _terms(node: fx.Node, is_free: IsFree) -> Iterator[_Place]:
    """The terms of a number that is a sum, each with its reader. A number that is read elsewhere too is one term."""
    for operand in _linear_in(node, is_free) if node.meta.get("batch_power", 0) == 0 else ():
        is_sum = next(_linear_in(operand, is_free), None) is not None and operand.meta.get("batch_power", 0) == 0
        if is_sum and len(operand.users) == 1:
            yield from _terms(operand, is_free)
        else:
            yield node, operand


def _linear_in(node: fx.Node, is_free: IsFree) -> Iterator[fx.Node]:
    """The operands of which a number is a sum with factors. A free operand is a factor, or a term."""
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor) or not node.args:
        return
    name, operands = operator_name(node), [a for a in node.args if isinstance(a, fx.Node)]
    if name in _OVER_ALL and operands and value(node).dim() == 0:
        stack = operands[0]
        if operator_name(stack) in ("stack", "cat"):
            pieces: Any = stack.args[0]
            if all(value(piece).numel() == 1 for piece in pieces) and len(stack.users) == 1:
                yield stack
    elif name in ("stack", "cat"):
        yield from node.args[0]  # type: ignore[misc]
    elif value(node).numel() != 1 or any(value(operand).numel() != 1 for operand in operands):
        return
    elif name in _SUMS and len(operands) == 2:
        yield from operands
    elif name in _UNARY or (name in _PRODUCTS and operands[0] is node.args[0] and all(map(is_free, operands[1:]))):
        yield operands[0]
    elif name == "mul" and is_free(operands[0]):
        yield operands[1]


def _power(term: fx.Node, is_free: IsFree) -> int | None:
    """The power of the batch size of a term: 0 for a sum, -1 for a mean, None if its operators do not show it."""
    power: int | None = 0
    while not is_free(term) and term.op == "call_function" and power is not None:
        if operator_name(term) in ("mean", "sum"):
            return power - (operator_name(term) == "mean")
        if any(declared.name == "reduction" for declared in term.target._schema.arguments):  # type: ignore[union-attr]
            return {1: power - 1, 2: power}.get(argument(term, "reduction"))
        operands = list(_linear_in(term, is_free))
        number = term.meta.get("batch_power", 0)
        power = None if number is None else power + number
        if len(operands) != 1:
            return None
        (term,) = operands
    return None
