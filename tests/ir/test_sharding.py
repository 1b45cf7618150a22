"""Types, products of dimensions, and which part of a value a rank holds."""

from itertools import product

import pytest
import torch

from autopar.ir.sharding import Dims, I, Mesh, P, R, S, Type, steps
from autopar.runtime.parameters.shards import all_shards, assemble, coordinates, local_shard

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies
PACKED = Dims(((4,), (3, 4, 2)), ((0,), (1, 2, 3)))  # (batch, (3 heads width))


@given(st.sampled_from([I, R, P]) | st.builds(S, st.integers(0, 9), st.integers(0, 9)))
def test_types_print_and_parse(kind: Type) -> None:
    assert Type.parse(str(kind)) == kind


@pytest.mark.parametrize("text", ["", "Q", "S", "S(", "S()", "S(x)", "S(1.)x"])
def test_what_is_no_type(text: str) -> None:
    with pytest.raises(ValueError):
        Type.parse(text)


def test_local_shapes() -> None:
    assert PACKED.shape == (4, 24)
    assert PACKED.local_shape((S(1, 1),), (2,)) == (4, 12)
    assert PACKED.local_sizes((S(0), S(1, 1)), (2, 4)) == ((2,), (3, 1, 2))
    assert PACKED.local_shape((R, P), (2, 4)) == (4, 24)
    assert PACKED.local_shape((S(1, 0),), (2,)) == (4, 16)  # two of three parts each, one of them padding


def test_the_part_of_an_inner_axis_is_strided() -> None:
    value = torch.arange(24)[None].expand(4, 24)
    mine = local_shard(value, PACKED, (S(1, 1),), Mesh.of(tp=4), (1,))
    assert mine[0].tolist() == [2, 3, 10, 11, 18, 19]  # head 1 of query, key and value


@given(st.lists(st.sampled_from([I, R, P, S(0), S(1, 1), S(1, 2)]), min_size=2, max_size=2), st.integers(0, 3))
def test_parts_make_the_whole_again(types: list[Type], seed: int) -> None:
    if types[0] == types[1] and types[0].kind == "S":
        return
    mesh = Mesh.of(dp=2, tp=2)
    value = torch.randn(PACKED.shape, generator=torch.Generator().manual_seed(seed))
    held = all_shards(value, PACKED, types, mesh)
    whole, apart = assemble(held, PACKED, types, mesh)
    assert torch.equal(whole, value)
    assert apart == 0
    assert all(tuple(p.shape) == PACKED.local_shape(types, mesh.degrees) for p in held)


def test_copies_that_differ_are_seen() -> None:
    mesh = Mesh.of(tp=2)
    held = [torch.zeros(4, 24), torch.full((4, 24), 0.5)]
    assert assemble(held, PACKED, (R,), mesh)[1] == 0.5
    assert assemble(held, PACKED, (R,), mesh, cotangent=True)[1] == 0  # parts of a sum
    assert assemble([h.int() for h in (held[0], held[1] + 1)], PACKED, (I,), mesh)[1] == float("inf")


def test_ranks_are_numbered_with_the_last_mesh_dimension_fastest() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    assert list(coordinates(mesh)) == list(product(range(2), range(3)))
    assert (mesh.size, dict(mesh.as_dict())) == (6, {"dp": 2, "tp": 3})


def test_conversions_that_shrink_a_value_go_first() -> None:
    """A reduce-scatter on one mesh dimension leaves less to gather on the other one."""
    mesh = Mesh.of(dp=2, tp=2)
    assert steps(PACKED, (S(0), P), (R, S(1, 1)), mesh) == [(1,), (0,)]
    assert steps(PACKED, (P, S(0)), (S(1, 1), R), mesh) == [(0,), (1,)]


def test_a_mesh_dimension_owns_the_batch_or_axes_of_parameters() -> None:
    mesh = Mesh(("dp", "tp0", "tp1"), (2, 2, 2))
    assert (mesh.owning("batch"), mesh.owning("parameters")) == ([0], [1, 2])
    assert [mesh.joined(i) for i in range(3)] == [None, "tp0_tp1", None]
