"""The data of a report agree with the prices: rank by rank, pass by pass, term by term."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from search_cases import Case, works_of

from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.errors import PlanError
from autopar.ir.degrees import Degrees
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.explain.build_report_data import details_of, points_of, timeline_of
from autopar.search.pricing.exact import PricedPlan, priced, pricing_of
from autopar.search.result.report_data import Details, FormulaTerm

ROOT = Path(__file__).resolve().parents[3]
STAGED = Case(model="llama", cluster="8xh100", global_batch=16, tokens=2048)
TIGHT = replace(STAGED, memory_bytes=0.6e6)
FLAT = replace(STAGED, cluster="4xh100")
CASES = {
    "staged": (STAGED, {"pp": 2}),
    "gpipe": (STAGED, {"pp": 4, "schedule": "gpipe", "micro_batches": 8}),
    "flat": (FLAT, {"pp": 1}),
}
SHARED = {"shared cores": (replace(STAGED, ranks_per_core=2.0), {"pp": 4})}  # parts are of the mean rank


@cache
def searched(name: str) -> tuple[SearchState, Details]:
    case, fix = (CASES | SHARED)[name]
    found = search_degrees(case.works, case.spec, case.constraints.narrowed(fix), case.on, most_exact=200)
    best = found.best
    assert best is not None
    return found, details_of(best, case.works(best.degrees.tp), case.spec, case.on)


def best_of(name: str) -> PricedPlan:
    best = searched(name)[0].best
    assert best is not None
    return best


@pytest.mark.parametrize("name", CASES)
def test_every_rank_takes_the_step(name: str) -> None:
    best, details = best_of(name), searched(name)[1]
    assert len(details.ranks) == best.degrees.pp
    for rank in details.ranks:
        assert sum(rank.seconds.values()) == pytest.approx(best.seconds, rel=1e-9)
        assert min(rank.seconds.values()) >= 0
    assert sum(rank.num_blocks for rank in details.ranks) == 6
    assert sorted(stage for rank in details.ranks for stage in rank.stages) == list(range(best.degrees.num_stages))


@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_the_one_that_was_priced(name: str) -> None:
    best, details = best_of(name), searched(name)[1]
    priced = {part: float(np.max(value)) for part, value in best.step.parts.items()}
    assert any(all(r.seconds[p] == pytest.approx(v, abs=1e-12) for p, v in priced.items()) for r in details.ranks)
    assert max(sum(rank.bytes.values()) for rank in details.ranks) == pytest.approx(best.peak_bytes, rel=1e-9)


@pytest.mark.parametrize("name", CASES | SHARED)
def test_formulas_give_the_parts_and_the_parts_the_step(name: str) -> None:
    best, details = best_of(name), searched(name)[1]
    assert sum(term.seconds for term in details.terms) == pytest.approx(best.seconds, rel=1e-9)
    for term in details.terms:
        files = re.findall(r"[\w/]+/[\w.]+", term.source)
        assert files and all((ROOT / name).exists() for name in files), term.source
        assert given(term) == pytest.approx(term.seconds, rel=1e-6, abs=1e-12), term


def test_the_slowest_rank_may_hold_no_repeated_block() -> None:
    works = replace(works_of("llama", 1, layers=2, vocabulary=1 << 18), sequence=2048)
    degrees = Degrees(pp=4, dp_shard=1, zero=0, micro_batch=1, micro_batches=8)
    best = priced(works, degrees, FLAT.on)
    details = details_of(best, works, FLAT.spec, FLAT.on)
    assert best.cuts == (1, 2, 3)  # the head alone, whose products take longest
    assert sum(term.seconds for term in details.terms) == pytest.approx(best.seconds, rel=1e-9)
    assert "products" not in [term.part for term in details.terms]


def given(term: FormulaTerm) -> float:
    """A term's formula with its values put in."""
    names: Mapping[str, object] = {one.symbol: one.value for one in term.values}
    assert len(names) == len(term.values)
    return float(eval(term.formula, {"__builtins__": {}}, {"sqrt": math.sqrt, "log": math.log, **names}))


