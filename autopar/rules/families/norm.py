"""Normalisation: normalised dimensions are whole, the other dimensions are parallel."""

from typing import Any

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import dims, in_order, rule_from, slot_of
from autopar.rules.operators import BATCH_STATISTIC
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Slot, Step


def _over_last(call: Call, count: int, affine: list[Any]) -> Rule:
    """The last `count` dimensions are normalised. They are also the dimensions of weight and bias."""
    x = slot_of(call.args[0])
    spec = dims(call.operands[x].shape)
    last = spec[len(spec) - count :]
    specs = {x: spec} | {a.index: last for a in affine if isinstance(a, Slot)}
    return rule_from(call, in_order(call, specs), spec, whole={f for dim in last for f in dim})


@rule(aten.layer_norm.default)
def layer_norm(call: Call) -> Rule:
    return _over_last(call, len(call.args[1]), [call.arg(2, "weight"), call.arg(3, "bias")])


@rule(aten.rms_norm.default)
def rms_norm(call: Call) -> Rule:
    return _over_last(call, len(call.args[1]), [call.arg(2, "weight")])


@rule(aten.group_norm.default)
def group_norm(call: Call) -> Rule:
    """Channels are ``(g c)``; whole groups may be split."""
    x = slot_of(call.args[0])
    spec = dims(call.operands[x].shape)
    groups = call.args[1]
    spec[1] = ("g", "c")
    affine = [a for a in (call.arg(2, "weight"), call.arg(3, "bias")) if isinstance(a, Slot)]
    sizes = {"g": groups, "c": call.operands[x].shape[1] // groups}
    specs: dict[int, list[Dim]] = {x: spec} | {a.index: [("g", "c")] for a in affine}
    whole = {"c", *(f"d{d}" for d in range(2, len(spec)))}

    def emit(local: Call) -> tuple[Step, ...]:
        num_groups = local.operands[x].shape[1] // sizes["c"]
        return (Step(local.target, (local.args[0], num_groups, *local.args[2:]), local.kwargs),)

    return rule_from(call, in_order(call, specs), spec, sizes=sizes, whole=whole, emit=emit)


@rule(BATCH_STATISTIC)
def batch_statistic(call: Call) -> Rule:
    """A statistic of the batch and the running one, of the same shape."""
    spec = dims(call.output.shape)
    return rule_from(call, [spec, spec], spec)


@rule(aten.batch_norm.default)
def batch_norm(call: Call) -> Rule:
    """In training the statistics run over everything but channels, and running ones are written: all whole."""
    if call.args[5]:
        raise RuleError("batch norm in training")
    x = slot_of(call.args[0])
    spec = dims(call.operands[x].shape)
    specs = {x: spec} | {a.index: spec[1:2] for a in call.args[1:5] if isinstance(a, Slot)}
    return rule_from(call, in_order(call, specs), spec)
