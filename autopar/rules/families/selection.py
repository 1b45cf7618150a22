"""Operators that pick elements by size. Here they yield the indices; `gather` picks the values."""

from autopar._torch.operators import aten
from autopar.rules.families._notation import dim_index, dims, rule_from
from autopar.rules.operators import output_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Rule


def _along(call: Call, d: int, keepdim: bool) -> Rule:
    """Dimension d is whole; in the output it has any size, 1, or is gone."""
    spec = dims(call.operands[0].shape)
    if not spec:
        return rule_from(call, [spec], spec)
    d = dim_index(d, len(spec))
    output = [*spec[:d], *([("picked",)] if keepdim else []), *spec[d + 1 :]]
    return rule_from(call, [spec], output, whole={f"d{d}", "picked"})


@rule(output_of(aten.topk.default, 1), output_of(aten.kthvalue.default, 1))
def topk(call: Call) -> Rule:
    keepdim = "topk" in str(call.target) or bool(call.arg(3, "keepdim", False))
    return _along(call, call.arg(2, "dim", -1), keepdim)


@rule(output_of(aten.max.dim, 1), output_of(aten.min.dim, 1))
@rule(output_of(aten.median.dim, 1), output_of(aten.nanmedian.dim, 1), output_of(aten.mode.default, 1))
def of_dim(call: Call) -> Rule:
    return _along(call, call.arg(1, "dim", -1), bool(call.arg(2, "keepdim", False)))


@rule(output_of(aten.sort.default, 1), output_of(aten.cummax.default, 1), output_of(aten.cummin.default, 1))
@rule(aten.argsort.default)
def ordered(call: Call) -> Rule:
    return _along(call, call.arg(1, "dim", -1), True)


@rule(output_of(aten.sort.stable, 1))
def sort_stable(call: Call) -> Rule:
    return _along(call, call.kwargs.get("dim", -1), True)
