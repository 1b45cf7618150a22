"""No published plan is predicted faster than the best one of the search's space, for its devices, batch and sequence.

A published run is priced with the machine and the framework that it ran on. Its layout is one of those that the search
lists (`autopar.search.space.candidates`), with the context and expert degrees of the run, which `--what-if` searches,
or `why_not_listed` names the reason. The search's own screen bounds every candidate
(`autopar.search.bounds.lower_bounds`). Neither the published layout's bound nor the least bound of the space may exceed
the layout's price. The memory limit is the device's, or the published plan's predicted need if that is more, because
the plan ran.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suites import thinned

from autopar.cost_model.interval import usable_bytes
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.published.estimate import RowGroup, estimate_rows, prepare
from autopar.cost_model.published.families import family_name, family_of, shape_of_rows, sizes_of_row
from autopar.cost_model.published.row import Row, RowEstimate, read_rows
from autopar.cost_model.step.layouts import RECOMPUTE_MODES, Layouts
from autopar.cost_model.work.block_work import VARIANTS
from autopar.cost_model.work.polynomials import Polynomial, total
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.sharding import Mesh
from autopar.search.bounds.lower_bounds import NO_LEVEL, Machinery, screen
from autopar.search.space.candidates import Candidates, candidates
from autopar.search.space.dimensions import MOST_VIRTUAL, Constraints, divisors

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"
ROWS = tuple(read_rows(RUNS))
SOURCES = tuple(sorted({row.source_key or "" for row in ROWS}))
OF_A_SOURCE = 3  # works of each in the default suite
SAME = 1e-9
CLOSED_FORM = 1e-2  # by which a row's closed form of a pipeline may lie below the bound of the stages that are cut
SELECTIVE = RECOMPUTE_MODES.index("selective")  # which no search lists
SCHEDULES = ("1f1b", "interleaved-1f1b")  # what the closed form of the pipeline is for


@dataclass(frozen=True, eq=False, kw_only=True)
class Published:
    """A row with its settled layout, what it ran on, and what it is predicted to need."""

    row: Row
    layout: Layouts
    machine: Machine
    global_batch: int
    peak_bytes: float

    @property
    def values(self) -> dict[str, float]:
        return {name: float(getattr(self.layout, name)[0]) for name in Layouts.__slots__}

    @property
    def work(self) -> tuple[Any, ...]:
        """What rows share that have the same space."""
        v, row = self.values, self.row
        model = (row.model, row.layers, row.hidden, row.ffn_hidden, row.n_heads, row.n_kv_heads, row.vocab, row.seq_len)
        machine = (row.gpu_type, row.num_gpus, row.precision, row.engine, row.inter_link, row.attention)
        kept = (v["cp"], v["ep"], v["sequence_parallel"] if v["tp"] > 1 else None, v["recompute"])
        return (*model, row.moe_experts, *machine, self.global_batch, *kept)


@cache
def published() -> tuple[Published, ...]:
    return tuple(one for group in prepare(ROWS)[0] for one in of_group(group))


def of_group(group: RowGroup) -> list[Published]:
    count = len(group.cases)
    columns = {name: np.broadcast_to(getattr(group.layouts, name), count) for name in Layouts.__slots__}
    needed = np.broadcast_to(group.memory.peak_bytes, count)
    return [
        Published(
            row=case.row,
            layout=Layouts(**{name: column[i : i + 1].astype(float) for name, column in columns.items()}),
            machine=case.machine,
            global_batch=case.global_batch,
            peak_bytes=float(needed[i]),
        )
        for i, case in enumerate(group.cases)
    ]


def why_not_listed(one: Published) -> str | None:
    """What of a published layout the search lists for nobody."""
    v = one.values
    dp, virtual, micro_batches = v["dp"], v["virtual"], v["micro_batches"]
    if one.row.num_gpus != v["tp"] * v["pp"] * v["cp"] * dp:
        return "degrees do not multiply to the devices"
    if micro_batches * v["micro_batch"] * dp != one.global_batch or micro_batches % 1:
        return "micro-batches do not multiply to the batch"
    if virtual > MOST_VIRTUAL:
        return "more virtual stages than the search tries"
    if v["pp"] * virtual > (one.row.layers or 1):
        return "more stages than blocks"
    if dp % v["ep"]:
        return "expert ranks lie over tensor ranks too"
    rounds = max(1, micro_batches // v["pp"])
    if virtual > 1 and (v["pp"] == 1 or micro_batches % rounds):
        return "torch's interleaved schedule does not run so many micro-batches"
    shard = v["shard"] / v["cp"]
    if dp > 1 and v["zero"] > 0 and (shard <= 1 or shard % 1 or dp % shard):
        return "state is sharded over a part of data-parallel ranks that does not divide them"
    return None


def space_of(one: Published) -> Candidates:
    """All candidates that the search lists for a row's work, beside the row's context ranks."""
    row, v = one.row, one.values
    devices, context = row.num_gpus or 1, int(v["cp"])
    tensor = tuple(tp for tp in divisors(devices // context) if (row.n_heads or 1) % tp == 0)
    constraints = Constraints(
        num_devices=devices,
        global_batch=one.global_batch,
        most_stages=row.layers or 1,
        tensor_degrees=tensor,
        context_degrees=(context,),
        expert_degrees=(int(one.values["ep"]),),
    )
    return candidates(constraints.narrowed({"schedule": SCHEDULES, "cp": (context,)}))


def place_of(one: Published, space: Candidates) -> int | None:
    """Where the published layout is in the space."""
    v = one.values
    alike = (space.tp == v["tp"]) & (space.pp == v["pp"]) & (space.dp == v["dp"]) & (space.virtual == v["virtual"])
    alike &= (space.micro_batch == v["micro_batch"]) & (space.micro_batches == v["micro_batches"])
    if v["dp"] * v["cp"] > 1:
        alike &= (space.zero == v["zero"]) & ((v["zero"] == 0) | (space.dp_shard * v["cp"] == v["shard"]))
    found = np.flatnonzero(alike & (space.order == 0))
    return int(found[0]) if len(found) else None


def bounds_of(one: Published, space: Candidates, memory_bytes: float) -> tuple[Any, Any]:
    """The screen's seconds and level of every candidate, each tensor degree with the works labelled for it."""
    on = Machinery(machine=replace(one.machine, memory_bytes=memory_bytes))
    seconds, level = np.full(len(space), np.inf), np.full(len(space), NO_LEVEL)
    for tp in set(space.tp.tolist()):
        rows = np.flatnonzero(space.tp == tp)
        unstated = one.machine.engine.unstated_sequence_parallel
        split = tp > 1 and bool(one.values["sequence_parallel"] if one.values["tp"] > 1 else unstated)
        screened = screen(works_of(one.row, tp, split), space.at(rows), on)
        seconds[rows], level[rows] = screened.seconds, screened.level
    return seconds, level


