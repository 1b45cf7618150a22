"""Mixtures of experts of transformers: tokens are parallel in each of them, and all meshes equal one device."""

from functools import cache
from itertools import product
from types import ModuleType

import pytest
from suites import thinned

pytest.importorskip("transformers")

import mixtures
from equivalence import Case, case_of, check, check_random, labelled

from autopar.ir.sharding import Mesh
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.routed import ORDER, PRODUCT

DIFFERENT_IN_KIND = ("mixtral", "deepseek_v3", "gpt_oss", "llama4_text")
MESHES = {
    "tp=2": (Mesh.of(tp=2), None),
    "tp=4": (Mesh.of(tp=4), None),
    "dp=4": (Mesh.of(dp=4), None),
    "tp=2 dp=2": (Mesh.of(dp=2, tp=2), None),
    "tp=2 dp=2 sequence": (Mesh.of(dp=2, tp=2), True),
}


@cache
def the_case(family: str) -> Case:
    return case_of(mixtures.example(family))


@pytest.mark.parametrize("family", thinned(mixtures.FAMILIES, keep=DIFFERENT_IN_KIND))
def test_tokens_are_parallel(family: str) -> None:
    program = the_case(family).program
    assert program.mixes_batch is None
    targets = [n.target for b in program.blocks for n in b.graph.nodes if n.op == "call_function"]
    assert not [t for t in targets if "sort" in str(t)]
    assert GROUPED_MM not in targets
    assert (ORDER in targets) == (PRODUCT in targets) == (family not in mixtures.BY_BMM)


@pytest.mark.parametrize(
    ("family", "mesh"),
    thinned(product(mixtures.FAMILIES, MESHES), keep=product(DIFFERENT_IN_KIND, ["tp=2 dp=2 sequence"])),
)
def test_equal_to_one_device(family: str, mesh: str) -> None:
    case, (degrees, sequence) = the_case(family), MESHES[mesh]
    check(case, labelled(case, degrees, sequence), degrees)


@pytest.mark.parametrize("family", thinned(mixtures.FAMILIES, keep=("gpt_oss",)))
def test_random_labels(family: str) -> None:
    for seed, mesh in enumerate((Mesh.of(tp=2), Mesh.of(dp=2, tp=2))):
        check_random(the_case(family), mesh, seed)


def test_a_balance_loss_is_exact_over_ranks_and_refused_over_micro_batches() -> None:
    case = case_of(mixtures.example("mixtral", output_router_logits=True))
    assert case.program.mixes_batch is not None
    check(case, labelled(case, Mesh.of(dp=2, tp=2)), Mesh.of(dp=2, tp=2))


def test_a_routing_that_does_not_occur_fails_its_check(tool: ModuleType) -> None:
    with pytest.raises(AssertionError):
        tool.tables()["empty-experts"].check(None, [[2, 2, 4], [3, 3, 2]])
    with pytest.raises(AssertionError):
        tool.tables()["one-expert"].check(None, [[8, 0, 0], [7, 1, 0]])
    with pytest.raises(AssertionError):
        tool.tables()["empty-experts"].check(None, [])


def test_a_table_replaces_the_table_of_its_section(tool: ModuleType) -> None:
    page = "# A\n\n| x |\n|---|\n| 1 |\n\n## B\n\nText.\n\n| y |\n\nMore.\n"
    once = tool.with_table(page, "B", ["| z |", "|---|"], f"{tool.MADE_BY}--b`, now.")
    assert once == page.replace("| y |", f"| z |\n|---|\n\n{tool.MADE_BY}--b`, now.")
    assert tool.with_table(once, "B", ["| y |"], f"{tool.MADE_BY}--b`, now.").count(tool.MADE_BY) == 1
    with pytest.raises(ValueError, match="needs the heading 'C'"):
        tool.with_table(page, "C", [], "")
