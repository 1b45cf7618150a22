"""Priced = run for the loss in chunks: the FLOP that a step adds, and the largest logits that exist at once.

torch counts the FLOP of one step on gloo ranks, with and without chunks. Their difference is one more product of the
head for each micro-batch: 2·T·d·V/tp. The cost model adds as much.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from priced_models import BATCH, GEMMA2, GPT2, LLAMA, RANKS, Case, case, planned_case
from suites import thinned

from autopar.capture.analysis import analyse
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.pricing import Question, family_at, layout_of
from autopar.cost_model.work.program_costs import program_works
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.distributed.launch import Ranks

TOKENS, HIDDEN = 16, 64  # of a sequence
CASES = (
    case(LLAMA, tp=4, sequence_parallel=True, loss_chunks=4),
    case(LLAMA, tp=4, sequence_parallel=False, loss_chunks=4),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, sequence_parallel=True, recompute="full", loss_chunks=2),
    case(LLAMA, dp=4, zero=3, accumulate=2, loss_chunks=8),
    case(LLAMA, pp=2, tp=2, micro_batches=4, sequence_parallel=True, loss_chunks=4),
    case(GPT2, tp=2, dp=2, zero=1, accumulate=2, loss_chunks=4),
    case(GEMMA2, tp=2, dp=2, zero=1, loss_chunks=4),
)


@pytest.mark.parametrize("one", thinned(CASES, keep=CASES[:1]), ids=lambda one: one.name)
def test_flops_and_logits(one: Case, worlds: Callable[[int], Ranks]) -> None:
    whole = replace(one, wish=tuple(item for item in one.wish if item[0] != "loss_chunks"))
    program, plan = planned_case(one)
    degrees, chunks = plan.degrees, plan.degrees.loss_chunks
    assert chunks == dict(one.wish)["loss_chunks"]
    classes = classes_of(program) // degrees.tp
    of_both = (one, plan), (whole, planned_case(whole)[1])
    measured = [worlds(RANKS).run("priced_ranks:counted_flops", *of, classes) for of in of_both]
    tokens = BATCH // degrees.dp * TOKENS
    added = degrees.num_micro_batches * 2 * tokens * HIDDEN * classes
    assert priced(program, plan) == (added, tokens // chunks * classes)
    last = [rank for rank, (_, elements) in enumerate(measured[1]) if elements == tokens * classes]
    assert len(last) == RANKS // degrees.num_stages
    for rank, ((flops, logits), (flops_whole, _)) in enumerate(zip(*measured, strict=True)):
        assert flops - flops_whole == (added if rank in last else 0), f"rank {rank}"
        assert logits == tokens // chunks * classes or rank not in last, f"rank {rank}"


def classes_of(program: Program) -> int:
    """The number of rows of the head."""
    (found,) = {info.shape[0] for name, info in program.parameters.items() if "embed" in name or "wte" in name}
    return int(found)


def priced(program: Program, plan: Plan) -> tuple[float, float]:
    """The FLOP of a step that the cost model adds on one rank, and the elements of the logits of a chunk."""
    works = program_works(
        program, analyse(program, plan.mesh), plan.blocks, plan.mesh, loss_chunks=plan.degrees.loss_chunks
    )
    cluster = ClusterSpec.preset(f"{RANKS}xcpu")
    question = Question(cluster=cluster, degrees=plan.degrees, engine=engine_named("autopar"), cuts=plan.cuts)
    blocks = family_at(works, layout_of(works, question.degrees), mechanisms())
    (again,) = (p for role in blocks.roles for p in blocks.block(role, "tp").products if p.kind == "again")
    each, elements = (float(np.max(value)) for value in (again.flops, again.m * again.n))
    return each * plan.degrees.num_micro_batches, elements
