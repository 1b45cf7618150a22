"""Sums of monomials: from sympy and back, sums, and values that are sympy's."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sympy
from as_sympy import as_sympy
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.work.polynomials import Polynomial, evaluation_of, polynomial, symbol, total

A, B, T = symbol("a"), symbol("b"), symbol("t")

coefficients = st.fractions(min_value=-50, max_value=50, max_denominator=8)
powers = st.dictionaries(st.sampled_from("abt"), st.integers(-3, 3).filter(bool), max_size=3)
polynomials = st.lists(st.tuples(coefficients, powers.map(lambda found: tuple(sorted(found.items()))))).map(total)


def test_an_expression_is_expanded() -> None:
    value = 2.5 * A * B**2 / T + sympy.Rational(1, 3) * (A + B) ** 2 - 7
    assert as_sympy(polynomial(value)) == sympy.expand(sympy.nsimplify(value, rational=True))
    assert polynomial(0.5 * A / T).terms == ((Fraction(1, 2), (("a", 1), ("t", -1))),)


@pytest.mark.parametrize("value", [1 / (A + B), sympy.sqrt(A), sympy.log(B)])
def test_only_sums_of_monomials_are_polynomials(value: Any) -> None:
    with pytest.raises(ValueError, match="no monomial"):
        polynomial(value)


@given(polynomials, polynomials)
def test_they_are_those_of_sympy(one: Polynomial, other: Polynomial) -> None:
    assert polynomial(as_sympy(one)) == one
    assert one + other == polynomial(as_sympy(one) + as_sympy(other))
    assert hash(one + other) == hash(other + one)
    assert one.symbols == {s.name for s in as_sympy(one).free_symbols}


@given(st.lists(polynomials, max_size=4))
def test_values_are_those_of_sympy(found: list[Polynomial]) -> None:
    numbers = {"a": 3.0, "b": 0.5, "t": np.array([1.0, 2.0, 8.0])}
    for one, value in zip(found, evaluation_of(found).values(numbers), strict=True):
        for i, t in enumerate(numbers["t"]):
            exact = as_sympy(one).subs({A: 3, B: sympy.Rational(1, 2), T: int(t)})
            size = sum(abs(float(as_sympy(Polynomial((term,))).subs({A: 3, B: 0.5, T: t}))) for term in one.terms)
            assert np.broadcast_to(value, 3)[i] == pytest.approx(float(exact), rel=1e-14, abs=1e-14 * size)


def test_products_that_begin_alike_are_made_once() -> None:
    found = evaluation_of([polynomial(A * B / T), polynomial(3 * A * B + A * B**2), polynomial(1 / T)])
    assert found.names == ("a", "b", "t")
    assert len(found.products) == 4  # ab, ab/t, ab², 1/t
    assert found.values({"a": 2.0, "b": 3.0, "t": 4.0}) == [1.5, 36.0, 0.25]
