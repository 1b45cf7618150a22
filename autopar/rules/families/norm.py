"""Normalisation: normalised dimensions are whole, the other dimensions are parallel."""

from math import prod

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import broadcast, dims, rule_from, slot_of
from autopar.rules.families.pointwise import pointwise
from autopar.rules.operators import BATCH_STATISTIC
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Slot, Step


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(call: Call) -> Rule:
    """The last dimensions are normalised. They are also the dimensions of weight and bias."""
    x = slot_of(call.args[0])
    spec = dims(call.operands[x].shape)
    last = spec[len(spec) - len(call.args[1]) :]
    specs = {x: spec} | {a.index: last for a in (call.named("weight"), call.named("bias")) if isinstance(a, Slot)}
    return rule_from(call, specs, spec, whole={f for dim in last for f in dim})


@rule(aten.group_norm.default)
def group_norm(call: Call) -> Rule:
    """Channels are ``(g c)``; whole groups may be split."""
    x = slot_of(call.args[0])
    spec = dims(call.operands[x].shape)
    groups = call.args[1]
    spec[1] = ("g", "c")
    affine = [a for a in (call.named("weight"), call.named("bias")) if isinstance(a, Slot)]
    sizes = {"g": groups, "c": call.operands[x].shape[1] // groups}
    specs: dict[int, list[Dim]] = {x: spec} | {a.index: [("g", "c")] for a in affine}
    whole = {"c", *(f"d{d}" for d in range(2, len(spec)))}

    def emit(local: Call) -> tuple[Step, ...]:
        num_groups = local.operands[x].shape[1] // sizes["c"]
        return (Step(local.target, (local.args[0], num_groups, *local.args[2:]), local.kwargs),)

    return rule_from(call, specs, spec, sizes=sizes, whole=whole, emit=emit)


rule(BATCH_STATISTIC)(pointwise)  # a statistic of the batch and the running one, of the same shape


@rule(aten.batch_norm.default)
def batch_norm(call: Call) -> Rule:
    """In training the statistics run over everything but channels, and running ones are written: all whole."""
    if call.args[5]:
        raise RuleError("batch norm in training")
    x = slot_of(call.args[0])
    spec = dims(call.operands[x].shape)
    specs = {x: spec} | {a.index: spec[1:2] for a in call.args[1:5] if isinstance(a, Slot)}
    return rule_from(call, specs, spec)


@rule(aten.instance_norm.default)
def instance_norm(call: Call) -> Rule:
    """Statistics of the sample run over places. With running statistics, the operator is whole."""
    if not call.named("use_input_stats") or any(isinstance(a, Slot) for a in call.args[3:5]):
        raise RuleError("instance norm with running statistics")
    x = slot_of(call.args[0])
    spec = dims(call.operands[x].shape)
    specs = {x: spec} | {a.index: spec[1:2] for a in call.args[1:3] if isinstance(a, Slot)}
    return rule_from(call, specs, spec, whole={f for dim in spec[2:] for f in dim})


@rule(aten._weight_norm.default)
def weight_norm(call: Call) -> Rule:
    """A direction times a length: all dimensions are normalised except one."""
    spec = dims(call.output.shape)
    kept = call.named("dim", 0)
    whole = {f"d{d}" for d in range(len(spec)) if kept == -1 or d != kept % len(spec)}
    return rule_from(call, broadcast(call, spec), spec, whole=whole)


@rule(aten.prelu.default)
def prelu(call: Call) -> Rule:
    """One slope, or one for each channel in dimension 1."""
    spec = dims(call.output.shape)
    slopes = call.operands[slot_of(call.args[1])].shape
    channel: Dim = spec[1] if len(spec) > 1 and prod(slopes) > 1 else ()
    return rule_from(call, [spec, [channel] * len(slopes)], spec)
