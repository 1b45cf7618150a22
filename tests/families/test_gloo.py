"""Cells of docs/equivalence.md over real ranks, of most kinds; `make rest` and `make verify-all` have the others."""

from types import ModuleType

import pytest

pytest.importorskip("transformers")

MESH = "tp=2 × dp=2, ZeRO 3, sequence"
CELLS = (
    ("meshes", "zoo:llama", MESH),
    ("recomputation", "zoo:llama", "selective, 4 chunks of the loss, tp=2"),
    ("mixtures", "mixtures:mixtral", "dp=2, accumulate 2, ZeRO 3"),
    ("empty-experts", "mixtures:mixtral", "tp=2 × dp=2"),
    ("experts", "mixtures:mixtral", "dp=2 × ep=2, ZeRO 0, gather"),
)


@pytest.mark.parametrize(("flag", "family", "plan"), CELLS)
def test_equal_over_gloo(tool: ModuleType, open_worlds: object, flag: str, family: str, plan: str) -> None:
    table = tool.tables()[flag]
    spec, wish = table.spec(family, table.plans[plan]), table.plans[plan]
    assert tool.worst_error(spec, wish, open_worlds, table.check) <= tool.TOLERANCE


def test_ci_compares_every_family_and_every_plan(tool: ModuleType) -> None:
    """In five commits, each fifth about as large as the others."""
    every = tool.tables()
    fifths = [tool.cells_of_fifth(every, commit) for commit in "01234"]
    sizes = [sum(map(len, fifth.values())) for fifth in fifths]
    assert max(sizes) < 1.1 * min(sizes)
    for flag, table in every.items():
        cells = set().union(*(fifth[flag] for fifth in fifths))
        assert {family for family, _ in cells} == set(table.families)
        assert {plan for _, plan in cells} == set(table.plans)
