"""The chosen operators of selective recomputation are the best ones: against every subset of small blocks."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.work.block_work import Operator
from autopar.cost_model.work.recomputable import Recomputable, RecomputableOperator, SavedValue
from autopar.search.labels.recomputed_operators import best_exchange, fewest_bytes, saved_bytes

ROUNDING = 1e-9


def operator(name: str) -> Operator[float]:
    return Operator(
        name=name, kind="memory", flops=0.0, m=0.0, n=0.0, k=0.0, count=0.0, forward_bytes=0.0, backward_bytes=0.0,
        kernels_forward=1, kernels_backward=1,
    )  # fmt: skip


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Recomputable[float], list[float]]:
    """A block of at most eight operators, no chain in general, and the cost of each operator."""
    sizes = st.integers(0, 9).map(float)
    count = draw(st.integers(1, 8))
    values = [SavedValue(num_bytes=draw(sizes), maker=None, is_saved=draw(st.booleans())) for _ in range(2)]
    operators = []
    for n in range(count):
        takes = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True))
        own = draw(st.sampled_from([0.0, 0.0, 3.0]))
        operators.append(RecomputableOperator(keys=(f"{n}",), takes=tuple(takes), own_bytes=own, work=operator(f"{n}")))
        values.append(SavedValue(num_bytes=draw(sizes), maker=n, is_saved=draw(st.booleans())))
        if draw(st.booleans()):  # the result of a collective, which no operator makes
            values.append(SavedValue(num_bytes=draw(sizes), maker=None, is_saved=draw(st.booleans())))
    block = Recomputable(values=tuple(values), operators=tuple(operators), other_bytes=draw(sizes))
    return block, [draw(st.integers(0, 5).map(float)) for _ in range(count)]


def every_set(block: Recomputable[float]) -> Iterator[tuple[int, ...]]:
    for size in range(len(block.operators) + 1):
        yield from combinations(range(len(block.operators)), size)


def cost(costs: Sequence[float], again: Sequence[int]) -> float:
    return sum(costs[n] for n in again)


@settings(max_examples=150, deadline=None)
@given(blocks(), st.floats(0.0, 1.0))
def test_no_set_leaves_fewer_bytes_at_this_cost(made: tuple[Recomputable[float], list[float]], part: float) -> None:
    block, costs = made
    most = part * sum(costs)
    found = fewest_bytes(block, costs, most)
    best = min(saved_bytes(block, one) for one in every_set(block) if cost(costs, one) <= most)
    assert cost(costs, found) <= most + 1e-6
    assert saved_bytes(block, found) == pytest.approx(best)


@settings(max_examples=150, deadline=None)
@given(blocks(), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_no_set_exchanges_bytes_better(made: tuple[Recomputable[float], list[float]], worth: float) -> None:
    block, costs = made
    found = best_exchange(block, costs, worth)
    values = (saved_bytes(block, one) + worth * cost(costs, one) for one in every_set(block))
    assert saved_bytes(block, found) + worth * cost(costs, found) == pytest.approx(min(values))


def test_a_recomputed_operator_needs_what_it_takes() -> None:
    """a (8 bytes) → b (1 byte, not saved) → c (8 bytes): to free c alone, b must be saved; with b recomputed, a."""
    values = (
        SavedValue(num_bytes=8.0, maker=None, is_saved=True),
        SavedValue(num_bytes=1.0, maker=0, is_saved=False),
        SavedValue(num_bytes=8.0, maker=1, is_saved=True),
    )
    b, c = (
        RecomputableOperator(keys=(name,), takes=(place,), own_bytes=0.0, work=operator(name))
        for name, place in (("b", 0), ("c", 1))
    )
    block = Recomputable(values=values, operators=(b, c), other_bytes=0.0)
    assert [saved_bytes(block, again) for again in ((), (1,), (0, 1), (0,))] == [16.0, 9.0, 8.0, 16.0]
    assert fewest_bytes(block, [5.0, 1.0], 10.0) == (0, 1)
    assert fewest_bytes(block, [5.0, 1.0], 5.0) == (1,)


def test_a_block_without_operators_recomputes_nothing() -> None:
    """HiGHS has no solution of a program without columns."""
    value = SavedValue(num_bytes=3072.0, maker=None, is_saved=True)
    block: Recomputable[float] = Recomputable(values=(value,), operators=(), other_bytes=128.0)
    assert fewest_bytes(block, [], 1.0) == best_exchange(block, [], 2e7) == ()


def test_a_block_without_values_recomputes_nothing() -> None:
    nothing: Recomputable[float] = Recomputable(values=(), operators=(), other_bytes=4.0)
    assert fewest_bytes(nothing, [], 1.0) == ()
