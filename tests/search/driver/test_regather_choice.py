"""Whether gathered values are kept or gathered again: the choice against every candidate priced under both settings."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from label_cases import program_of
from search_cases import Case, machinery_with
from searched_models import BATCH, model, small, tokens
from suites import thinned

import autopar
from autopar.capture.request import Request
from autopar.cost_model.parts import MEMORY
from autopar.cost_model.work.program_costs import ProgramWorks, program_works
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.device import Link
from autopar.ir.plan import Plan
from autopar.planning.fixed import capture_for, choose_labels
from autopar.search.driver.regather_choice import MOST_SAVED, with_kept
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.pricing.exact import PricedPlan, priced
from autopar.search.pricing.objective import Goal, Part
from autopar.search.result.format import plan_in_words
from autopar.search.result.result import SearchResult
from autopar.search.space.candidates import candidates

SLOW = Link(bytes_per_s=8e9, latency_s=1e-5, name="PCIe")


def cluster_of(name: str) -> ClusterSpec:
    """A preset, or four H100s on slow links."""
    if name != "slow":
        return ClusterSpec.preset(name)
    spec = ClusterSpec.preset("4xh100")
    return replace(spec, name=name, groups=tuple(replace(group, in_host=SLOW) for group in spec.groups))


@cache
def labelled(name: str, tp: int, regather: bool) -> ProgramWorks:
    program = program_of(name, layers=6, heads=16, vocabulary=512)
    asked = Degrees(tp=tp, dp_shard=2, micro_batch=1, sequence_parallel=True)
    degrees, analysis, found = choose_labels(program, ClusterSpec.preset("8xh100"), asked)
    return program_works(program, analysis, found.blocks, degrees.mesh, regather=regather)


CASES = tuple(
    (Case(model=name, cluster=cluster, global_batch=4, tokens=length, memory_bytes=memory), fix)
    for (name, length), cluster, memory, fix in product(
        (("llama", 512), ("gpt2", 128)), ("4xh100", "slow", "4xcpu"), (80e9, 20e6, 10e6), ({}, {"tp": (2, 4)})
    )
)


def searched(case: Case, fix: Mapping[str, Any], objective: str = "time") -> SearchState:
    spec, on = cluster_of(case.cluster), machinery_with(cluster_of(case.cluster), case.memory_bytes)
    goal = Goal(objective=objective, parts={4: Part(cluster=spec, on=on, weight=1.0)})
    constraints = replace(case, cluster="4xh100").constraints
    found = search_degrees(works(case, True), spec, constraints.narrowed(fix), on, most_exact=10_000, goal=goal)
    return with_kept(found, works(case, False), most_exact=10_000)


def works(case: Case, regather: bool) -> Any:
    return lambda tp, cp=1, ep=1: replace(labelled(case.model, tp, regather), sequence=case.tokens)


def enumerated(case: Case, fix: Mapping[str, Any]) -> list[tuple[PricedPlan, PricedPlan]]:
    """Every candidate under both settings, priced exactly."""
    on = machinery_with(cluster_of(case.cluster), case.memory_bytes)
    found = candidates(replace(case, cluster="4xh100").constraints.narrowed(fix))

    def one(i: int, regather: bool) -> PricedPlan:
        return priced(works(case, regather)(int(found.tp[i])), found.degrees(i), on)

    return [(one(i, True), one(i, False)) for i in range(len(found))]


@pytest.mark.parametrize(("case", "fix"), thinned(CASES, keep=CASES[9::9]), ids=str)
def test_no_plan_is_better_under_either_setting(case: Case, fix: Mapping[str, Any]) -> None:
    found, every = searched(case, fix), enumerated(case, fix)
    fits = [one.seconds for pair in every for one in pair if one.fits]
    if not fits:
        assert found.best is None
        return
    assert found.best is not None and found.proof.is_proven
    assert found.best.seconds == pytest.approx(min(fits), rel=1e-9)
    assert found.proof.bound == pytest.approx(min(fits), rel=1e-9)
    for again, kept in every:
        assert kept.peak_bytes >= again.peak_bytes * (1 - 1e-12) or kept.degrees != again.degrees
        assert again.fits or not kept.fits
        assert kept.seconds >= again.seconds * (1 - MOST_SAVED)


def test_with_room_and_slow_links_values_are_kept() -> None:
    found = searched(Case(model="llama", cluster="slow", global_batch=4, tokens=512), {"tp": (2, 4)})
    assert found.best is not None and found.kept is found.best
    assert not found.best.regather
    again = min(one.seconds for one in found.exact.values() if one.fits)
    assert 0.9 * again < found.best.seconds < 0.99 * again


def test_without_room_they_are_gathered_again() -> None:
    fix = {"tp": (2, 4)}
    case = Case(model="llama", cluster="slow", global_batch=4, tokens=512)
    roomy = searched(case, fix)
    assert roomy.best is not None
    one = roomy.together.priced(next(i for i in roomy.exact if roomy.candidates.degrees(i) == _bare(roomy.best)))
    between = (one.peak_bytes + roomy.best.peak_bytes) / 2
    assert one.peak_bytes < between < roomy.best.peak_bytes
    reserve = machinery_with(cluster_of("slow"), 0.0).capacity_bytes
    degrees = {name: getattr(roomy.best.degrees, name) for name in ("tp", "pp", "dp_shard", "zero", "micro_batch")}
    tight = searched(replace(case, memory_bytes=(between - reserve) / 1.1), degrees)
    assert tight.best is not None and tight.kept is None
    assert tight.best.regather and tight.best.degrees.recompute == "none"


def _bare(one: PricedPlan) -> Degrees:
    return replace(one.degrees, recompute="none", recompute_blocks=None)


def test_where_memory_is_the_objective_nothing_is_kept() -> None:
    found = searched(Case(model="llama", cluster="slow", global_batch=4, tokens=512), {"tp": (2, 4)}, "memory")
    assert found.best is not None and found.best.regather


def planned(cluster: Any = "4xh100", **fix: Any) -> SearchResult:
    return autopar.plan(model(), cluster, example_inputs=tokens(), global_batch=BATCH, fix=fix, trials=0)


DEGREES: dict[str, Any] = {"tp": 4, "pp": 1, "sequence_parallel": True}


def test_a_plan_says_whether_values_are_kept(tmp_path: Path) -> None:
    found = planned(**DEGREES)
    assert found.plan is not None and found.best is not None
    assert not found.plan.regather
    assert found.best.degrees["regather"] is False
    assert "gathered inputs are saved" in plan_in_words(found.best.degrees)
    assert "saved for backward" in found.plan.explain()
    assert SearchResult.from_dict(found.to_dict()) == found
    found.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found.plan
    again = planned(**DEGREES, regather=True)
    assert again.plan is not None and again.best is not None
    assert again.plan.regather and "regather" not in again.best.degrees
    assert again.best.step_s > found.best.step_s
    assert again.best.peak_bytes < found.best.peak_bytes
    assert again.is_proven and found.is_proven
    estimated = [autopar.estimate(capture_for(Request.of(model(), tokens()), one.degrees), "4xh100", one)
                 for one in (found.plan, again.plan)]  # fmt: skip
    ratio = found.best.step_s / again.best.step_s
    assert estimated[0].step_s / estimated[1].step_s == pytest.approx(ratio, rel=2e-3)
    assert estimated[0].memory_bytes[MEMORY["activations"]] > estimated[1].memory_bytes[MEMORY["activations"]]


def test_it_can_be_asked_for() -> None:
    kept = planned(**DEGREES, regather=False)
    assert kept.plan is not None and kept.best is not None and not kept.plan.regather
    alone = planned(small(80e9), tp=1, regather=False)
    assert alone.plan is not None and not alone.plan.regather
    with pytest.raises(InputError, match="fix regather"):
        planned(regather="sometimes")
    with pytest.raises(InputError, match="forbid regather"):
        autopar.plan(model(), "4xh100", example_inputs=tokens(), global_batch=BATCH, forbid={"regather": True})