@cache
def works_of(row: Row, tp: int, sequence_parallel: bool) -> ProgramWorks:
    """A row's model as a captured and labelled program: its family's expressions with the row's sizes put in."""
    sizes = sizes_of_row(row)
    numbers = {name: Fraction(sizes[name]) for name in sizes if name not in ("b", "s", "S", "t", "d")}
    numbers["g"] = max(numbers["g"], Fraction(tp))  # fewer key heads than ranks are held several times
    family = family_of(family_name(row), "one" if tp == 1 else "sp" if sequence_parallel else "tp")
    shape = shape_of_rows([row])
    counts = tuple((role, int(count[0])) for role, count in shape.counts if count[0])
    known = {"first", "last", *(role for role, _ in counts)}
    works = {role: with_numbers(family.block(role, "tp"), numbers) for role in family.roles if role in known}
    blocks = tuple((role, tuple((name, work) for name in VARIANTS)) for role, work in works.items())
    calls = ("first", *(role for role, count in counts for _ in range(count)), "last")
    return ProgramWorks(
        family=replace(family, blocks=blocks),
        calls=calls,
        can_be_stage=(True,) * len(calls),
        counts=counts,
        mesh=Mesh.of(dp=2, tp=tp),
        sequence=row.seq_len or 1,
        hidden=row.hidden or 1,
        element_bytes=2,
        dtype="bfloat16",
        num_parameters=row.n_params or 1,
        num_frozen=0,
        num_experts=row.moe_experts or 0,
        experts_per_token=float(shape.experts_per_token[0]),
        is_tied=bool(shape.is_tied[0]),
        sequence_parallel=sequence_parallel,
        has_master_weights=True,
    )


