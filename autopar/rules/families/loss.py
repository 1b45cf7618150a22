"""Losses. A sum over targets may be partial; a mean is corrected where its denominator is a number of elements."""

import torch

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import broadcast, dims, emit_mean, original, rule_from, slot_of
from autopar.rules.operators import OVER_MICRO_BATCHES
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Emit, Rule, Slot, Step

NONE, MEAN, SUM = 0, 1, 2


def _emit_cross_entropy(classes: int) -> Emit:
    """With classes split, each rank holds part of every row and the rewrite sums over ranks inside."""

    def emit(local: Call) -> tuple[Step, ...]:
        mesh_dim = local.mesh_dim("v")
        if mesh_dim is None:
            return (original(local),)
        ignore, smoothing = local.named("ignore_index", -100), local.named("label_smoothing", 0.0)
        rank = len(local.operands[slot_of(local.args[0])].shape)
        logits, steps = local.args[0], tuple[Step, ...]()
        if rank > 2:  # the rewrite wants the classes last
            steps = (Step(aten.permute.default, (logits, [0, *range(2, rank), 1])),)
            logits = Slot(-1)
        arguments = (logits, local.args[1], ignore, smoothing, classes, mesh_dim)
        return (*steps, Step("vocab_parallel_cross_entropy_sum", arguments))

    return emit


def _classes(call: Call) -> tuple[dict[int, list[Dim]], list[Dim], bool]:
    """Specs of logits (classes are dimension 1, or 0 without a batch), target and class weights; the targets' dims."""
    logits, target = slot_of(call.args[0]), slot_of(call.args[1])
    rank = len(call.operands[logits].shape)
    at = 1 if rank > 1 else 0
    batch: list[Dim] = [(f"t{d}",) for d in range(rank - 1)]
    full: list[Dim] = [*batch[:at], ("v",), *batch[at:]]
    by_id = not call.operands[target].dtype.is_floating_point
    specs = {logits: full, target: batch if by_id else full}
    weight = call.named("weight")
    if isinstance(weight, Slot):
        specs[weight.index] = [("v",)]
    return specs, batch, by_id


@rule(aten.cross_entropy_loss.default)
def cross_entropy_loss(call: Call) -> Rule:
    """``"t v, t ->"`` for a sum, with classes split by a rewrite for ids without weights. A mean is whole."""
    specs, batch, by_id = _classes(call)
    reduction = call.named("reduction", MEAN)
    smoothing = call.named("label_smoothing", 0.0)
    targets = {f for dim in batch for f in dim}
    if reduction != SUM:
        return rule_from(
            call, specs, batch if reduction == NONE else [], whole={"v"} | (targets if reduction == MEAN else set())
        )
    rewritable = by_id and not isinstance(call.named("weight"), Slot) and smoothing == 0
    if not rewritable:
        return rule_from(call, specs, [], whole={"v"})
    logits = call.operands[slot_of(call.args[0])].shape
    emit = _emit_cross_entropy(logits[1 if len(logits) > 1 else 0])
    return rule_from(call, specs, [], invariant={"v"}, outermost={"v"}, emit=emit)


@rule(aten.nll_loss_nd.default, aten.nll_loss.default)
def nll_loss(call: Call) -> Rule:
    """Classes are whole: the picked one lies on one rank only."""
    specs, batch, by_id = _classes(call)
    reduction = call.named("reduction", MEAN)
    if not by_id:
        raise RuleError("nll_loss by probabilities")
    whole = {"v"} | ({f for dim in batch for f in dim} if reduction == MEAN else set())
    output = batch if reduction == NONE else []
    return rule_from(call, specs, output, whole=whole, linear=[{slot_of(call.args[0])}])


@rule(aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default)
def elementwise_loss(call: Call) -> Rule:
    """A loss per element of the broadcast operands, kept, summed or averaged."""
    reduction, shape = call.named("reduction", MEAN), torch.broadcast_shapes(*(o.shape for o in call.operands))
    spec = dims(shape)
    if reduction == NONE:
        return rule_from(call, broadcast(call, spec), spec)
    emit = emit_mean(sorted(f for dim in spec for f in dim)) if reduction == MEAN else None
    return rule_from(call, broadcast(call, spec), [], emit=emit)


@rule(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
@rule(aten.kl_div.default, aten.soft_margin_loss.default)
def loss_of_two(call: Call) -> Rule:
    """Operands of different shapes have no rule: torch's own gradients are wrong there."""
    if call.operands[0].shape != call.operands[1].shape:
        raise RuleError("a loss of tensors that differ in shape")
    return elementwise_loss(call)


@rule(OVER_MICRO_BATCHES)
def over_micro_batches(call: Call) -> Rule:
    """A term of the loss over the number of micro-batches, which is one number."""
    spec = dims(call.output.shape)
    return rule_from(call, [spec, []], spec, linear=[{0}], emit=lambda local: (Step(aten.div.Tensor, local.args),))
