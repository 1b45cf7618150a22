"""Every dimension of the search space: listed, fixed, forbidden, refused, and found again in text and in a plan."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from autopar.errors import InputError
from autopar.ir.degrees import degrees_from
from autopar.search.space.candidates import Candidates, candidates
from autopar.search.space.constraints import Constraints
from autopar.search.space.dimensions import BY_COLUMN, BY_WORD, DIMENSIONS, WORDS

CONSTRAINTS = Constraints(
    num_devices=24, global_batch=48, most_stages=10, tensor_degrees=(1, 2, 3, 4, 8), devices_per_host=4
)
ALL = candidates(CONSTRAINTS)

every_dimension = pytest.mark.parametrize("word", WORDS)


def values(found: Candidates, word: str) -> list[Any]:
    dimension = BY_WORD[word]
    column = getattr(found, dimension.column or word)
    return [dimension.value_at(position) for position in column.tolist()]


def test_every_column_is_a_dimension() -> None:
    assert {field.name for field in fields(Candidates)} == set(BY_COLUMN)
    assert len(BY_WORD) == len(DIMENSIONS) == len(BY_COLUMN) + 1  # dp is a product of two


@every_dimension
def test_several_values_are_listed(word: str) -> None:
    assert len(set(values(ALL, word))) >= 2
    assert all(BY_WORD[word].problem(word, value) is None for value in values(ALL, word))


@every_dimension
def test_fixed_and_forbidden(word: str) -> None:
    """A fixed value is the only one, a forbidden one is in no candidate. Other candidates stay as they are."""
    texts = {ALL.text(i): value for i, value in enumerate(values(ALL, word))}
    for value in sorted(set(texts.values()), key=str)[:3]:
        fixed = candidates(CONSTRAINTS.narrowed({word: value}))
        assert set(values(fixed, word)) == {value}
        kept = {text for text, own in texts.items() if own == value}
        assert kept <= {fixed.text(i) for i in range(len(fixed))}
        forbidden = candidates(CONSTRAINTS.narrowed(None, {word: value}))
        assert value not in values(forbidden, word)
        assert texts.keys() - kept <= {forbidden.text(i) for i in range(len(forbidden))}


@every_dimension
def test_a_wrong_value_is_refused(word: str) -> None:
    for wrong in (-1, True, 1.5, "none of them", None):
        for kind in ("fix", "forbid"):
            given: Any = {kind: {word: wrong}}
            with pytest.raises(InputError, match=f"{kind} {word}: must be"):
                CONSTRAINTS.narrowed(**given)


@every_dimension
def test_it_goes_into_the_plan(word: str) -> None:
    """The degrees of a candidate have the value, and the words of a plan that state it are the same degrees."""
    expected = values(ALL, word)
    for i in range(0, len(ALL), 41):
        degrees = ALL.degrees(i)
        assert BY_WORD[word].value_of(degrees) == expected[i]
        column = BY_WORD[word].column
        if column is not None:
            position = int(getattr(ALL, column)[i])
            stated = BY_WORD[word].fields_of_degrees(position, has_pipeline=degrees.pp > 1)
            assert all(getattr(degrees_from(stated), name) == getattr(degrees, name) for name in stated)


def test_a_candidate_is_found_by_its_text() -> None:
    for i in range(0, len(ALL), len(ALL) // 7):
        assert ALL.index_of(ALL.text(i)) == i


def test_no_two_candidates_are_the_same() -> None:
    rows = np.stack([getattr(ALL, name) for name in BY_COLUMN], axis=1)
    assert len(np.unique(rows, axis=0)) == len(ALL) > 1000
    assert len(candidates(replace(CONSTRAINTS, num_devices=1, global_batch=1))) == 1
