"""The table of conversions agrees with the functions that the generated code calls."""

import inspect

import pytest

from autopar.cost_model.conversions import TABLE, wire
from autopar.ir.sharding import I, Kind, P, R, S, Type, same
from autopar.runtime import conversions as functions

FUNCTIONS = {
    ("I", "R"): functions.invariant_to_replicate,
    ("P", "I"): functions.all_reduce_to_invariant,
    ("P", "R"): functions.all_reduce_to_replicate,
    ("P", "S"): functions.reduce_scatter,
    ("S", "R"): functions.all_gather_to_replicate,
    ("S", "I"): functions.all_gather_to_invariant,
    ("I", "S"): functions.shard_of_invariant,
    ("S", "S"): functions.all_to_all,
    ("I", "P"): functions.partial_of_invariant,
    ("S", "P"): functions.partial_of_shard,
    ("R", "I"): functions.replicate_to_invariant,
    ("R", "S"): functions.shard_of_replicate,
    ("R", "P"): functions.partial_of_replicate,
}
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
