"""Pointwise operators: factors from shapes, operands broadcast. They count 0 FLOP; memory traffic prices them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar._torch.operators import aten
from autopar.rules.families._notation import broadcast, dims, is_zero, rule_from, slots_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Rule, Slot

Sets = list[set[int]]


def _sum_of(*positions: int) -> Callable[[Call], Sets]:
    """Operators that add their operands: partial together, and only when no number is added."""

    def sets(call: Call) -> Sets:
        arguments = [call.args[p] for p in positions]
        return [set(slots_of(arguments))] if all(isinstance(a, Slot) for a in arguments) else []

    return sets


def _first(call: Call) -> Sets:
    return [set(slots_of(call.args[:1]))]


def _quotient(call: Call) -> Sets:
    """A rounded quotient is not linear."""
    return [] if call.named("rounding_mode") is not None else _first(call)


def _cast(call: Call) -> Sets:
    """Rounding aside, casts are linear, but not from floating point to integers."""
    to_integer = not call.output.dtype.is_floating_point
    return [] if to_integer and call.operands[0].dtype.is_floating_point else [{0}]


def _selection(*positions: int) -> Callable[[Call], Sets]:
    """Operators that choose between two values: linear in both together, in one if the other is 0."""

    def sets(call: Call) -> Sets:
        chosen = [call.args[p] for p in positions]
        return [set(slots_of(chosen))] if all(isinstance(a, Slot) or is_zero(a) for a in chosen) else []

    return sets


def _add_product(call: Call) -> Sets:
    addend, a, b = slots_of(call.args[:3])
    return [{addend, a}, {addend, b}]


_OF_FIRST = """
    true_divide neg positive clone detach deg2rad rad2deg real imag _conj conj conj_physical resolve_conj
"""
_LINEAR: dict[str, Callable[[Call], Sets]] = {
    **dict.fromkeys(_OF_FIRST.split(), _first),
    **dict.fromkeys(["add", "sub", "rsub", "addcdiv", "lerp", "complex"], _sum_of(0, 1)),
    "mul": lambda call: [{k} for k in slots_of(call.args[:2])],
    "div": _quotient,
    "to": _cast,
    "_to_copy": _cast,
    "where": _selection(1, 2),
    "masked_fill": _selection(0, 2),
    "addcmul": _add_product,
}

_NAMES = """
    __and__ __lshift__ __or__ __rshift__ __xor__
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone copysign cos cosh deg2rad
    complex conj_physical detach digamma div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod
    frac ge gelu gt
    hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le leaky_relu lerp lgamma log
    log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mish mul nan_to_num ne neg nextafter not_equal polar positive pow rad2deg reciprocal
    relu
    relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub tan
    tanh threshold true_divide trunc where xlogy
"""
OPERATORS = tuple(_NAMES.split())


def overloads(name: str) -> Iterator[Any]:
    """The functional overloads of an operator that take tensors and yield one tensor."""
    packet = getattr(aten, name)
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        tensors = [a for a in schema.arguments if isinstance(a.type, torch.TensorType)]
        yields_one = len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TensorType)
        if tensors and yields_one and not schema.is_mutable and not any(a.is_out for a in schema.arguments):
            yield getattr(packet, overload)


def pointwise(call: Call) -> Rule:
    """Every dimension of the output is a parallel factor; operands broadcast."""
    spec = dims(call.output.shape)
    name = str(call.target).split(".")[1]
    sets = _LINEAR[name](call) if name in _LINEAR else []
    if name == "mul" and len(slots_of(call.args[:2])) == 2 and len(call.operands) == 1:
        sets = []  # a square
    return rule_from(call, broadcast(call, spec), spec, linear=sets)


for _name in OPERATORS:
    rule(*overloads(_name))(pointwise)
rule(aten.to.dtype, aten._to_copy.default)(pointwise)
rule(aten.real.default, aten.imag.default, aten._conj.default, aten.conj.default, aten.angle.default)(pointwise)
rule(aten.resolve_conj.default)(pointwise)