def test_a_rank_updates_its_share_of_the_parameters() -> None:
    best, works = best_of("flat"), FLAT.works(best_of("flat").degrees.tp)
    term = next(term for term in searched("flat")[1].terms if term.part == "optimizer")
    updated = next(one.value for one in term.values if one.symbol == "P")
    shares = best.degrees.tp * (best.degrees.dp_shard if best.degrees.zero else 1)
    assert updated * shares == pytest.approx(works.num_parameters, rel=0.05)  # norms are whole on every tensor rank


@pytest.mark.parametrize("name", ["staged", "gpipe"])
def test_the_time_line_is_the_action_list(name: str) -> None:
    best, details = best_of(name), searched(name)[1]
    timeline = details.timeline
    assert timeline is not None
    degrees = best.degrees
    kinds = {one[1] for one in timeline.passes}
    per_kind = degrees.num_stages * degrees.micro_batches
    assert sum(one[1] == "F" for one in timeline.passes) == per_kind
    assert kinds <= {"F", "B", "I", "W"}
    assert max(one[5] for one in timeline.passes) == pytest.approx(timeline.seconds, rel=1e-5)
    assert (timeline.left_out, timeline.gap) == (0, None)
    bubble = sum(term.seconds for term in details.terms if term.part == "bubble")
    assert bubble < timeline.seconds * timeline.runs < best.seconds


def test_long_time_lines_keep_their_ends() -> None:
    best = best_of("gpipe")
    pricing = pricing_of(STAGED.works(best.degrees.tp), best, STAGED.spec, STAGED.on)
    stages = pricing.stages()
    assert stages is not None
    whole, some = timeline_of(pricing, stages), timeline_of(pricing, stages, most=8)
    assert len(some.passes) + some.left_out == len(whole.passes) > len(some.passes)
    assert some.gap is not None
    assert set(some.passes) <= set(whole.passes)
    assert some.passes[0] == whole.passes[0]
    assert some.passes[-1] == whole.passes[-1]


@pytest.mark.parametrize("name", CASES)
def test_points_are_candidates_and_none_is_below_the_best(name: str) -> None:
    found = searched(name)[0]
    points = points_of(found)
    columns = points.columns
    assert points.fitting == int(np.sum(found.screened.fits)) or points.fitting < len(found.candidates)
    assert {len(column) for column in columns.values()} == {len(columns["seconds"])}
    assert found.best is not None
    assert min(columns["seconds"]) >= found.best.seconds * (1 - 1e-5)
    assert list(columns["seconds"]) == sorted(columns["seconds"])
    thin = points_of(found, most=20)
    assert len(thin.columns["seconds"]) <= max(20, sum(thin.columns["exact"]))
    assert sum(thin.columns["exact"]) == sum(columns["exact"])


def test_where_memory_is_short_points_stay_below_capacity() -> None:
    found = search_degrees(TIGHT.works, TIGHT.spec, TIGHT.constraints, TIGHT.on, most_exact=50)
    columns = points_of(found).columns
    assert all(value <= TIGHT.on.capacity_bytes * 1.001 for value in columns["bytes"])


def test_a_tensor_degree_without_labels_has_no_points() -> None:
    def works(tp: int, cp: int = 1, ep: int = 1) -> ProgramWorks:
        if tp == 2:
            raise PlanError("heads do not divide")
        return STAGED.works(tp)

    found = search_degrees(works, STAGED.spec, STAGED.constraints, STAGED.on, most_exact=400)
    assert {split.tp for split in found.refused} == {2}
    with np.errstate(invalid="raise"):
        columns = points_of(found).columns
    assert 1 in columns["tp"] and 2 not in columns["tp"]
    assert all(math.isfinite(value) for value in columns["bytes"])
