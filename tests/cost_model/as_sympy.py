"""Stored expressions as sympy's, to compare them with formulas."""

from typing import Any

import sympy

from autopar.cost_model.work.polynomials import Polynomial, symbol


def as_sympy(value: Polynomial) -> Any:
    terms = ((sympy.Rational(c), [symbol(name) ** power for name, power in powers]) for c, powers in value.terms)
    return sympy.Add(*(coefficient * sympy.Mul(*factors) for coefficient, factors in terms))
