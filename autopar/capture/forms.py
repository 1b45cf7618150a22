"""Numbers of a captured graph as functions of batch size and sequence length, told from two captures.

A number that is the same in two captures at other sizes is a constant. One that differs is looked for among

1. ``q B^i S^j`` with a rational q and exponents up to 2: a batch, a sequence, tokens, scores over pairs of positions;
2. ``B^i (k S + c)`` with k of 1 or 2, and ``S^j (B + c)``, with i, j of 0 or 1: ``S - 1`` shifted labels, a prefix.

Two numbers determine no more than that. Where no form of the first kind fits, or none of the second when none of the
first does, or where several fit, the number is not explained, and nothing is made up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

MAX_EXPONENT = 2
MAX_DENOMINATOR = 64  # of q: halves of a sequence, not ratios by chance
_MOST = (1, 2)  # k of the batch and of the sequence
SMALLEST = 2  # sizes at which a form of the second kind must not be negative


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Batch size and sequence length of a capture; no sequence where it does not vary."""

    batch: int
    sequence: int | None = None


Term = tuple[int, int, int, int]  # numerator, denominator, exponent of the batch, exponent of the sequence


@dataclass(frozen=True, slots=True)
class Form:
    """A sum of terms ``numerator / denominator * batch ** i * sequence ** j``."""

    terms: tuple[Term, ...]

    def at(self, sizes: Sizes) -> int | None:
        """The number at these sizes, None where it is not whole."""
        sequence = sizes.sequence or 1
        terms: list[tuple[int, int]] = [(p * sizes.batch**i * sequence**j, q) for p, q, i, j in self.terms]
        if all(n % q == 0 for n, q in terms):
            return sum(n // q for n, q in terms)
        total = sum((Fraction(n, q) for n, q in terms), Fraction(0))
        return int(total) if total.denominator == 1 else None


def form_of(first: int, second: int, sizes: Sizes, others: Sizes) -> int | Form | None:
    """What a number is that two captures, at `sizes` and at `others`, have as `first` and `second`.

    >>> form_of(4095, 5, Sizes(batch=8, sequence=4096), Sizes(batch=3, sequence=6))
    Form(terms=((1, 1, 0, 1), (-1, 1, 0, 0)))
    """
    if first == second:
        return first
    for candidates in (_products, _with_offset):
        found = set(candidates(first, second, sizes, others))
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def float_form_of(first: float, second: float, sizes: Sizes, others: Sizes) -> Form | None:
    """The form of a whole number that a floating literal is; None where it is none."""
    if not (first.is_integer() and second.is_integer()):  # nor are nan and infinity
        return None
    found = form_of(int(first), int(second), sizes, others)
    return found if isinstance(found, Form) else None


def _products(first: int, second: int, sizes: Sizes, others: Sizes) -> Iterator[Form]:
    varies = sizes.sequence != others.sequence
    exponents = product(range(MAX_EXPONENT + 1), range(MAX_EXPONENT + 1 if varies else 1))
    for i, j in exponents:
        one, two = (s.batch**i * (s.sequence or 1) ** j for s in (sizes, others))
        if (i or j) and first and first * two == second * one:
            q = Fraction(first, one)
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
