"""Models and degrees that are out of the ordinary."""

from collections.abc import Callable
from typing import Any

import pytest
from suites import long

from autopar.commands.verify import verify
from autopar.errors import PlanError
from autopar.runtime.distributed.launch import Ranks

Worlds = Callable[[int], Ranks]


def check(spec: str, ranks: Ranks, dtype: str = "float64", sizes: dict[str, Any] | None = None, **wish: Any) -> None:
    spec = f"integration_models:{spec}" if sizes is None else spec
    report = verify(spec, world_size=ranks.world_size, degrees=wish, dtype=dtype, steps=2, ranks=ranks, **(sizes or {}))
    assert report.passed, [(q.name, q.where, q.max_error) for q in report.quantities]


@pytest.mark.parametrize(
    "wish",
    (
        {"tp": 3},
        long({"dp": 3, "zero": 0}),
        long({"dp": 3, "zero": 1, "accumulate": 2}),
        {"dp": 3, "zero": 3, "accumulate": 3},
    ),
    ids=str,
)
@pytest.mark.parametrize("spec", ("odd", long("summed")))
def test_three_ranks(spec: str, wish: dict[str, int], worlds: Worlds) -> None:
    check(spec, worlds(3), **wish)


@pytest.mark.parametrize("zero", (long(1), 3))
def test_rows_that_the_ranks_do_not_divide(zero: int, worlds: Worlds) -> None:
    check("odd_width", worlds(3), dp=3, zero=zero)


@pytest.mark.parametrize("wish", ({"zero": 0}, long({"zero": 3}), {"zero": 2, "accumulate": 2}), ids=str)
@pytest.mark.parametrize("spec", (long("odd"), "summed"))
def test_two_by_two(spec: str, wish: dict[str, int], four_ranks: Ranks) -> None:
    check(spec, four_ranks, tp=2, dp=2, **wish)


def test_transformer_on_three_ranks(worlds: Worlds) -> None:
    sizes = {"layers": 2, "hidden": 48, "seq_len": 12, "batch": 2}
    check("gpt2", worlds(3), sizes=sizes, tp=3, sequence_parallel=True)


def test_one_sequence_per_rank(four_ranks: Ranks) -> None:
    check("gpt2", four_ranks, sizes={"layers": 2, "hidden": 64, "seq_len": 16, "batch": 1}, dp=4)


def test_half_precision(four_ranks: Ranks) -> None:
    sizes = {"layers": 2, "hidden": 64, "seq_len": 16, "batch": 2}
    check("gpt2", four_ranks, "bfloat16", sizes, tp=2, dp=2, zero=3)


def test_samples_that_depend_on_each_other(worlds: Worlds) -> None:
    """Splitting the batch over ranks stays exact; splitting it in time is refused, naming the operator.

    A pipeline takes one micro-batch, if nobody asks for more.
    """
    check("contrastive", worlds(3), dp=3)
    check("contrastive", worlds(2), pp=2)
    with pytest.raises(PlanError, match=r"micro_batches × accumulate = 2 would change the loss"):
        check("contrastive", worlds(2), pp=2, micro_batches=2)
    with pytest.raises(PlanError, match=r"accumulate = 2 would change the loss: .*matmul.* use accumulate = 1"):
        check("contrastive", worlds(3), dp=3, accumulate=2)


def test_a_view_of_a_gathered_parameter_that_a_later_block_reads(two_ranks: Ranks) -> None:
    """ZeRO 3 frees the gathered parameter behind its block."""
    check("latents", two_ranks, dp=2, zero=3)


def test_weights_that_a_factory_draws_without_torch(two_ranks: Ranks) -> None:
    """Every process builds the model, with the same numbers."""
    check("drawn_elsewhere", two_ranks, tp=2)


@pytest.mark.parametrize("wish", ({"tp": 2}, long({"dp": 2, "zero": 3}), {"pp": 2}), ids=str)
def test_a_new_value_of_a_buffer_that_later_blocks_read(wish: dict[str, int], two_ranks: Ranks) -> None:
    """It is drawn in torch's default dtype, which the check promotes."""
    check("redrawn", two_ranks, **wish)
