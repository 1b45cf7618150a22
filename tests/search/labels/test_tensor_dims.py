"""Fewer key heads than ranks: `tp` becomes two mesh dimensions that send as one."""

from collections import Counter

import pytest
from label_cases import program_of
from listed_conversions import listed_conversions

from autopar.capture.analysis import analyse
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.plan import Plan
from autopar.ir.sharding import Mesh
from autopar.planning.fixed import label_plan
from autopar.search.labels.tensor_dims import tensor_dims


def planned(degrees: Degrees) -> Plan:
    return label_plan(program_of("llama"), ClusterSpec.preset("8xcpu"), degrees, "llama")


def test_degrees_that_key_heads_ask_for() -> None:
    """Four key heads with two queries each."""
    program = program_of("llama")
    found = {tp: tensor_dims(program, analyse(program), tp) for tp in (2, 3, 4, 8, 16)}
    assert found == {2: None, 3: None, 4: None, 8: (4, 2), 16: None}


def test_degrees_that_other_heads_ask_for() -> None:
    """Twelve heads: eight parts would leave two ranks nothing, 12 over 4 does not pad; five parts hold 15."""
    program = program_of("gpt2", heads=12)
    found = {tp: tensor_dims(program, analyse(program), tp) for tp in (2, 4, 5, 8)}
    assert found == {2: None, 4: None, 5: None, 8: (4, 2)}


def test_keys_are_split_by_the_first_and_queries_by_both() -> None:
    plan = planned(Degrees(tp=8))
    assert plan.mesh == Mesh(("dp", "tp0", "tp1"), (1, 4, 2))
    labels = next(b for b in plan.blocks if b.name == "model.layers.0").labels
    assert labels["self_attn.k_proj:linear:0"][1] == "o.0"
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.gate_proj"):
        assert labels[f"{name}:linear:0"][1:] == ("o.0", "o.1"), name
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert labels[f"{name}:linear:0"][1:] == ("i.0", "i.1"), name
    assert plan.blocks[-1].labels["cross_entropy_loss:0"][1:] == ("v.0", "v.1")


def test_two_mesh_dimensions_send_as_one() -> None:
    """Equal conversions on both are one collective over all ranks: as many as on a single mesh dimension."""
    program, plan = program_of("llama"), planned(Degrees(tp=8, sequence_parallel=True))
    found = listed_conversions(program, analyse(program, plan.mesh), plan.blocks, plan.mesh)
    layer = [c for c in found if program.blocks[c.block].name == "model.layers.0" and c.role != "parameter"]
    sends = Counter((c.mesh_dim, c.forward, c.backward) for c in layer if c.forward or c.backward)
    own = {key: count for key, count in sends.items() if key[0] != "tp1"}  # keys and values are shared on tp1
    assert own == {("tp0_tp1", "all_gather", "reduce_scatter"): 2, ("tp0_tp1", "reduce_scatter", "all_gather"): 2}
    assert sum(sends.values()) <= 6


def test_the_plan_says_it_and_loads_again() -> None:
    plan = planned(Degrees(tp=8))
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "tp0" in plan.explain()


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"tp": 8, "tp_dims": [4, 4]}, "product tp = 8"),
        ({"tp_dims": [4]}, "two whole numbers"),
        ({"tp_dims": [4, True]}, "two whole numbers"),
        ({"tp_dims": "4x2"}, "two whole numbers"),
    ],
    ids=str,
)
def test_bad_dimensions_are_refused(wish: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        degrees_from(wish)


def test_dimensions_by_hand() -> None:
    assert degrees_from({"tp_dims": [2, 2]}) == Degrees(tp=4, tp_dims=(2, 2))
    assert planned(Degrees(tp=4, tp_dims=(2, 2))).mesh.degrees == (1, 2, 2)
