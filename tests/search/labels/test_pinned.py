"""Parameters that are held already keep their types, whatever the labeller would choose."""

from label_cases import LAYERS, analysis_of, labelled, port, program_of

from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import I, R, S
from autopar.search.labels.check import check
from autopar.search.labels.solve import label

DEGREES = Degrees(tp=2, dp_shard=2)
LAYER = LAYERS["llama"]
UP, DOWN = "mlp_up_proj_weight", "mlp_down_proj_weight"


def test_pinned_parameters_keep_their_types() -> None:
    free = labelled("llama", DEGREES)
    assert (port(free, LAYER, UP), port(free, LAYER, DOWN)) == (S(0), S(1))
    program, analysis = program_of("llama"), analysis_of("llama")
    pinned = {f"model.layers.{layer}.mlp.up_proj.weight": (R, I) for layer in range(2)}
    found = label(program, analysis, DEGREES, ClusterSpec.preset("4xcpu"), pinned=pinned)
    assert port(found, LAYER, UP) == I and port(found, LAYER, UP, 0) == R
    check(program, analysis, found.blocks, DEGREES.mesh)


def test_of_several_types_one_is_chosen() -> None:
    """Two layers share a block, but one of them is held whole."""
    program, analysis = program_of("llama"), analysis_of("llama")
    name = "model.layers.{}.mlp.up_proj.weight".format
    pinned = {name(0): (R, S(0)), name(1): (R, I)}
    found = label(program, analysis, DEGREES, ClusterSpec.preset("4xcpu"), pinned=pinned)
    assert port(found, LAYER, UP) in (S(0), I)
    check(program, analysis, found.blocks, DEGREES.mesh)
