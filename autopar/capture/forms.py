"""Numbers of a captured graph as functions of batch size B and sequence length S, found from two captures.

A number that is equal in two captures at different sizes is a constant. A number that differs must have one of two
kinds of form:

1. ``q B^i S^j`` with a rational q and exponents up to 2. Examples: a batch, a sequence, scores over pairs of positions.
2. ``B^i (k S + c)`` with k of 1 or 2, or ``S^j (B + c)``, with i and j of 0 or 1. Examples: ``S - 1`` labels, a prefix.

Two numbers cannot determine a more general form. The second kind is tried only if no form of the first kind fits. The
number stays unexplained if no form fits, or if several forms of one kind fit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

MAX_EXPONENT = 2
MAX_DENOMINATOR = 64  # of q: allows halves of a sequence, but few ratios by chance
_MOST = (1, 2)  # the largest k of the batch and of the sequence
_EXPONENTS = range(-MAX_EXPONENT, MAX_EXPONENT + 1)
SMALLEST = 2  # at this size, a form of the second kind must not be negative


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The batch size and sequence length of a capture. `sequence` is None if the length does not vary."""

    batch: int
    sequence: int | None = None


SizeTerm = tuple[int, int, int, int]  # numerator, denominator, exponent of the batch, exponent of the sequence


@dataclass(frozen=True, slots=True)
class Form:
    """A sum of terms ``numerator / denominator * batch ** i * sequence ** j``."""

    terms: tuple[SizeTerm, ...]

    def at(self, sizes: Sizes) -> int | None:
        """The number at these sizes. None if it is not whole."""
        sequence = sizes.sequence or 1
        terms: list[tuple[int, int]] = [(p * sizes.batch**i * sequence**j, q) for p, q, i, j in self.terms]
        if all(n % q == 0 for n, q in terms):
            return sum(n // q for n, q in terms)
        total = sum((Fraction(n, q) for n, q in terms), Fraction(0))
        return int(total) if total.denominator == 1 else None


def form_of(first: int, second: int, sizes: Sizes, others: Sizes) -> int | Form | None:
    """The form of a number that is `first` at `sizes` and `second` at `others`. None if it is unexplained."""
    if first == second:
        return first
    for candidates in (_products, _with_offset):
        forms = set(candidates(first, second, sizes, others))
        if forms:
            return forms.pop() if len(forms) == 1 else None
    return None


def float_form_of(first: float, second: float, sizes: Sizes, others: Sizes) -> Form | None:
    """The form of a floating literal that is a whole number. None if it is unexplained, not whole, or constant."""
    if not (first.is_integer() and second.is_integer()):  # nan and infinity are not whole either
        return None
    form = form_of(int(first), int(second), sizes, others)
    return form if isinstance(form, Form) else None


def batch_exponent(first: float, second: float, sizes: Sizes, others: Sizes) -> int | None:
    """The power of the batch size in a number that is `first` at `sizes`, `second` at `others`. None if it has none."""
    if not (math.isfinite(first) and math.isfinite(second)) or 0 in (first, second):
        return 0 if first == second else None
    varies = sizes.sequence != others.sequence
    by_b, by_s = sizes.batch / others.batch, (sizes.sequence or 1) / (others.sequence or 1)
    powers = {
        i
        for i, j in product(_EXPONENTS, _EXPONENTS if varies else (0,))
        if math.isclose(first / second, by_b**i * by_s**j, rel_tol=1e-12)
    }
    if powers:
        return powers.pop() if len(powers) == 1 else None
    for sign in (1, -1):  # B (S - 1), or one over it
        form = float_form_of(float(round(first**sign, 9)), float(round(second**sign, 9)), sizes, others)
        exponents = set() if form is None else {i for _, _, i, _ in form.terms}
        if len(exponents) == 1:
            return sign * exponents.pop()
    by_batch, by_sequence = sizes.batch - others.batch, (sizes.sequence or 0) - (others.sequence or 0)
    steps = {k * by_sequence for k in (-2, -1, 1, 2)} - {k * by_batch for k in (-2, -1, 1, 2)}
    return 0 if varies and first - second in steps else None  # a table's size without the sequence


def _products(first: int, second: int, sizes: Sizes, others: Sizes) -> Iterator[Form]:
    varies = sizes.sequence != others.sequence
    exponents = product(range(MAX_EXPONENT + 1), range(MAX_EXPONENT + 1 if varies else 1))
    for i, j in exponents:
        size, two = (s.batch**i * (s.sequence or 1) ** j for s in (sizes, others))
        if (i or j) and first and first * two == second * size:
            q = Fraction(first, size)
            if q.denominator <= MAX_DENOMINATOR:
                yield Form(((q.numerator, q.denominator, i, j),))


def _with_offset(first: int, second: int, sizes: Sizes, others: Sizes) -> Iterator[Form]:
    pairs = (sizes.batch, others.batch), (sizes.sequence or 1, others.sequence or 1)
    for axis, exponent in product((0, 1), (0, 1)):
        x, other = pairs[axis], pairs[1 - axis]
        if x[0] == x[1] or (exponent and other[0] == other[1]):
            continue
        scales = (other[0] ** exponent, other[1] ** exponent)
        if first % scales[0] or second % scales[1]:
            continue
        rest = first // scales[0], second // scales[1]
        k, remainder = divmod(rest[0] - rest[1], x[0] - x[1])
        c = rest[0] - k * x[0]
        if remainder or not 1 <= k <= _MOST[axis] or k * SMALLEST + c < 0:
            continue
        i, j = (1, exponent) if axis == 0 else (exponent, 1)
        yield Form(((k, 1, i, j), (c, 1, 0 if axis == 0 else i, j if axis == 0 else 0)))
