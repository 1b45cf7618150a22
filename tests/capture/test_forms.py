"""Forms: the formulas of sizes that explain a number in two captures."""

from collections.abc import Callable

import pytest

from autopar.capture.forms import Form, Sizes, batch_exponent, float_form_of, form_of

LARGE, SMALL = Sizes(batch=8, sequence=4096), Sizes(batch=3, sequence=6)


@pytest.mark.parametrize(
    "number",
    [
        lambda b, s: b,
        lambda b, s: s,
        lambda b, s: 2 * s,
        lambda b, s: s // 2,
        lambda b, s: b * s,
        lambda b, s: 5 * b * s,
        lambda b, s: b * s * s,
        lambda b, s: b * b,
        lambda b, s: -s,
        lambda b, s: s - 1,
        lambda b, s: s + 1,
        lambda b, s: 2 * s - 1,
        lambda b, s: s + 197,
        lambda b, s: b * (s - 1),
        lambda b, s: b * (s + 77),
        lambda b, s: b + 1,
        lambda b, s: s * (b + 1),
    ],
)
def test_a_number_of_sizes_is_found_again(number) -> None:  # type: ignore[no-untyped-def]
    form = form_of(number(8, 4096), number(3, 6), LARGE, SMALL)
    assert isinstance(form, Form)
    for batch, sequence in [(2, 2048), (64, 4096), (7, 128)]:
        assert form.at(Sizes(batch=batch, sequence=sequence)) == number(batch, sequence)


def test_a_number_that_stays_is_a_constant() -> None:
    assert form_of(64, 64, LARGE, SMALL) == 64
    assert form_of(0, 0, LARGE, SMALL) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [(512, 6), (12, 4), (0, 6), (64, 2), (4096 - 100, 0)],
    ids=["least of sequence and 512", "next power of two", "none", "logarithm", "what is beyond a window"],
)
def test_what_is_no_form_is_not_made_up(first: int, second: int) -> None:
    assert form_of(first, second, LARGE, SMALL) is None


def test_sizes_in_one_proportion_tell_nothing_apart() -> None:
    assert form_of(8, 6, Sizes(batch=8, sequence=16), Sizes(batch=6, sequence=12)) is None
    one, two = Sizes(batch=8, sequence=11), Sizes(batch=3, sequence=6)
    assert form_of(10, 5, one, two) is None  # one less than the sequence, or two more than the batch


def test_where_the_sequence_stays_only_the_batch_is_looked_for() -> None:
    one, two = Sizes(batch=4, sequence=32), Sizes(batch=3, sequence=32)
    form = form_of(4 * 31, 3 * 31, one, two)
    assert isinstance(form, Form)
    assert form.at(Sizes(batch=9, sequence=32)) == 9 * 31


def test_a_part_that_is_not_whole_has_no_value() -> None:
    form = form_of(2048, 3, LARGE, SMALL)
    assert isinstance(form, Form)
    assert form.at(Sizes(batch=2, sequence=7)) is None


def test_floating_numbers_of_sizes() -> None:
    assert float_form_of(8.0, 3.0, LARGE, SMALL) == Form(((1, 1, 1, 0),))
    assert float_form_of(0.5, 0.25, LARGE, SMALL) is None


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (lambda b, s: 7, 0),
        (lambda b, s: b * s, 1),
        (lambda b, s: 0.25 / b, -1),
        (lambda b, s: b * (s - 1), 1),
        (lambda b, s: 1 / (b * (s - 1)), -1),
        (lambda b, s: s - 1, 0),
        (lambda b, s: 2048 - s, 0),
        (lambda b, s: s**0.5, None),
        (lambda b, s: b + 1, None),
        (lambda b, s: 2.0**b, None),
    ],
)
def test_the_power_of_the_batch_size(number: Callable[[int, int], float], expected: int | None) -> None:
    sizes, others = Sizes(batch=8, sequence=64), Sizes(batch=3, sequence=6)
    assert batch_exponent(number(8, 64), number(3, 6), sizes, others) == expected
