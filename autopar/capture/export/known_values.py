"""The values of a graph that is being traced, as far as inputs, buffers and constants give them.

The nodes run once each, in the order of the trace, on real tensors. An operator that writes to a value changes every
value that shares its memory. So a value that is known becomes unknown if an unknown value is written to it.

Some unknown values are finite unless they overflow: weights, and their products, sums and norms with finite values. For
them the answers of `isfinite`, `isinf` and `isnan` are known.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import fx

from autopar._torch import exports, private
from autopar._torch.private import pytree
from autopar.capture.nodes import function, is_random, operator_name

# the answers about values that are finite
_ABOUT_FINITE = {"isfinite": True, "isinf": False, "isnan": False, "isposinf": False, "isneginf": False}
# operators whose result is finite if no product or sum overflows, whatever their operands are
_NORMS = frozenset(["layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "sigmoid", "tanh"])
# operators whose result is finite if their operands are finite and no product or sum overflows
_OPERATORS = """
    add sub mul neg abs relu gelu silu leaky_relu elu softplus clamp hardtanh dropout feature_dropout
    linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d embedding softmax mean sum
    max_pool2d avg_pool2d adaptive_avg_pool2d scaled_dot_product_attention
    cat stack view reshape flatten unflatten transpose permute t unsqueeze squeeze expand slice select narrow split
    chunk unbind getitem index gather roll alias clone contiguous detach to _to_copy
