"""Routing of tokens to experts: tokens are parallel (`autopar.rules.routed`)."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from autopar.rules.families._notation import rule_from
from autopar.rules.registry import rule
from autopar.rules.routed import ORDER, PRODUCT, ROWS, TAKE, UNTAKE
from autopar.rules.rule import Call, Dim, Rule

ROW: Dim = ("t", "j")


@rule(ORDER)
def expert_order(call: Call) -> Rule:
    """A rank sorts the rows of its own tokens. A token's choices stay together."""
    found = rule_from(call, [[("t",), ("j",)]], [ROW], sizes=_sizes(call), whole={"j"})
    return _without_padding(found)


@rule(ROWS)
def expert_rows(call: Call) -> Rule:
    rest = _rest(call)
    inputs: list[list[Dim]] = [[("t",), *rest], [ROW]]
    return _without_padding(rule_from(call, inputs, [ROW, *rest], sizes=_sizes(call), whole={"j"}, linear=[{0}]))


@rule(TAKE, UNTAKE)
def expert_take(call: Call) -> Rule:
    rest = _rest(call)
    inputs: list[list[Dim]] = [[ROW, *rest], [ROW]]
    return _without_padding(rule_from(call, inputs, [ROW, *rest], sizes=_sizes(call), whole={"j"}, linear=[{0}]))


@rule(PRODUCT)
def expert_product(call: Call) -> Rule:
    """A rank's rows may meet any matrix, so the rank has all matrices. A matrix is split inside."""
    inputs: list[list[Dim]] = [[ROW, ("k",)], [("e",), ("k",), ("n",)], [ROW]]
    output: list[Dim] = [ROW, ("n",)]
    linear = [{0}, {1}]
    found = rule_from(call, inputs, output, sizes=_sizes(call), whole={"j", "e"}, linear=linear, flops=_flops)
    return _without_padding(found)


def _sizes(call: Call) -> dict[str, int]:
    """Tokens and choices of a token: the last argument, or the second dimension of the chosen experts."""
    k = call.operands[0].shape[1] if call.target is ORDER else call.args[-1]
    return {"t": call.output.shape[0] // k, "j": k}


def _rest(call: Call) -> list[Dim]:
    return [(f"d{n}",) for n in range(1, len(call.output.shape))]


def _without_padding(found: Rule) -> Rule:
    """Padding is no expert's number."""
    return replace(found, even=found.even | {"t"})


def _flops(sizes: Mapping[str, int]) -> float:
    """A row meets one matrix."""
    return 2.0 * prod(sizes.get(factor, 1) for factor in ("t", "j", "k", "n"))
