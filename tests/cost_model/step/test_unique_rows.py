"""Combinations of columns: every row finds its own, and there is one of each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.step import unique_rows as module
from autopar.cost_model.step.unique_rows import distinct, numbered, spread

VALUES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 64.0, 65537.0, 2.5, -1.0, 1e12])
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(VALUES, min_size=width, max_size=width), min_size=1, max_size=40)
)


def check(columns: list[np.ndarray], num_rows: int) -> None:
    found = distinct([numbered(column) for column in columns])
    table = np.stack([np.broadcast_to(column, num_rows) for column in columns], axis=1)
    assert len(found.rows) == len(np.unique(table, axis=0))
    for column in columns:
        at_rows = column if column.size == 1 else column[found.rows]
        np.testing.assert_array_equal(np.broadcast_to(spread(at_rows, found.index), num_rows), table[:, 0])
        table = table[:, 1:]


@given(TABLES)
@settings(max_examples=200, deadline=None)
def test_every_row_finds_its_combination(table: list[list[float]]) -> None:
    columns = list(np.array(table).T)
    check(columns, len(table))


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64, np.float32, np.bool_])
def test_columns_of_any_number(kind: type) -> None:
    chooser = np.random.default_rng(0)
    check([chooser.integers(0, 2, 100).astype(kind), np.ones(1, dtype=kind), chooser.integers(0, 9, 100)], 100)


def test_tables_do_not_outgrow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room for tables numbers are counted again between columns, or sorted."""
    chooser = np.random.default_rng(1)
    columns = [chooser.integers(0, 9, 50) * 7.0 for _ in range(5)]
    for limit in (1, 40, 70, 500):
        monkeypatch.setattr(module, "SMALL_TABLE", limit)
        check(columns, 50)
