"""Selective recomputation in a search: it is used where it is enough, priced, and never makes a plan worse."""

from dataclasses import replace
from itertools import product

import pytest
from search_cases import Case
from suites import thinned

from autopar.cost_model.memory.formula import StepMemory
from autopar.cost_model.pricing import Pricing, Question, layout_of
from autopar.ir.degrees import Degrees
from autopar.search.driver.search import search_degrees
from autopar.search.pricing.exact import PricedPlan, priced, with_recompute

LAYERS = 6
CASES = tuple(
    Case(model=model, cluster="4xh100", global_batch=8, tokens=tokens, memory_bytes=memory, selective=True)
    for (model, tokens), memory in product((("llama", 512), ("gpt2", 128), ("gpt2", 512)), (30e6, 20e6, 10e6))
)


def best_of(case: Case) -> PricedPlan | None:
    return search_degrees(case.works, case.spec, case.constraints, case.on, most_exact=10_000).best


@pytest.mark.parametrize("case", thinned(CASES, keep=CASES[1::3]), ids=str)
def test_no_plan_becomes_slower_by_selective_recomputation(case: Case) -> None:
    with_it, without = best_of(case), best_of(replace(case, selective=False))
    if without is not None:
        assert with_it is not None and with_it.seconds <= without.seconds * (1 + 1e-9)


def every_mix(case: Case, degrees: Degrees) -> list[tuple[float, float, Degrees]]:
    """Seconds and bytes of every number of fully and of selectively recomputed blocks, on one stage."""
    found, works = [], case.works(degrees.tp)
    for full in range(LAYERS + 1):
        for selective in range(LAYERS + 1 - full):
            own = with_recompute(degrees, full or 0, selective)
            question = Question(cluster=case.spec, degrees=own, engine=case.on.machine.engine, precision="bf16")
            pricing = Pricing(works, question, case.on.machine)
            layouts = layout_of(works, question.degrees)
            memory: StepMemory = pricing.memory(layouts)
            found.append((float(pricing.step(layouts).seconds[0]), float(memory.peak_bytes[0]), own))
    return found


@pytest.mark.parametrize(("model", "tokens"), (("llama", 512), ("gpt2", 512)))
@pytest.mark.parametrize("zero", (0, 3))
def test_the_least_recomputation_that_fits_is_the_best_mix(model: str, tokens: int, zero: int) -> None:
    """Against every mix of blocks without, with selective and with full recomputation, at every limit of memory."""
    case = Case(model=model, cluster="4xh100", global_batch=8, tokens=tokens, selective=True)
    degrees = Degrees(dp_shard=4, zero=zero, micro_batch=2)
    mixes = every_mix(case, degrees)
    kinds = set()
    for limit in sorted({needed for _, needed, _ in mixes}):
        machine = replace(case.on.machine, memory_bytes=limit * (1 + 1e-9) / _usable(case))
        one = priced(case.works(1), degrees, replace(case.on, machine=machine))
        best = min(seconds for seconds, needed, _ in mixes if needed <= limit * (1 + 1e-9))
        assert one.fits
        assert one.seconds == pytest.approx(best, rel=1e-9), (limit, one.degrees)
        kinds.add(one.degrees.recompute)
    assert {"none", "selective"} <= kinds <= {"none", "selective", "auto", "full"}


def _usable(case: Case) -> float:
    return case.on.capacity_bytes / case.on.machine.memory_bytes


def test_selective_recomputation_takes_the_seconds_of_its_operators() -> None:
    case = CASES[0]
    degrees = Degrees(dp_shard=4, micro_batch=2)
    seconds = {kind: _seconds(case, replace(degrees, recompute=kind)) for kind in ("none", "selective", "full")}
    assert seconds["none"] < seconds["selective"] < seconds["full"]


def _seconds(case: Case, degrees: Degrees) -> float:
    works = case.works(1)
    question = Question(cluster=case.spec, degrees=degrees, engine=case.on.machine.engine, precision="bf16")
    return float(Pricing(works, question, case.on.machine).step(layout_of(works, question.degrees)).seconds[0])
