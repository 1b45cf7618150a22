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
    return _of_tokens(call, *call.operands[0].shape, [[("t",), ("j",)]], [ROW])


@rule(ROWS)
def expert_rows(call: Call) -> Rule:
    rest = _rest(call)
    return _of_tokens(call, *_tokens(call), [[("t",), *rest], [ROW]], [ROW, *rest], linear=[{0}])


@rule(TAKE, UNTAKE)
def expert_take(call: Call) -> Rule:
    rest = _rest(call)
    return _of_tokens(call, *_tokens(call), [[ROW, *rest], [ROW]], [ROW, *rest], linear=[{0}])


@rule(PRODUCT)
def expert_product(call: Call) -> Rule:
    """Which rows meet which matrix depends on the rank's own rows, so a rank has all matrices. A matrix is split inside."""
    inputs: list[list[Dim]] = [[ROW, ("k",)], [("e",), ("k",), ("n",)], [ROW]]
    tokens = call.output.shape[0] // call.args[3], call.args[3]
    return _of_tokens(call, *tokens, inputs, [ROW, ("n",)], whole={"e"}, linear=[{0}, {1}], flops=_flops)


def _of_tokens(
    call: Call,
    t: int,
    j: int,
    inputs: list[list[Dim]],
    output: list[Dim],
    whole: frozenset[str] | set[str] = frozenset(),
    **options: object,
) -> Rule:
    found = rule_from(call, inputs, output, sizes={"t": t, "j": j}, whole={"j", *whole}, **options)
    return replace(found, even=found.even | {"t"})  # padding is no expert's number


def _tokens(call: Call) -> tuple[int, int]:
    return call.output.shape[0] // call.args[2], call.args[2]


def _rest(call: Call) -> list[Dim]:
    return [(f"d{n}",) for n in range(1, len(call.output.shape))]


def _flops(sizes: Mapping[str, int]) -> float:
    """A row meets one matrix."""
    return 2.0 * prod(sizes.get(factor, 1) for factor in ("t", "j", "k", "n"))
