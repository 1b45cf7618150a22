"""Unequally packed projections are split by heads, and compute the same as one device."""

from functools import cache

import packed_models
import pytest
import torch
from equivalence import Case, case_of, check, check_random, labelled, run
from gradient_check import gradient_table
from planned import make_plan
from suites import long, thinned
from type_check import type_report

from autopar.ir.cluster import ClusterSpec
from autopar.ir.sharding import Mesh
from autopar.planning.degrees import resolve_degrees
from autopar.runtime.parameters.packed import join_packed
from autopar.testing.one_process import generate_all

pytest.importorskip("transformers")

MODELS = {
    "phi3": packed_models.phi3,
    "falcon": packed_models.falcon,
    "falcon_grouped": packed_models.falcon_grouped,
    "bigcode": packed_models.bigcode,
}
TP, BOTH = Mesh.of(tp=2), Mesh.of(dp=2, tp=2)


@cache
def the_case(model: str) -> Case:
    return case_of(MODELS[model]())


@pytest.mark.parametrize("model", list(MODELS))
def test_layers_fold_and_every_operator_has_a_rule(model: str) -> None:
    case = the_case(model)
    assert [block.name.rsplit(".", 1)[-1] for block in case.program.blocks] == [
        "denominator", "prologue", "0", "epilogue"
    ]  # fmt: skip
    for bounds in case.analysis(TP).bounds:
        assert all(bound.rule.known for bound in bounds.values())


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("phi3", ["weight_0_32_", "weight_32_48_", "weight_48_64_"]),
        ("falcon", ["weight_0_32_", "bias_0_32_"]),
        ("falcon_grouped", ["weight", "bias"]),
        ("bigcode", ["weight_0_32_", "bias_0_32_"]),
    ],
)
def test_split_by_heads(model: str, split: list[str]) -> None:
    """Queries are split by whole heads: on the outermost axis of the piece, which holds them."""
    case = the_case(model)
    labels = labelled(case, TP)
    index = next(i for i, b in enumerate(case.program.blocks) if b.name.endswith(".0"))
    projection = {"phi3": "qkv_proj", "bigcode": "c_attn"}.get(model, "query_key_value")
    found = {n: t for n, t in labels[index].ports.items() if projection in n}
    for suffix in split:
        (kinds,) = [t for n, t in found.items() if n.endswith(f"{projection}_{suffix}")]
        assert kinds[0].kind == "S" and (kinds[0].dim, kinds[0].position) == (0, 0)


@pytest.mark.parametrize("mesh", [long(TP), BOTH], ids=str)
@pytest.mark.parametrize("model", list(MODELS))
def test_equal_to_one_device(model: str, mesh: Mesh) -> None:
    case = the_case(model)
    labels = labelled(case, mesh)
    check(case, labels, mesh)
    found, expected = (
        join_packed(case.program, run(case, labels, mesh).gradients),
        join_packed(case.program, case.gradients),
    )
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():  # whole: gradients of keys' biases alone are zero but for rounding
        assert torch.linalg.norm(found[name] - gradient) <= 1e-12 * torch.linalg.norm(gradient), name


@pytest.mark.parametrize("seed", (0, long(1)))
@pytest.mark.parametrize("model", thinned(MODELS, keep=("falcon_grouped",)))
def test_random_labels(model: str, seed: int) -> None:
    check_random(the_case(model), BOTH, seed)


@pytest.mark.parametrize("model", ["phi3", "falcon"])
def test_types_and_gradient_sums(model: str) -> None:
    """Every piece's gradient is summed once, and the types of the generated code hold globally."""
    pytest.importorskip("spmd_types")
    case = the_case(model)
    labels = labelled(case, BOTH)
    assert type_report(case.program, case.analysis(BOTH), labels, BOTH).passed
    rows = gradient_table(case.program, generate_all(case.program, case.analysis(BOTH), labels, BOTH), BOTH)
    assert {row.parameter for row in rows} == set(case.program.parameters)


def test_a_plan_lists_the_pieces() -> None:
    model, inputs = packed_models.phi3()
    degrees = resolve_degrees({"tp": 2, "dp": 2}, 4, 4)
    _, plan = make_plan(model, ClusterSpec.preset("4xcpu"), inputs, degrees, name="phi3")
    assert plan.summary is not None
    pieces = {p.name: (p.num_copies, p.shape, p.split["tp"]) for p in plan.summary.parameters if "qkv_proj" in p.name}
    column = "dimension 0 in 2 (column-parallel)"
    assert pieces == {
        "model.layers.*.self_attn.qkv_proj.weight[0:32]": (2, (32, 32), column),
        "model.layers.*.self_attn.qkv_proj.weight[32:48]": (2, (16, 32), column),
        "model.layers.*.self_attn.qkv_proj.weight[48:64]": (2, (16, 32), column),
    }
    assert all(name in plan.explain() for name in pieces)
