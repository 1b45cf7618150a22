"""The table of conversions agrees with the functions that the generated code calls."""

import inspect

import pytest
from runtime_functions import FUNCTIONS

from autopar.cost_model.work.conversions import TABLE, wire
from autopar.ir.sharding import I, Kind, P, R, S, Type, same

TYPES: dict[Kind, Type] = {"I": I, "R": R, "P": P, "S": S(0)}


def test_the_table_is_whole() -> None:
    pairs = {(a, b) for a in TYPES for b in TYPES if a != b} | {("S", "S")}
    assert set(TABLE) == pairs == set(FUNCTIONS)


@pytest.mark.parametrize("pair", list(TABLE), ids=str)
def test_priced_is_what_runs(pair: tuple[Kind, Kind]) -> None:
    """The two primitives in the body of each runtime function are those of the table."""
    source = inspect.getsource(FUNCTIONS[pair])
    call = source[source.index("_convert(x, ") :].split(", ")
    sends = tuple(name.rstrip("_") if name.rstrip("_") in COLLECTIVES else None for name in (call[1], call[2]))
    assert sends == TABLE[pair]


COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def test_without_a_cotangent_nothing_goes_back_and_replicas_are_equal() -> None:
    assert wire(I, R, True) == (None, "all_reduce")
    assert wire(I, R, False) == (None, None)
    assert wire(S(0), S(1), True) == ("all_to_all", "all_to_all")
    assert wire(S(0), S(0), True) == (None, None)
    assert same(I, R, False) and not same(I, R, True)
    assert not same(I, P, False) and same(S(1), S(1), True)
