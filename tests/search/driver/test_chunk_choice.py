"""Whether the loss runs in chunks: the choice against every candidate priced with whole logits and in chunks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from label_cases import program_of
from search_cases import Case, machinery_with
from searched_models import BATCH, model, small, tokens
from suites import thinned

import autopar
from autopar.capture.request import Request
from autopar.cost_model.work.program_costs import ProgramWorks, program_works
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.planning.fixed import capture_for, choose_labels
from autopar.search.driver.chunk_choice import chunks_of, with_chunks
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import PricedPlan, priced
from autopar.search.pricing.objective import Goal, Part
from autopar.search.result.format import plan_in_words
from autopar.search.space.candidates import candidates

VOCABULARY, CHUNKS = 32_768, 8


@cache
def labelled(name: str, tp: int, chunks: int) -> ProgramWorks:
    program = program_of(name, layers=6, heads=16, vocabulary=VOCABULARY)
    asked = Degrees(tp=tp, dp_shard=2, micro_batch=1, sequence_parallel=True)
    degrees, analysis, found = choose_labels(program, ClusterSpec.preset("8xh100"), asked)
    return program_works(program, analysis, found.blocks, degrees.mesh, loss_chunks=chunks)


def works(case: Case, tp: int, chunks: int) -> ProgramWorks:
    return replace(labelled(case.model, tp, chunks), sequence=case.tokens)


CASES = tuple(
    (Case(model=name, cluster=cluster, global_batch=4, tokens=length, memory_bytes=memory), fix)
    for (name, length), cluster, memory, fix in product(
        (("llama", 512), ("gpt2", 128)), ("4xh100", "4xcpu"), (80e9, 800e6, 200e6, 120e6, 70e6), ({}, {"tp": (2, 4)})
    )
)


def searched(case: Case, fix: Mapping[str, Any]) -> tuple[SearchState, SearchState]:
    """A search with whole logits, and with the choice of chunks behind it."""
    spec, on = ClusterSpec.preset(case.cluster), machinery_with(ClusterSpec.preset(case.cluster), case.memory_bytes)
    goal = Goal(objective="time", parts={4: Part(cluster=spec, on=on, weight=1.0)})
    found = search_degrees(
        lambda tp, cp=1, ep=1: works(case, tp, 1),
        spec,
        case.constraints.narrowed(fix),
        on,
        most_exact=10_000,
        goal=goal,
    )
    return found, with_chunks(
        found, lambda tp, cp=1, ep=1, *, chunks: works(case, tp, chunks), CHUNKS, most_exact=10_000
    )


def enumerated(case: Case, fix: Mapping[str, Any]) -> list[list[PricedPlan]]:
    """Every candidate with whole logits and in every number of chunks, priced exactly."""
    on = machinery_with(ClusterSpec.preset(case.cluster), case.memory_bytes)
    found = candidates(case.constraints.narrowed(fix))

    def one(i: int, chunks: int) -> PricedPlan:
        return priced(works(case, int(found.tp[i]), chunks), found.degrees(i), on)

    numbers = [1 << k for k in range(CHUNKS.bit_length())]
    return [[one(i, chunks) for chunks in numbers] for i in range(len(found))]


@pytest.mark.parametrize(("case", "fix"), thinned(CASES, keep=CASES[13::13]), ids=str)
def test_no_plan_is_better_either_way(case: Case, fix: Mapping[str, Any]) -> None:
    (_, found), every = searched(case, fix), enumerated(case, fix)
    fits = [one.seconds for ways in every for one in ways if one.fits]
    if not fits:
        assert found.best is None
        return
    assert found.best is not None and found.proof.is_proven
    assert found.best.seconds <= min(fits) * (1 + 1e-9)
    assert found.proof.bound <= found.best.seconds * (1 + 1e-9)
    for whole, *_, most in every:
        if whole.fits and whole.degrees.recompute == "none":
            assert most.seconds > whole.seconds


def test_some_cases_need_chunks_and_some_do_not() -> None:
    chosen = {
        case.memory_bytes: searched(case, fix)[1].best for case, fix in CASES if case.model == "llama" and not fix
    }
    assert chosen[80e9] is not None and chosen[80e9].degrees.loss_chunks == 1
    assert {one.degrees.loss_chunks for one in chosen.values() if one is not None} > {1}


def test_fewest_chunks_that_are_best() -> None:
    """With half as many chunks the plan would not fit, or take longer."""
    seen = 0
    for case, fix in CASES:
        best = searched(case, fix)[1].best
        if best is None or best.degrees.loss_chunks == 1:
            continue
        seen += 1
        on = machinery_with(ClusterSpec.preset(case.cluster), case.memory_bytes)
        bare = replace(best.degrees, recompute="none", recompute_blocks=None)
        fewer = priced(works(case, bare.tp, best.degrees.loss_chunks // 2), bare, on)
        assert not fewer.fits or fewer.seconds >= best.seconds * (1 - 1e-9)
    assert seen


def test_number_of_chunks() -> None:
    assert [chunks_of(tokens) for tokens in (None, 1, 4096, 8192, 131_072)] == [4, 4, 4, 8, 64]


# ---- plans ----


def test_a_user_requires_and_forbids_chunks() -> None:
    for asked in (1, 4):
        found = autopar.plan(
            model(), "4xh100", example_inputs=tokens(), global_batch=BATCH, fix={"loss_chunks": asked, "pp": 1}
        )
        assert found.plan is not None and found.plan.degrees.loss_chunks == asked
        estimate = autopar.estimate(
            capture_for(Request.of(model(), tokens()), found.plan.degrees), "4xh100", found.plan
        )
        assert found.best is not None
        assert estimate.step_s == pytest.approx(found.best.step_s, rel=0.02)
    with pytest.raises(InputError, match="loss_chunks"):
        autopar.plan(model(), "4xh100", example_inputs=tokens(), global_batch=BATCH, fix={"loss_chunks": 0})


def test_a_plan_in_chunks_says_so() -> None:
    assert plan_in_words({"tp": 2, "micro_batch": 1, "loss_chunks": 4}) == "tp 2, micro-batch 1 × 1, loss in 4 chunks"
    found = autopar.plan(
        model(), small(80e9), example_inputs=tokens(), global_batch=BATCH, fix={"loss_chunks": 4, "pp": 1}
    )
    assert found.plan is not None
    assert "logits and loss: in 4 chunks of tokens" in found.plan.explain()
