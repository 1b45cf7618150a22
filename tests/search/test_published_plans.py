"""No published plan is predicted faster than the best one of the search's space, for its devices, batch and sequence.

A published run is priced with the machine and the framework that it ran on. Its layout is one of those that the search
would list (`autopar.search.space.candidates`), with the context and expert degrees of the run, which `--what-if`
searches, or the row says something that no search lists (`why_not_listed`). Memory is room for what fits by
prediction, and for as much as the published plan is predicted to need, since it ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.published.estimate import Group, estimate_rows, prepare
from autopar.cost_model.published.machine import FLOAT8, machine_for
from autopar.cost_model.published.row import Row, RowEstimate
from autopar.cost_model.published.vtrain_sweep import read_runs
from autopar.cost_model.screened_model import model_of_row
from autopar.cost_model.screening import Screened, Target, screen
from autopar.cost_model.step.layouts import Layouts, strides
from autopar.search.space.candidates import MOST_VIRTUAL, Candidates, Limits, candidates, divisors, wishes

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"
ROWS = tuple(read_runs(RUNS))
SOURCES = tuple(sorted({row.source_key or "" for row in ROWS}))
OF_A_SOURCE = 3  # works of each in the default suite
# a row on one tensor rank is priced with operators of the undivided model, screening with those of a divided one
SAME_PRICE = 3e-3
RECOMPUTE = (0, 2)  # none and full, beside what the row does
SCHEDULES = ("1f1b", "interleaved-1f1b")  # what the closed form of the pipeline is for


@dataclass(frozen=True, eq=False, kw_only=True)
class Published:
    """A row with its settled layout, and what it ran on."""

    row: Row
    layout: Layouts
    target: Target
    global_batch: int

    @property
    def values(self) -> dict[str, float]:
        return {name: float(getattr(self.layout, name)[0]) for name in Layouts.__slots__}

    @property
    def work(self) -> tuple[Any, ...]:
        """What rows share that have the same space."""
        v, row = self.values, self.row
        model = (row.model, row.layers, row.hidden, row.ffn_hidden, row.n_heads, row.n_kv_heads, row.vocab, row.seq_len)
        machine = (row.gpu_type, row.num_gpus, row.precision, row.framework, row.inter_link, row.attn_impl)
        kept = (v["cp"], v["ep"], v["sequence_parallel"] if v["tp"] > 1 else None, v["recompute"])
        return (*model, row.moe_experts, *machine, self.global_batch, *kept)


@cache
def published() -> tuple[Published, ...]:
    return tuple(one for group in prepare(ROWS)[0] for one in of_group(group))


def of_group(group: Group) -> list[Published]:
    count = len(group.cases)
    columns = {name: np.broadcast_to(getattr(group.layouts, name), count) for name in Layouts.__slots__}
    machine = group.cases[0].machine
    target = Target(
        machine=machine_for(machine, mechanisms(), precision=group.precision),
        engine=machine.engine,
        mechanisms=mechanisms(),
        in_float8=group.precision in FLOAT8,
        reserve_bytes=group.profile.reserve_bytes,
        memory_bytes=group.memory_bytes,
    )
    return [
        Published(
            row=case.row,
            layout=Layouts(**{name: column[i : i + 1].astype(float) for name, column in columns.items()}),
            target=target,
            global_batch=case.global_batch,
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
    rounds = max(1, micro_batches // v["pp"])
    if virtual > 1 and (v["pp"] == 1 or micro_batches % rounds):
        return "torch's interleaved schedule does not run so many micro-batches"
    if micro_batches > 1 and v["micro_batch"] * dp == 1:
        return "a global micro-batch of one sequence, whose batch cannot be told from a broadcast dimension"
    shard = v["shard"] / v["cp"]
    if dp > 1 and v["zero"] > 0 and (shard <= 1 or shard % 1 or dp % shard):
        return "state is sharded over a part of data-parallel ranks that does not divide them"
    return None


def space_of(one: Published) -> Layouts:
    """All layouts that the search lists for a row's work, with the row's context and expert degrees."""
    row, v = one.row, one.values
    devices = int((row.num_gpus or 1) // v["cp"])
    tensor = tuple(tp for tp in divisors(devices) if (row.n_heads or 1) % tp == 0)
    limits = Limits(
        num_devices=devices, global_batch=one.global_batch, most_stages=row.layers or 1, tensor_degrees=tensor
    )
    found = candidates(limits, wishes({"schedule": SCHEDULES}))
    levels = sorted({*RECOMPUTE, int(v["recompute"])})
    index = np.tile(np.arange(len(found)), len(levels))
    columns = columns_of(found.at(index), one)
    return Layouts(**columns, recompute=np.repeat(np.array(levels, float), len(found)))


def columns_of(found: Candidates, one: Published) -> dict[str, Any]:
    v = one.values
    split = v["sequence_parallel"] if v["tp"] > 1 else float(one.target.engine.unstated_sequence_parallel)
    columns: dict[str, Any] = {
        "tp": found.tp,
        "pp": found.pp,
        "virtual": found.virtual,
        "dp": found.dp,
        "shard": np.where(found.zero > 0, found.dp_shard, found.dp) * v["cp"],
        "zero": np.where(found.dp > 1, found.zero, v["zero"]),  # of one rank all stages are the same
        "micro_batch": found.micro_batch,
        "micro_batches": found.micro_batches,
        "sequence_parallel": split * (found.tp > 1),
        "cp": np.full(len(found), v["cp"]),
        **strides(0, tp=found.tp, pp=found.pp, data_ranks=found.dp * v["cp"]),
        "ep": np.minimum(v["ep"], found.dp * v["cp"] * (found.tp if v["ep"] > v["dp"] * v["cp"] else 1)),
    }
    return {name: np.asarray(column, dtype=float) for name, column in columns.items()}


def is_listed(one: Published, space: Layouts) -> bool:
    """Whether the published layout is one of the space."""
    alike = np.ones(len(space.tp), dtype=bool)
    for name, value in one.values.items():
        if name == "shard" and one.values["zero"] == 0:
            continue
        alike &= getattr(space, name) == (value if name != "sequence_parallel" or one.values["tp"] > 1 else 0)
    return bool(alike.any())


def check(rows: Sequence[Published]) -> None:
    """Rows of one work: none is predicted faster than the best of the space."""
    space = space_of(rows[0])
    model = model_of_row(rows[0].row)
    found = screen([model], space, rows[0].target) if len(space.tp) else None
    estimates = estimate_rows([one.row.without_result() for one in rows])
    for one, estimate in zip(rows, estimates, strict=True):
        assert isinstance(estimate, RowEstimate)
        own = screen([model], one.layout, one.target)
        assert own.seconds[0] == pytest.approx(estimate.seconds, rel=SAME_PRICE), one.row.id
        reason = why_not_listed(one)
        assert (reason is None) == is_listed(one, space), (one.row.id, reason, one.values)
        best = best_of(found, own)
        assert best <= own.seconds[0] * (1 + 1e-9), (one.row.id, reason, best, own.seconds[0])


def best_of(found: Screened | None, own: Screened) -> float:
    """The fastest that fits, or needs no more than a plan that ran."""
    if found is None:
        return np.inf
    has_room = found.fits | (found.peak_bytes <= own.peak_bytes[0])
    return float(np.min(found.seconds, where=has_room, initial=np.inf))


def works_of_source(source: str) -> list[list[Published]]:
    works: dict[tuple[Any, ...], list[Published]] = {}
    for one in published():
        if one.row.source_key == source:
            works.setdefault(one.work, []).append(one)
    return list(works.values())


@pytest.mark.parametrize("source", SOURCES)
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
