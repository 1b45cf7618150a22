"""More context ranks than key heads: `cp` becomes two mesh dimensions, one of queries and one of heads."""

from dataclasses import replace

import pytest
from label_cases import program_of

from autopar.capture.analysis import analyse
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.plan import Plan
from autopar.planning.fixed import choose_labels, label_plan
from autopar.search.labels.context_dims import context_dims

ATTENTION = "self_attn:scaled_dot_product_attention:0"


def planned(degrees: Degrees, cluster: str = "8xh100") -> Plan:
    return label_plan(program_of("llama"), ClusterSpec.preset(cluster), degrees, "llama")


def attention_of(plan: Plan) -> tuple[str, ...]:
    layer = next(b for b in plan.blocks if b.name == "model.layers.0")
    return tuple(one for one, name in zip(layer.labels[ATTENTION], plan.mesh.names, strict=True) if "cp" in name)


def test_degrees_that_key_heads_ask_for() -> None:
    """Four key heads with two queries each; tensor ranks leave fewer on a rank."""
    program = program_of("llama")
    found = {(cp, tp): context_dims(program, analyse(program), cp, tp) for cp in (2, 3, 4, 8) for tp in (1, 2, 4)}
    wanted = {(8, 1): (2, 4), (4, 2): (2, 2), (8, 2): (4, 2)}
    assert found == {case: wanted.get(case) for case in found}


def test_queries_are_split_by_the_first_and_heads_by_the_second() -> None:
    labels = attention_of(planned(Degrees(cp=8, cp_dims=(2, 4))))
    assert labels[0] in ("q.0", "q.0:ring") and not labels[1].startswith("q")


@pytest.mark.parametrize("context", ["queries", "ring"])
def test_context_says_how_the_first_splits_queries(context: str) -> None:
    labels = attention_of(planned(Degrees(cp=8, cp_dims=(2, 4), context=context)))
    assert labels[0] == ("q.0:ring" if context == "ring" else "q.0") and not labels[1].startswith("q")


def test_the_faster_of_one_and_two_dimensions_is_taken() -> None:
    program, cluster = program_of("llama"), ClusterSpec.preset("8xh100")
    found, _, labelling = choose_labels(program, cluster, Degrees(cp=8))
    assert found.cp_dims in (None, (2, 4)) and found.cp == 8
    assert labelling.mesh == found.mesh


def test_a_given_way_stays_on_one_dimension() -> None:
    assert planned(Degrees(cp=8, context="ring")).degrees.cp_dims is None


def test_heads_on_the_first_dimension_are_refused() -> None:
    with pytest.raises(PlanError, match=r"context.*heads that the degree divides"):
        planned(Degrees(cp=8, cp_dims=(2, 4), context="heads"))


def test_the_plan_says_it_and_loads_again() -> None:
    plan = planned(Degrees(cp=8, cp_dims=(2, 4)))
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "cp 8 (2 of queries × 4 of heads)" in plan.explain()


def test_dimensions_by_hand() -> None:
    assert degrees_from({"cp_dims": [2, 4]}) == Degrees(cp=8, cp_dims=(2, 4))
    assert replace(Degrees(cp=8), cp_dims=(2, 4)).mesh.names == ("dp", "cp0", "cp1", "tp")
    with pytest.raises(PlanError, match="product cp = 4"):
        degrees_from({"cp": 4, "cp_dims": [2, 4]})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"context.*cp=8.*heads that the degree divides.*leave context out"):
        planned(Degrees(cp=8, context="heads"))
