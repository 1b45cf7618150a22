"""A loss with several terms, such as a mean over valid targets plus a mean over tokens, over micro-batches.

The terms are those of a sum with factors: ``a / n + 0.1 * b``. There are two kinds:

- ``a / n``, where n depends on inputs alone. It is divided by the sum of n over all micro-batches (S2).
- Any other term b. It counts as ``b / m``, where m is the number of micro-batches (`OVER_MICRO_BATCHES`).

A number that is added, as in ``loss + 0.0``, is a term too.

All divisors are elements of one value, the program's denominator. The last element is 1 for each micro-batch, so its
sum is m. `autopar.capture.micro_batches` decides whether each term is a sum or a mean.
"""

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import closure, compute, operator_name, value
from autopar.rules.operators import OVER_MICRO_BATCHES
from autopar.rules.rule import TensorInfo

_UNARY = frozenset(["neg", "to", "_to_copy", "clone", "squeeze", "unsqueeze", "reshape"])
_OVER_ALL = frozenset(["sum", "mean"])
_SUMS = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "rsub": aten.rsub.Tensor}
Place = tuple[fx.Node, fx.Node]  # a node and an operand of it, which is a term


def numbers_as_terms(graph: fx.Graph, loss: fx.Node) -> None:
    """Replace every number that is added to a term of the loss by a constant tensor.

    A number that depends on the batch size stays a number.
    """
    stack, seen = [loss], {loss}
    while stack:
        node = stack.pop()
        if _adds_a_number(node):
            with graph.inserting_before(node):
                like = value(node)
                number = _new(graph, node, aten.full.default, [], node.args[1], dtype=like.dtype, device=like.device)
            node.target = _SUMS[operator_name(node)]
            node.args = (node.args[0], number, *node.args[2:])
        found = [operand for operand in _linear_in(node) if operand not in seen]
        seen.update(found)
        stack += found


def _adds_a_number(node: fx.Node) -> bool:
    if node.op != "call_function" or operator_name(node) not in _SUMS or node.meta.get("batch_literal"):
        return False
    is_one = isinstance(value(node), torch.Tensor) and value(node).numel() == 1
    return is_one and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], Real)


def denominator_of(graph: fx.Graph, loss: fx.Node, is_of_inputs: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The divisor of the loss. If the loss has several terms, they are rewritten and the divisor holds all of theirs.

    `is_of_inputs` says whether a node is computed from inputs, not from parameters, and is no constant.
    """
    if _is_ratio(loss, is_of_inputs):
        return _divisor(loss)
    places = list(dict.fromkeys(_terms(loss)))
    ratios = [(user, term) for user, term in places if _is_ratio(term, is_of_inputs)]
    others = [(user, term) for user, term in places if (user, term) not in ratios]
    divisors = list(dict.fromkeys(_divisor(term) for _, term in ratios))
    if not divisors:
        return None
    if len(divisors) == 1 and not others:
        return divisors[0]
    return _one_divisor(graph, ratios, others, divisors)


def _is_ratio(node: fx.Node, is_of_inputs: Callable[[fx.Node], bool]) -> bool:
    if node.op != "call_function" or node.target is not aten.div.Tensor or len(node.args) > 2 or node.kwargs:
        return False
    divisor = node.args[1]
    return isinstance(divisor, fx.Node) and value(divisor).dim() == 0 and is_of_inputs(divisor)


def _divisor(ratio: fx.Node) -> fx.Node:
    divisor = ratio.args[1]
    assert isinstance(divisor, fx.Node), ratio
    return divisor


def _terms(node: fx.Node) -> Iterator[Place]:
    """The terms of a number that is a sum, each with the node that reads it.

    A number that is read elsewhere too, such as another output of the model, is one term.
    """
    for operand in _linear_in(node):
        if len(operand.users) == 1 and next(_linear_in(operand), None) is not None:
            yield from _terms(operand)
        else:
            yield node, operand


def _linear_in(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of which a number is a sum with factors."""
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor) or not node.args:
        return
    name, operands = operator_name(node), [a for a in node.args if isinstance(a, fx.Node)]
    if name in _OVER_ALL and operands and value(node).dim() == 0:
        stack = operands[0]
        if stack.op == "call_function" and operator_name(stack) in ("stack", "cat"):
            pieces: Any = stack.args[0]
            if all(value(piece).numel() == 1 for piece in pieces) and len(stack.users) == 1:
                yield stack
    elif name in ("stack", "cat"):
        yield from node.args[0]  # type: ignore[misc]
    elif value(node).numel() != 1 or any(value(operand).numel() != 1 for operand in operands):
        return
    elif name in _SUMS and len(operands) == 2:
        yield from operands
    elif name in _UNARY or (name in ("mul", "div") and len(operands) == 1 and operands[0] is node.args[0]):
        yield operands[0]


def _one_divisor(graph: fx.Graph, ratios: list[Place], others: list[Place], divisors: list[fx.Node]) -> fx.Node:
    """Divide every term by an element of one value. Returns this value."""
    needed = closure(divisors)
    first = next(node for node in graph.nodes if node.op == "call_function" and node not in needed)
    for node in needed:  # before all terms
        if node.op != "placeholder":
            first.prepend(node)
    with graph.inserting_before(first):
        dtype = value(divisors[0]).dtype
        held = [d if value(d).dtype == dtype else _new(graph, d, aten.to.dtype, d, dtype) for d in divisors]
        held += [_new(graph, held[0], aten.ones_like.default, held[0])] if others else []
        every = _new(graph, held[0], aten.stack.default, held)
    for user, term in ratios:
        with graph.inserting_before(user):
            divisor = _new(graph, user, aten.select.int, every, 0, divisors.index(_divisor(term)))
            divided = _new(graph, user, aten.div.Tensor, term.args[0], _cast(graph, divisor, _divisor(term)))
        user.replace_input_with(term, divided)
    for user, term in others:
        with graph.inserting_before(user):
            count = _new(graph, user, aten.select.int, every, 0, len(divisors))
            divided = _new(graph, user, OVER_MICRO_BATCHES, term, count)
        user.replace_input_with(term, divided)
    return every


def _cast(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    dtype = value(like).dtype
    return node if value(node).dtype == dtype else _new(graph, node, aten.to.dtype, node, dtype)


def _new(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = compute(graph, like, target, *args, **kwargs)
    flows = any(n.meta["info"].differentiable for n in node.all_input_nodes)
    node.meta["info"] = TensorInfo(tuple(value(node).shape), value(node).dtype, flows)
    return node
