"""Every family on every mesh in one process, the solver's labels against one device in float64, gradients too."""

from functools import cache
from itertools import product

import pytest
from suites import thinned

pytest.importorskip("transformers")

import zoo
from equivalence import Case, case_of, check, labelled
from floored_error import floored_error, rms

from autopar.capture.loss_arguments import named_outputs
from autopar.cost_model.work.coverage import coverage
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.runtime.parameters.packed import join_packed
from autopar.runtime.verify.error_metrics import TOLERANCES

BATCH = 4
MESHES = {
    "tp=2": Degrees(tp=2),
    "tp=4": Degrees(tp=4),
    "tp=2 dp=2 sequence": Degrees(tp=2, dp_shard=2, sequence_parallel=True),
    "dp=4": Degrees(dp_shard=4),
}
# like others in kind, so that only the long tests have them
ALIKE = ("mistral", "qwen2", "qwen3", "phi3_grouped", "falcon_multi_query", "opt", "roberta", "vit", "qwen2_moe")
ALIKE += ("qwen3_moe", "encoder")
KINDS = [family for family in zoo.FAMILIES if family not in ALIKE]
# every kind on one mesh, and one family on every mesh
SHORT = {*product(KINDS, ["tp=2 dp=2 sequence"]), *product(["gpt2"], MESHES)}
# a contrastive loss pairs all samples, batch norm has statistics of them
MIXING = ("clip", "resnet")


@cache
def the_case(family: str) -> Case:
    return case_of(zoo.FAMILIES[family](BATCH))


@cache
def the_labels(family: str, mesh: str) -> tuple[BlockLabels, ...]:
    case, degrees = the_case(family), MESHES[mesh]
    return labelled(case, degrees.mesh, degrees.sequence_parallel if case.program.sequence else None)


@pytest.mark.parametrize(("family", "mesh"), thinned(product(zoo.FAMILIES, MESHES), keep=SHORT))
def test_equal_to_one_device(family: str, mesh: str) -> None:
    check(the_case(family), the_labels(family, mesh), MESHES[mesh].mesh)


@pytest.mark.parametrize("family", thinned(zoo.FAMILIES, keep=KINDS))
def test_the_capture_is_the_model(family: str) -> None:
    """What is promoted in the captured program is cast to float32 in the model, so that is the tolerance."""
    case = the_case(family)
    model, inputs = zoo.FAMILIES[family](BATCH)
    loss = named_outputs(model(**inputs))["loss"]
    loss.backward()
    assert floored_error(case.loss, loss.detach(), 0.0) < TOLERANCES["float32"]
    scale = rms(case.gradients.values())
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    trained = {name: grad for name, grad in case.gradients.items() if case.program.parameters[name].requires_grad}
    gradients = join_packed(case.program, trained)
    assert found.keys() == gradients.keys()
    assert max(floored_error(grad, gradients[name], scale) for name, grad in found.items()) < TOLERANCES["float32"]


@pytest.mark.parametrize("family", thinned(zoo.FAMILIES, keep=KINDS))
def test_all_families_but_two_may_accumulate(family: str) -> None:
    assert (the_case(family).program.mixes_batch is not None) == (family in MIXING)


@pytest.mark.parametrize("family", thinned(zoo.TRANSFORMERS, keep=[f for f in KINDS if f in zoo.TRANSFORMERS]))
def test_repeated_blocks_have_rules_and_their_products_split(family: str) -> None:
    """Nothing inside a block that is called twice falls back, and nearly all products are split under tp."""
    case, degrees = the_case(family), MESHES["tp=2"]
    analysis = case.analysis(degrees.mesh)
    repeated = [i for i in range(len(case.program.blocks)) if len(case.program.uses_of_block(i)) > 1]
    assert repeated
    fallbacks = [node for i in repeated for node, bound in analysis.bounds[i].items() if not bound.rule.known]
    assert not fallbacks
    cluster = ClusterSpec.preset("2xh100")
    found = coverage(case.program, analysis, the_labels(family, "tp=2"), degrees, cluster)
    assert found.split_flops("tp") >= 0.95, found.whole
