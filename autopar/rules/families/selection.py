"""Operators that pick elements by size. Here they yield the indices; `gather` picks the values.

Tokens that are sorted by expert have operators of their own (`autopar.rules.routed`).
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from autopar._torch.operators import aten
from autopar.rules.families._notation import dim_index, dims, rule_from
from autopar.rules.operators import output_of
from autopar.rules.registry import rule
from autopar.rules.routed import ORDER, PRODUCT, ROWS, TAKE, UNTAKE
from autopar.rules.rule import EXPERTS, Call, Dim, Rule, Step


@rule(output_of(aten.topk.default, 1), output_of(aten.kthvalue.default, 1))
@rule(output_of(aten.max.dim, 1), output_of(aten.min.dim, 1))
@rule(output_of(aten.median.dim, 1), output_of(aten.nanmedian.dim, 1), output_of(aten.mode.default, 1))
@rule(output_of(aten.sort.default, 1), output_of(aten.cummax.default, 1), output_of(aten.cummin.default, 1))
@rule(aten.argsort.default, output_of(aten.sort.stable, 1))
def positions(call: Call) -> Rule:
    """One dimension is whole; in the output it has any size, 1, or is gone."""
    spec = dims(call.operands[0].shape)
    if not spec:
        return rule_from(call, [spec], spec)
    d = dim_index(call.named("dim", -1), len(spec))
    output = [*spec[:d], *([("picked",)] if call.named("keepdim", True) else []), *spec[d + 1 :]]
    return rule_from(call, [spec], output, whole={f"d{d}", "picked"})


# ---- tokens sorted by expert ----

ROW: Dim = ("t", "j")


@rule(ORDER)
def expert_order(call: Call) -> Rule:
    """A rank sorts the rows of its own tokens. A token's choices stay together."""
    base = rule_from(call, [[("t",), ("j",)]], [ROW], sizes=_sizes(call), whole={"j"})
    return _without_padding(base)


@rule(ROWS, TAKE)
def expert_rows(call: Call) -> Rule:
    """The rows of tokens, or rows in another order."""
    rest: list[Dim] = [(f"d{n}",) for n in range(1, len(call.output.shape))]
    inputs: list[list[Dim]] = [[("t",) if call.target is ROWS else ROW, *rest], [ROW]]
    return _routed(rule_from(call, inputs, [ROW, *rest], sizes=_sizes(call), whole={"j"}, linear=[{0}]))


@rule(UNTAKE)
def expert_untake(call: Call) -> Rule:
    """A rank with the rows of its experts leaves zeros in the places of all others."""
    return replace(expert_rows(call), emit=_emit_untake)


def _emit_untake(local: Call) -> tuple[Step, ...]:
    total = (local.output.shape[0],) if local.mesh_dim(EXPERTS) is not None else ()
    return (Step(local.target, (*local.args, *total)),)


@rule(PRODUCT)
def expert_product(call: Call) -> Rule:
    """The rows of a rank's tokens may meet any matrix, which is split inside; the rows of its experts only these."""
    inputs: list[list[Dim]] = [[ROW, ("k",)], [("e",), ("k",), ("n",)], [ROW]]
    output: list[Dim] = [ROW, ("n",)]
    linear = [{0}, {1}]
    base = rule_from(call, inputs, output, sizes=_sizes(call), whole={"j", "e"}, linear=linear, flops=_flops)
    return replace(_routed(base), expert="e" if "e" in base.sizes else "", emit=_emit_product)


def _emit_product(local: Call) -> tuple[Step, ...]:
    mesh_dim = local.mesh_dim(EXPERTS)
    if mesh_dim is None:
        return (Step(local.target, local.args),)
    return (Step("product_of_experts", (*local.args, mesh_dim)),)


def _routed(base: Rule) -> Rule:
    return replace(_without_padding(base), is_routed=True)


def _sizes(call: Call) -> dict[str, int]:
    """Tokens and choices of a token: the last argument, or the second dimension of the chosen experts."""
    k = call.operands[0].shape[1] if call.target is ORDER else call.args[-1]
    return {"t": call.output.shape[0] // k, "j": k}


def _without_padding(base: Rule) -> Rule:
    """Padding is no expert's number."""
    return replace(base, even=base.even | {"t"})


def _flops(sizes: Mapping[str, int]) -> float:
    """A row meets one matrix."""
    return 2.0 * prod(sizes.get(factor, 1) for factor in ("t", "j", "k", "n"))
