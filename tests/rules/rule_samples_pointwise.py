"""Sample calls of pointwise operators: per operator the domain of its operands, the arguments from its schema."""

from typing import Any

import torch
from rule_samples import Arguments, Draw, constant, sampler

from autopar.rules.families.pointwise import overloads

aten = torch.ops.aten

REAL = """
    abs add asinh atan atan2 celu ceil clamp clamp_max clamp_min clone
    complex conj_physical copysign cos cosh deg2rad detach elu eq erf
    erfc exp exp2 expm1 floor fmax fmin frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot
    isfinite isinf isnan le leaky_relu lerp log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor lt maximum minimum mish mul nan_to_num ne neg nextafter not_equal polar
    positive rad2deg relu relu6 round
    rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink square sub tan tanh threshold trunc addcmul
    sqrt rsqrt reciprocal
"""
POSITIVE = """
    acosh addcdiv digamma div floor_divide fmod lgamma log log10 log1p log2 pow remainder true_divide xlogy
"""
UNIT = "acos asin atanh erfinv logit"
INTEGER = """
    __and__ __lshift__ __or__ __rshift__ __xor__
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
"""
WITHOUT_GRADIENT = {"floor_divide", "heaviside", "remainder"}


def _operand(d: Draw, domain: str, shape: list[int]) -> torch.Tensor:
    if domain == "integer":
        return d.ids(5, *shape)
    if domain == "unit":
        return d.real(*shape).sigmoid() * 0.8 + 0.1
    if domain == "positive":
        return d.real(*shape).abs() + 1.1
    return d.real(*shape) + 0.05  # no exact zeros, where gradients jump


def _scalar(d: Draw, domain: str, name: str) -> Any:
    if domain == "integer":
        return d.choice(1, 2)
    return {"value": 0.75, "lambd": 0.5, "decimals": 1, "eps": None}.get(name, d.choice(2, 1.5))


def _arguments(target: Any, domain: str) -> Any:
    """Tensors that broadcast against each other, and numbers, for one overload."""
    name = str(target).split(".")[1]

    def draw(d: Draw) -> Arguments:
        shape = d.sizes(1, 3)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in target._schema.arguments:
            kind, value = str(argument.type), None
            if kind == "Tensor" or kind == "Optional[Tensor]":
                value = _operand(d, domain, shape if not args or d.yes() else d.broadcastable(shape))
                if name in WITHOUT_GRADIENT:
                    value = constant(value)
            elif argument.name == "rounding_mode":
                value = d.choice("floor", "trunc", None)
            elif argument.name == "approximate":
                value = d.choice("tanh", "none")
            elif kind in ("number", "float", "Optional[number]") and (
                not argument.has_default_value() or name == "clamp" or d.yes()
            ):
                value = _scalar(d, domain, argument.name)
            elif argument.has_default_value():
                value = argument.default_value
            else:
                value = 1
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    return draw


for _domain, _names in (("real", REAL), ("positive", POSITIVE), ("unit", UNIT), ("integer", INTEGER)):
    for _name in _names.split():
        for _target in overloads(_name):
            sampler(_target)(_arguments(_target, _domain if _name not in ("sqrt", "rsqrt") else "positive"))


@sampler(aten.where.self)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.mask(*d.broadcastable(shape)), d.real(*shape), d.real(*d.broadcastable(shape)))


@sampler(aten.where.ScalarOther)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.mask(*shape), d.real(*d.broadcastable(shape)), d.choice(0, 0.0, 1.0))


@sampler(aten.where.ScalarSelf)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.mask(*shape), d.choice(0, 0.0, 1.0), d.real(*d.broadcastable(shape)))


@sampler(aten.where.Scalar)
def _(d: Draw) -> Arguments:
    return (d.mask(*d.sizes(1, 3)), 0.0, 1.0)


@sampler(aten.masked_fill.Scalar)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.real(*shape), d.mask(*d.broadcastable(shape)), d.choice(0, 0.0, float("-inf")))


@sampler(aten.masked_fill.Tensor)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.real(*shape), d.mask(*d.broadcastable(shape)), d.real())


def _cast(d: Draw) -> tuple[torch.Tensor, torch.dtype]:
    shape = d.sizes(1, 3)
    source = d.choice(d.real(*shape), d.ids(7, *shape), d.mask(*shape))
    return source, d.choice(torch.float32, torch.float64, torch.int64)


sampler(aten.to.dtype)(lambda d: _cast(d))


@sampler(aten._to_copy.default)
def _(d: Draw) -> Arguments:
    source, dtype = _cast(d)
    return (source,), {"dtype": dtype}
