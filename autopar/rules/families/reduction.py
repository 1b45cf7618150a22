"""Reductions: kept dimensions are parallel; a sum may be partial over the others, everything else needs them whole."""

import torch

from autopar._torch.operators import aten
from autopar.rules.families._notation import dim_index, dim_indices, dims, emit_mean, rule_from
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule


def _reduced(call: Call) -> tuple[list[Dim], list[Dim], set[str]]:
    """Specs of operand and output and the factors summed over."""
    spec = dims(call.operands[0].shape)
    indices, keepdim = set(dim_indices(call.named("dim"), len(spec))), call.named("keepdim", False)
    output = [() if d in indices else dim for d, dim in enumerate(spec) if keepdim or d not in indices]
    return spec, output, {f"d{d}" for d in indices}


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(call: Call) -> Rule:
    """Each rank sums its own elements; a sum of bools counts."""
    spec, output, _ = _reduced(call)
    return rule_from(call, [spec], output, linear=[{0}])


@rule(aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Rule:
    """A mean of local elements is divided by the number of ranks."""
    spec, output, factors = _reduced(call)
    return rule_from(call, [spec], output, linear=[{0}], emit=emit_mean(sorted(factors)))


@rule(aten.amax.default, aten.amin.default, aten.logsumexp.default)
@rule(aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims)
@rule(aten.argmax.default, aten.argmin.default, aten.prod.dim_int)
@rule(aten.max.default, aten.min.default, aten.any.default, aten.all.default, aten.prod.default)
@rule(aten.var.correction, aten.std.correction, aten.var.dim, aten.std.dim)
@rule(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)
def whole_over_dims(call: Call) -> Rule:
    spec, output, factors = _reduced(call)
    return rule_from(call, [spec], output, whole=factors)


@rule(aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default)
@rule(aten.cumprod.default, aten.cumsum.default, aten.logcumsumexp.default)
def along_dim(call: Call) -> Rule:
    """Operators that keep the shape and work along one dimension, which is whole."""
    spec = dims(call.operands[0].shape)
    d = dim_index(call.named("dim"), len(spec))
    linear = call.target is aten.cumsum.default and call.operands[0].dtype is not torch.bool
    return rule_from(call, [spec], spec, whole={f"d{d}"}, linear=[{0}] if linear else [])
