"""Operators that create tensors: of a given shape (each rank its part), or with values that depend on position."""

from typing import Any

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import dims, rule_from
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Rule, Step


def sized(call: Call, position: int) -> Rule:
    """Any dimension of the output may be split: elements are the same. An operand of its shape shares factors."""

    def emit(local: Call) -> tuple[Step, ...]:
        arguments: list[Any] = list(local.args)
        arguments[position] = list(local.output.shape)
        return (Step(local.target, tuple(arguments), local.kwargs),)

    if len(call.args) <= position:
        raise RuleError("a shape given by name")
    output = dims(call.output.shape)
    if call.operands and all(operand.shape == call.output.shape for operand in call.operands):
        return rule_from(call, [output for _ in call.operands], output, emit=emit)
    inputs = [dims(operand.shape, f"x{k}.") for k, operand in enumerate(call.operands)]
    whole = {f for spec in inputs for dim in spec for f in dim}
    return rule_from(call, inputs, output, whole=whole, emit=emit)


_OPERANDS = dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), 0)
_OPERANDS |= dict.fromkeys((aten.new_full.default, aten.new_zeros.default, aten.new_ones.default), 1)


@rule(*_OPERANDS)
def full(call: Call) -> Rule:
    """The shape comes behind the operands."""
    if len(call.operands) > _OPERANDS[call.target]:
        raise RuleError("filled with a tensor")
    return sized(call, _OPERANDS[call.target])


@rule(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
def full_like(call: Call) -> Rule:
    spec = dims(call.output.shape)
    if len(call.operands) > 1:
        raise RuleError("filled with a tensor")
    return rule_from(call, [spec], spec)


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default)
@rule(aten.linspace.default, aten.logspace.default, aten.eye.default, aten.eye.m)
@rule(aten.tril_indices.default, aten.triu_indices.default, aten.randperm.default)
@rule(aten.hann_window.default, aten.hann_window.periodic, aten.hamming_window.default)
def by_position(call: Call) -> Rule:
    """Whole: a rank's part would begin elsewhere."""
    spec = dims(call.output.shape)
    return rule_from(call, [], spec, whole={f for dim in spec for f in dim})
