"""Storage of parameters: factored shapes, uneven parts, the dimension that ZeRO shards, buckets."""

from math import prod

import pytest

from autopar.ir.sharding import Dims, I, Mesh, R, S, Type
from autopar.ir.storage import BUCKET_BYTES, buckets, storage_of

PACKED = Dims(((3, 8, 4), (32,)), ((0, 1, 2), (3,)))  # GPT-2's (3 h e) in


def test_a_split_inside_a_dimension_gets_a_dimension_of_its_own() -> None:
    found = storage_of(PACKED, (R, S(0, 1)), Mesh.of(dp=2, tp=4))
    assert found.shape == (3, 32, 32) and found.splits == (1,)
    assert found.local_shape == (3 * 2 * 4, 32) and found.deferred == ("dp",)
    assert [found.own_shape((at,)) for at in range(4)] == [(3, 8, 32)] * 4


def test_uneven_parts() -> None:
    found = storage_of(Dims(((7, 4), (32,)), ((0, 1), (2,))), (I, S(0)), Mesh.of(dp=1, tp=4))
    assert found.shape == (7, 4, 32) and found.local_shape == (8, 32)
    assert [found.own_shape((at,))[0] for at in range(4)] == [2, 2, 2, 1]
    assert sum(prod(found.own_shape((at,))) for at in range(4)) == 7 * 4 * 32


@pytest.mark.parametrize(
    "sizes, types, ranks, expected",
    (
        ((8, 6), (R, I), 2, 0),
        ((7, 6), (R, I), 2, 1),
        ((7, 5), (R, I), 2, 0),  # padded
        ((6, 8), (R, S(1)), 4, 0),  # beside another shard only dimension 0
        ((0, 8), (R, I), 2, None),
    ),
)
def test_the_dimension_that_zero_shards(
    sizes: tuple[int, int], types: tuple[Type, Type], ranks: int, expected: int | None
) -> None:
    dims = Dims(tuple((n,) for n in sizes), ((0,), (1,)))
    assert storage_of(dims, types, Mesh.of(dp=ranks, tp=2)).zero_dim(ranks) == expected


def test_buckets_keep_the_order_and_a_dtype() -> None:
    sizes = [(4, "a"), (BUCKET_BYTES, "a"), (1, "a"), (1, "b"), (1, "a")]
    assert list(buckets(sizes)) == [[0], [1], [2], [3], [4]]
    assert list(buckets([(1, "a")] * 3)) == [[0, 1, 2]]
    assert list(buckets([])) == []
