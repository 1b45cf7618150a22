"""Axis algebra: common cuts, unification of products, and what random models of dimensions must satisfy."""

from itertools import pairwise
from math import prod

import pytest

from autopar.capture.axes import Axes
from autopar.ir.sharding import common_cuts

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

factors = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=5)


def merged(atoms: list[int], cuts: list[bool]) -> list[int]:
    """Adjacent atoms multiplied together where `cuts` says so."""
    sizes = [1]
    for size, cut in zip(atoms, [*cuts, True], strict=False):
        sizes[-1] *= size
        if cut:
            sizes.append(1)
    return sizes


@given(factors, st.lists(st.booleans(), min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_groupings_of_one_product_have_common_cuts(atoms: list[int], a: list[bool], b: list[bool]) -> None:
    left, right = merged(atoms, a), merged(atoms, b)
    cuts = common_cuts(left, right)
    assert cuts is not None
    assert prod(cuts) == prod(atoms)
    for sizes in (left, right):  # a refinement of both: every prefix product of each is one of its own
        prefixes = {prod(cuts[:i]) for i in range(len(cuts) + 1)}
        assert {prod(sizes[: i + 1]) for i in range(len(sizes))} <= prefixes
    assert 1 not in cuts
    assert cuts == common_cuts(right, left)


@given(factors, factors)
def test_what_crosses_or_differs_has_none(left: list[int], right: list[int]) -> None:
    cuts = common_cuts(left, right)
    if prod(left) != prod(right):
        assert cuts is None
    elif cuts is None:
        prefixes = sorted({prod(s[: i + 1]) for s in (left, right) for i in range(len(s))})
        assert any(b % a for a, b in pairwise(prefixes))


@given(factors, st.lists(st.booleans(), min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_unified_products_are_the_same_atoms(atoms: list[int], a: list[bool], b: list[bool]) -> None:
    axes = Axes()
    left = [axes.new(size) for size in merged(atoms, a)]
    right = [axes.new(size) for size in merged(atoms, b)]
    assert axes.unify(left, right)
    assert axes.atoms(left) == axes.atoms(right)
    assert [axes.size(x) for x in axes.atoms(left)] == common_cuts(merged(atoms, a), merged(atoms, b))
    for variable in (*left, *right):
        assert prod(axes.size(x) for x in axes.atoms(variable)) == axes.size(variable)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12))
def test_unification_is_an_equivalence(pairs: list[tuple[int, int]]) -> None:
    axes = Axes()
    variables = [axes.new(12) for _ in range(8)]
    reference = {v: {v} for v in range(8)}
    for x, y in pairs:
        assert axes.unify([variables[x]], [variables[y]])
        joined = reference[x] | reference[y]
        for member in joined:
            reference[member] = joined
    for x in range(8):
        for y in range(8):
            assert (axes.atoms(variables[x]) == axes.atoms(variables[y])) == (y in reference[x])


def test_a_split_reaches_every_dimension_of_the_axis() -> None:
    """Grouped queries: the projection's rows are (kv repeat width), seen in another tensor as three dimensions."""
    axes = Axes()
    rows, elsewhere = axes.new(24), axes.new(24)
    kv, repeat, width = axes.new(2), axes.new(3), axes.new(4)
    assert axes.unify([rows], [elsewhere])
    assert axes.unify([elsewhere], [kv, repeat, width])
    assert axes.atoms(rows) == axes.atoms([kv, repeat, width])


def test_a_dimension_of_one_element_is_the_empty_product() -> None:
    axes = Axes()
    one, two = axes.new(1), axes.new(2)
    assert axes.atoms(one) == ()
    assert axes.unify([one, two], [two])


def test_crossing_factorisations_are_left_alone() -> None:
    axes = Axes()
    left, right = [axes.new(3), axes.new(4)], [axes.new(4), axes.new(3)]
    assert not axes.unify(left, right)
    assert axes.atoms(left) == tuple(left)
    assert not axes.unify([axes.new(6)], [axes.new(5)])


def test_a_product_of_one_axis_with_itself() -> None:
    """`(a a) == (b c)` with a cut inside a would need a to be split in two ways."""
    axes = Axes()
    a = axes.new(6)
    assert axes.unify([a, a], [axes.new(6), axes.new(6)])
    assert not axes.unify([a, a], [axes.new(4), axes.new(9)])
