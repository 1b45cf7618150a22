"""Matrix products. A multiplication and its addition count as two FLOP."""

import string
from collections.abc import Collection, Mapping
from functools import partial

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import aligned, linear_sets, multiply_adds, rule_from, slot_of
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, parse
from autopar.rules.scaled_product import MULTIPLES, SCALED_LINEAR


@rule(aten.linear.default)
def linear(call: Call) -> Rule:
    """The bias is additive: each rank's partial product must not add all of it."""
    groups = [{0, 2}] if len(call.operands) > 2 else [{0}]
    text = "... i, o i[, o] -> ... o"
    return parse(text, call, additive=(2,), linear=[sorted(g) for g in groups], flops=multiply_adds)


@rule(SCALED_LINEAR)
def scaled_linear(call: Call) -> Rule:
    """Sizes are multiples of what a kernel takes, also on a rank. A sum of rounded products is no rounded sum."""
    count = MULTIPLES[str(call.args[2])]
    sizes = {"j": count, "p": count}
    return parse("... (i j), (o p) (i j) -> ... (o p)", call, sizes=sizes, whole="j p", flops=multiply_adds)


def _product(call: Call, text: str) -> Rule:
    groups = [sorted(group) for group in linear_sets(call, [{0}, {1}])]
    return parse(text, call, linear=groups, flops=multiply_adds)


for _target, _text in (
    (aten.mm.default, "m k, k n -> m n"),
    (aten.bmm.default, "b m k, b k n -> b m n"),
    (aten.mv.default, "m k, k -> m"),
    (aten.dot.default, "k, k ->"),
    (aten.outer.default, "m, n -> m n"),
):
    rule(_target)(partial(_product, text=_text))


@rule(aten.matmul.default)
def matmul(call: Call) -> Rule:
    """All ranks: a vector on the left has no rows, one on the right no columns; batch dimensions broadcast."""
    left, right = (len(operand.shape) for operand in call.operands)
    rows, columns = ("... m " if left > 1 else ""), (" n" if right > 1 else "")
    batch = "... " if left > 1 or right > 2 else ""
    text = f"{rows}k, {'... ' if right > 1 else ''}k{columns} -> {batch}{'m' if left > 1 else ''}{columns}"
    return _product(call, text)


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(call: Call) -> Rule:
    """``beta * self + alpha * left @ right``: a partial factor makes `self` partial with it."""
    addend, a, b = (slot_of(argument) for argument in call.args[:3])
    batch: list[Dim] = [("b",)] * (len(call.output.shape) - 2)
    output: list[Dim] = [*batch, ("m",), ("n",)]
    left, right = [*batch, ("m",), ("k",)], [*batch, ("k",), ("n",)]
    specs: dict[int, list[Dim]] = {addend: aligned(output, call.operands[addend].shape), a: left, b: right}
    sets: list[Collection[int]] = [{addend, a}, {addend, b}]
    return rule_from(call, specs, output, additive={addend}, linear=sets, flops=multiply_adds)


@rule(GROUPED_MM)
def grouped_mm(call: Call) -> Rule:
    """Which rows meet which matrix depends on all rows, so that rows and groups are whole; a group splits inside."""
    return parse("t k, e k n, e -> t n", call, whole="t e", linear=[[0], [1]], flops=_of_one_group)


def _of_one_group(sizes: Mapping[str, int]) -> float:
    """Each row meets one matrix."""
    return 2.0 * sizes.get("t", 1) * sizes.get("k", 1) * sizes.get("n", 1)


@rule(aten.einsum.default)
def einsum(call: Call) -> Rule:
    """Factors are the letters of the equation; a letter twice in one operand (a diagonal) has no rule."""
    equation = str(call.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    slots = [slot_of(argument) for argument in call.args[1]]
    if not arrow:
        letters = [c for c in left if c in string.ascii_letters]
        right = ("..." if "." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if len(terms) != len(slots) or ("..." not in right and "." in left):
        raise RuleError(f"einsum equation {equation!r} for {len(slots)} operands")
    specs = {k: _letters(term, len(call.operands[k].shape)) for k, term in zip(slots, terms, strict=True)}
    flops = multiply_adds if len(terms) > 1 else None
    output = _letters(right, len(call.output.shape))
    return rule_from(call, specs, output, linear=[{k} for k in slots], flops=flops)


def _letters(term: str, rank: int) -> list[Dim]:
    before, dots, after = term.partition("...")
    if len(set(before + after)) != len(before + after):
        raise RuleError(f"a letter occurs twice in {term!r}")
    count = rank - len(before) - len(after) if dots else 0
    return [(factor,) for factor in (*before, *(f".{count - 1 - i}" for i in range(count)), *after)]
