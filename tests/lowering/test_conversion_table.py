"""The table of conversions."""

from autopar.ir.sharding import I, Kind, P, R, S, Type, same
from autopar.lowering.conversions import CONVERSIONS, wire

TYPES: dict[Kind, Type] = {"I": I, "R": R, "P": P, "S": S(0)}


def test_the_table_is_whole() -> None:
    assert set(CONVERSIONS) == {(a, b) for a in TYPES for b in TYPES if a != b} | {("S", "S")}


def test_without_a_cotangent_nothing_goes_back_and_replicas_are_equal() -> None:
    assert wire("I", "R", True) == (None, "all_reduce")
    assert wire("I", "R", False) == (None, None)
    assert wire("S", "S", True) == ("all_to_all", "all_to_all")
    assert same(I, R, False) and not same(I, R, True)
    assert not same(I, P, False) and same(S(1), S(1), True)