"""
_STAY_FINITE = frozenset(_OPERATORS.split())

_PYTHON = ("_operator", "operator", "math")  # modules of plain functions, such as `getitem`
RANDOM_NUMBERS = "random numbers"  # the reason of a value that random numbers decide


@dataclass(frozen=True, slots=True)
class Known:
    """A value, and the names of the inputs and the buffers that it is computed of."""

    value: Any
    inputs: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    assumes_finite: bool = False  # an answer about values that are finite unless they overflow


@dataclass(frozen=True, slots=True)
class Unknown:
    """The reason why a value is not known, such as the parameter that decides it."""

    reason: str
    is_finite: bool = False  # unless it overflows


class KnownValues:
    """Values by the nodes of one graph. `leaves` are the values of its placeholders."""

    def __init__(self, leaves: Mapping[fx.Node, Known | Unknown]) -> None:
        self._found: dict[fx.Node, Known | Unknown] = dict(leaves)
        self._graph = next(iter(leaves)).graph

    def of(self, node: fx.Node) -> Known | Unknown:
        """The value of a node at this point of the trace."""
        if node.graph is not self._graph:
            return Unknown("a value inside of a control-flow operator")
        for each in self._graph.nodes:
            if each not in self._found:
                self._found[each] = self._value(each)
        return self._found[node]

    def _value(self, node: fx.Node) -> Known | Unknown:
        if node.op == "get_attr":
            constant = exports.traced_constant(str(node.target))
            is_real = isinstance(constant, torch.Tensor) and not constant.is_meta
            return Known(_on_cpu(constant)) if is_real else Unknown(f"the constant {node.target!r}, which has no value")
        if node.op != "call_function":
            return Unknown(f"a value that is traced as {node.op}")
        operands = [self._found[operand] for operand in node.all_input_nodes]
        unknown = next((operand for operand in operands if isinstance(operand, Unknown)), None)
        known = [operand for operand in operands if isinstance(operand, Known)]
        new: Known | Unknown
        if unknown is not None:
            new = self._of_unknown(node, unknown)
        elif is_random(node):
            new = Unknown(RANDOM_NUMBERS, self._is_finite(node))
        elif not private.overloads_of(node.target) and getattr(node.target, "__module__", "") not in _PYTHON:
            new = Unknown(f"the result of {node.target}")
        else:
            inputs = frozenset[str]().union(*(operand.inputs for operand in known))
            buffers = frozenset[str]().union(*(operand.buffers for operand in known))
            assumes_finite = any(operand.assumes_finite for operand in known)
            new = self._computed(node, Known(None, inputs, buffers, assumes_finite))
        for operand in written_by(node):
            self._write(operand, new)
        return new

    def _of_unknown(self, node: fx.Node, unknown: Unknown) -> Known | Unknown:
        """The result of an operand that is unknown: an answer about finite values, or another unknown value."""
        name = operator_name(node)
        if name in _ABOUT_FINITE and unknown.is_finite:
            with exports.without_tracing():
                answers = torch.full(tuple(node.meta["val"].shape), _ABOUT_FINITE[name], device="cpu")
            return Known(answers, assumes_finite=True)
        return Unknown(unknown.reason, self._is_finite(node))

    def _is_finite(self, node: fx.Node) -> bool:
        """Whether a result is finite unless it overflows."""
        name = operator_name(node).removesuffix("_")
        if name in _NORMS:
            return True
        if name == "div":  # by a number that is not zero
            divisor = node.args[1]
            return isinstance(divisor, (int, float)) and divisor != 0 and self._has_finite_operands(node)
        if name == "scaled_dot_product_attention" and (len(node.args) > 3 or "attn_mask" in node.kwargs):
            return False  # a row may be masked whole
        return (name in _STAY_FINITE or is_random(node)) and self._has_finite_operands(node)

    def _has_finite_operands(self, node: fx.Node) -> bool:
        numbers = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float)]
        if not all(isfinite(number) for number in numbers):
            return False
        operands = [self._found[operand] for operand in node.all_input_nodes]
        if any(isinstance(operand, Unknown) and not operand.is_finite for operand in operands):
            return False
        with exports.without_tracing():
            leaves = pytree.tree_leaves([operand.value for operand in operands if isinstance(operand, Known)])
            tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
            return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

    def _computed(self, node: fx.Node, about: Known) -> Known | Unknown:
        given = fx.map_arg(
            (tuple(node.args), {k: v for k, v in node.kwargs.items() if k != "pin_memory"}), self._operand
        )
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), given)
        try:
            with exports.without_tracing():
                return replace(about, value=function(node)(*args, **dict(kwargs)))
        except Exception as error:  # the operator's own error comes again in the trace or in the step
            return Unknown(f"the result of {node.target}, which raised {error}")

    def _operand(self, node: fx.Node) -> Any:
        operand = self._found[node]
        assert isinstance(operand, Known)
        return operand.value

    def _write(self, operand: fx.Node, new: Known | Unknown) -> None:
        """Every value that shares memory with a written operand depends on the written value."""
        target = self._found[operand]
        if isinstance(target, Unknown):
            self._taint(new)
            return
        written = _storages(target.value)
        for node, held in self._found.items():
            if isinstance(held, Unknown) or written.isdisjoint(_storages(held.value)):
                continue
            if isinstance(new, Unknown):
                self._found[node] = new
            else:
                inputs, buffers = held.inputs | new.inputs, held.buffers | new.buffers
                self._found[node] = Known(held.value, inputs, buffers, held.assumes_finite or new.assumes_finite)

    def _taint(self, new: Known | Unknown) -> None:
        """Whose memory an unknown value shares is not known: after a write, all of them may be infinite."""
        if isinstance(new, Unknown) and new.is_finite:
            return
        for node, held in self._found.items():
            if isinstance(held, Unknown) and held.is_finite:
                self._found[node] = Unknown(held.reason)


def leaf(
    name: str, kind: str, value: torch.Tensor, buffers: Callable[[str], torch.Tensor] | None = None
) -> Known | Unknown:
    """The value of a placeholder: a parameter, an input, or a buffer, which `buffers` gives if it is on meta."""
    if kind == "parameter":
        remedy = "" if value.requires_grad else ", which is not trained (make it a buffer)"
        return Unknown(f"the parameter {name!r}{remedy}", is_finite=True)
    if kind == "buffer" and value.is_meta and buffers is not None:
        with exports.without_tracing():
            value = buffers(name)
    if value.is_meta:
        remedy = "build the model on the CPU on every rank"
        return Unknown(f"the {kind} {name!r}, which is on meta and has no values ({remedy})")
    names = frozenset({name})
    on_cpu = _on_cpu(value)
    return Known(on_cpu, inputs=names) if kind == "input" else Known(on_cpu, buffers=names)


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """A copy that operators may write to."""
    with exports.without_tracing():
        return value.detach().to("cpu", copy=True)


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that an operator writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for value in pytree.tree_leaves(given.get(argument.name)):
                if isinstance(value, fx.Node):
                    yield value


def _storages(value: Any) -> set[int]:
    return {private.storage_id(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}