def with_numbers(value: Any, numbers: dict[str, Fraction]) -> Any:
    """The same expressions with numbers in place of some symbols."""
    if isinstance(value, Polynomial):
        terms = []
        for coefficient, powers in value.terms:
            for name, power in powers:
                coefficient *= numbers[name] ** power if name in numbers else 1
            terms.append((coefficient, tuple((name, power) for name, power in powers if name not in numbers)))
        return total(terms)
    if isinstance(value, tuple):
        return tuple(with_numbers(item, numbers) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return type(value)(**{name: with_numbers(getattr(value, name), numbers) for name in names})
    return value


def check(rows: Sequence[Published]) -> None:
    """Rows of one work: none is predicted faster than the best of the space."""
    space = space_of(rows[0])
    estimates = estimate_rows([one.row.without_result() for one in rows])
    for one, estimate in zip(rows, estimates, strict=True):
        assert isinstance(estimate, RowEstimate)
        reason, place = why_not_listed(one), place_of(one, space)
        assert (reason is None) == (place is not None), (one.row.id, reason, one.values)
        room = max(one.machine.memory_bytes, one.peak_bytes / usable_bytes(1.0) * (1 + SAME))
        found, level = bounds_of(one, space, np.inf if one.values["recompute"] == SELECTIVE else room)
        is_staged, recompute = one.values["pp"] > 1, one.values["recompute"]
        exact, most = (estimate.seconds * (1 + part) for part in (SAME, CLOSED_FORM if is_staged else SAME))
        best = int(np.argmin(found))
        assert found[best] <= (most if best == place else exact), (one.row.id, reason, one.values)
        if place is None or (one.row.moe_experts and one.values["etp"] != one.values["tp"]):
            continue  # a search splits experts over tensor ranks
        if is_staged and level[place] > recompute:  # stages of its cuts may hold more than a row's equal ones
            found, _ = bounds_of(one, space, np.inf)
        assert found[place] <= most, (one.row.id, one.values)
        is_stated = one.row.recompute is not None  # else the estimate may be a mean over levels
        if not is_staged and recompute == 0 and is_stated:  # nothing is bounded: the screen's seconds are the price
            assert found[place] == pytest.approx(estimate.seconds, rel=SAME), (one.row.id, one.values)


def works_of_source(source: str) -> list[list[Published]]:
    works: dict[tuple[Any, ...], list[Published]] = {}
    for one in published():
        if one.row.source_key == source:
            works.setdefault(one.work, []).append(one)
    return list(works.values())


@pytest.mark.parametrize("source", thinned(SOURCES, keep=SOURCES[::2]))
def test_no_published_plan_is_faster(source: str) -> None:
    for rows in works_of_source(source)[:OF_A_SOURCE]:
        check(rows)


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
def test_no_published_plan_of_all_is_faster(source: str) -> None:
    for rows in works_of_source(source)[OF_A_SOURCE:]:
        check(rows)


def test_most_published_plans_are_listed() -> None:
    reasons = [why_not_listed(one) for one in published()]
    assert reasons.count(None) / len(reasons) > 0.8
