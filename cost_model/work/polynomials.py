"""Sums of monomials in named sizes, as plain data. Costs of blocks are stored, compared and evaluated in this form.

Only the derivation of costs needs sympy (`symbol`, `polynomial`). Costs that are read from a file are priced without
importing it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Number: TypeAlias = float | NDArray[np.float64]

Expr: TypeAlias = Any  # sympy.Expr; sympy has no types and is only imported for the first expression
Powers: TypeAlias = tuple[tuple[str, int], ...]  # by symbol, in the symbols' order
Term: TypeAlias = tuple[Fraction, Powers]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of monomials: rational coefficients times integer powers of symbols. Powers may be negative.

    `terms` are sorted by their powers. Each combination of powers occurs once, and no coefficient is zero (see
    `total`).
    """

    terms: tuple[Term, ...] = ()
    _hash: int = field(init=False, compare=False, repr=False)  # families with thousands of polynomials are cache keys

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.terms))

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Polynomial) -> Polynomial:
        return total((*self.terms, *other.terms))

    def times(self, factor: Fraction) -> Polynomial:
        """The polynomial times a number."""
        return Polynomial(tuple((coefficient * factor, powers) for coefficient, powers in self.terms))

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(name for _, powers in self.terms for name, _ in powers)


def total(terms: Iterable[Term]) -> Polynomial:
    """The sum of terms in any order."""
    sums: dict[Powers, Fraction] = {}
    for coefficient, powers in terms:
        sums[powers] = sums[powers] + coefficient if powers in sums else coefficient
    return Polynomial(tuple((sums[powers], powers) for powers in sorted(sums) if sums[powers]))


# ---- from sympy ----


@functools.cache
def symbol(name: str) -> Expr:
    """The positive symbol of a name."""
    import sympy

    return sympy.Symbol(name, positive=True)


def polynomial(value: Expr | float) -> Polynomial:
    """A sympy expression as plain data. Raises `ValueError` if it is no sum of monomials."""
    import sympy

    return _polynomial(sympy.sympify(value))


@functools.cache  # the operators of a block share most of their expressions
def _polynomial(value: Expr) -> Polynomial:
    import sympy

    parts = sympy.Add.make_args(value)
    if not all(_is_monomial(part) for part in parts):
        parts = sympy.Add.make_args(sympy.expand(value))
    return total(_term(part, value) for part in parts)


def _is_monomial(term: Expr) -> bool:
    """Whether a term is fully expanded."""
    import sympy

    return all(
        factor.is_Rational or factor.is_Symbol or (factor.is_Pow and factor.base.is_Symbol and factor.exp.is_Integer)
        for factor in sympy.Mul.make_args(term)
    )


def _term(term: Expr, whole: Expr) -> Term:
    factor, powers = Fraction(1), {}
    for base, power in term.as_powers_dict().items():
        if base.is_Number and power.is_Integer:
            number = Fraction(int(base.p), int(base.q)) if base.is_Rational else Fraction(float(base))
            factor *= number ** int(power)
        elif base.is_Symbol and power.is_Integer:
            powers[base.name] = int(power)
        else:
            raise ValueError(f"{term} in {whole} is no monomial")
    return factor, tuple(sorted(powers.items()))


# ---- values ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The steps that compute several polynomials from numbers for `names`, with each product of symbols computed once.

    Slot 0 is 1. The next slots are the numbers. Each entry (left, right, divides) of `products` adds a slot: slot
    `left` times slot `right`, or divided by it. `sums` pairs coefficients with slots.
    """

    names: tuple[str, ...]
    products: tuple[tuple[int, int, bool], ...]
    sums: tuple[tuple[tuple[float, int], ...], ...]

    def values(self, numbers: Mapping[str, Number]) -> list[Any]:
        """The polynomials' values in their order. A value is a float, or an array if one of its numbers is an array."""
        slots: list[Any] = [1.0, *(numbers[name] for name in self.names)]
        for left, right, divides in self.products:
            slots.append(slots[left] / slots[right] if divides else slots[left] * slots[right])
        return [_sum([coefficient * slots[slot] for coefficient, slot in terms]) for terms in self.sums]


def _sum(values: Sequence[Any]) -> Any:
    return functools.reduce(operator.add, values) if values else 0.0


def evaluation_of(polynomials: Sequence[Polynomial]) -> Evaluation:
    """The evaluation of `polynomials`."""
    names = tuple(sorted(frozenset[str]().union(*(each.symbols for each in polynomials))))
    number_of = {name: 1 + i for i, name in enumerate(names)}
    slot_of: dict[tuple[int, int, bool], int] = {}

    def slot(powers: Powers) -> int:
        """The slot of a product, built in the order of the symbols: equal beginnings share slots."""
        factors = [(number_of[name], False) for name, power in powers for _ in range(power)]
        factors += [(number_of[name], True) for name, power in powers for _ in range(-power)]
        if not factors:
            return 0
        left, rest = (0, factors) if factors[0][1] else (factors[0][0], factors[1:])
        for right, divides in rest:
            left = slot_of.setdefault((left, right, divides), 1 + len(names) + len(slot_of))
        return left

    sums = tuple(tuple((float(coefficient), slot(powers)) for coefficient, powers in p.terms) for p in polynomials)
    return Evaluation(names=names, products=tuple(slot_of), sums=sums)
