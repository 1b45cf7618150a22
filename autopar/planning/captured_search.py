"""The search of a captured model: all degrees, the choices that remain open, and the plan with its own labels."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopar.capture.record.captured import Capture
from autopar.cost_model.estimate import situation_of
from autopar.cost_model.machine.cluster import precision_of
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planning.fixed import PricedStages, label_plan, program_for
from autopar.planning.labels import LABELLED, SearchLabels
from autopar.planning.machine import machine_of
from autopar.planning.options import PlanOptions
from autopar.planning.study_question import question_of
from autopar.rules.registry import has_rules_of_users
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.driver.alternatives import next_plans
from autopar.search.driver.branch_and_bound import Exact, Proof
from autopar.search.driver.check import check_result
from autopar.search.driver.chunk_choice import chunks_of, with_chunks
from autopar.search.driver.infeasible import Query, closest
from autopar.search.driver.offload_choice import search_offloads
from autopar.search.driver.recorded import record
from autopar.search.driver.regather_choice import with_kept
from autopar.search.driver.search import SearchState, Works, search_degrees
from autopar.search.driver.study import RESULT, StudyPlace, study_place, study_values
from autopar.search.explain.build_result import result_of
from autopar.search.explain.sensitivity import Base, what_if
from autopar.search.pricing.cuts import cuts_at
from autopar.search.pricing.objective import Goal, goal_of
from autopar.search.result.result import Closest, SearchResult
from autopar.search.space.candidates import (
    Split,
    context_degrees,
    expert_degrees,
    tensor_degrees,
    what_would_be_legal,
)
from autopar.search.space.dimensions import (
    Constraints,
    Values,
    is_selective,
    most_level_of,
    recompute_blocks_of,
    shared_degrees,
)

_MOST_PRICED = 400
_ROUNDS = 4  # of prices of the next plans, after a search that ended early
MOST_SECONDS_FOR_HELP = 30.0  # of the search for changes with which a plan fits


def search_captured(
    captured: Capture,
    cluster: ClusterSpec,
    options: PlanOptions,
    *,
    name: str,
    on_progress: Callable[[str], None],
    labels: SearchLabels | None = None,
    alike: bool = False,
) -> SearchResult:
    """The part of `plan` after the capture. `labels` are of `labels_for`, and `alike` is for `next_plans`."""
    started = time.monotonic()
    options.check_search(cluster.num_devices)
    program = program_for(captured, LABELLED)
    fix, forbid = options.narrowing()
    cuts = cuts_at(program, fix["cut_at"][0]) if "cut_at" in fix else None
    regather, sums = (_fixed(fix, word) for word in ("regather", "reduce_dtype"))
    labels = labels or labels_for(captured, cluster, options, on_progress)
    works_of: Works = labels.works

    def machinery(part: ClusterSpec) -> Machinery:
        precision = options.precision or precision_of(works_of(1).dtype, cluster)
        machine = machine_of(part, options.profile, precision, sums, works_of(1).stored_bytes)
        blocks, most_level = recompute_blocks_of(fix), most_level_of(fix)
        return Machinery(
            machine=machine, recompute_blocks=blocks, most_level=most_level, cuts=cuts, chance=options.chance,
            situation=situation_of(machine, works_of(1)),
        )  # fmt: skip

    goal = goal_of(options.objective, cluster, machinery, per_sequence=options.local_batch is not None)
    on = goal.parts[cluster.num_devices].on
    question = question_of(options, program, cluster, on, name)
    place = None if options.study is None else study_place(options.study, question)
    if place is not None:
        place.check()
    deadline = np.inf if options.timeout_s is None else started + options.timeout_s
    constraints = _constraints(labels, goal, options, (fix, forbid, cuts), singly=captured.has_one_sequence)
    limits: Any = {"most_exact": _MOST_PRICED, "should_continue": lambda: time.monotonic() < deadline}
    space = _Space(labels=labels, cluster=cluster, constraints=constraints, asked=options, place=place, how=limits)
    searched = partial(_searched, space, on_progress)
    search = search_offloads(searched, goal, constraints, limits["should_continue"], on_progress)
    best = search.best
    works_of_best = works_of
    if best is not None:
        chunks = None if best.degrees.loss_chunks == 1 else best.degrees.loss_chunks
        works_of_best = partial(labels.works, chunks=chunks, keeps=best.regather is not labels.regather)
    decided, nearest = None, None
    if best is None:
        on_progress("looking for a change with which a plan fits")
        nearest = _closest(space, machinery, deadline)
    else:
        part, works = search.goal.part(best), works_of_best(*Split.of(best.degrees))
        final, decided = plan_as_priced(
            captured, labels, with_shared(best.degrees, shared_degrees(fix)), PricedStages(best.cuts, works, part.on),
            part.cluster, name, regather=best.regather,
        )  # fmt: skip
        check_result(search, decided, works, constraints)
    result = replace(
        result_of(
            search, program, works_of, works_of_best,
            top=options.top, alike=alike, global_batch=options.global_batch,
        ),
        model=name, plan=decided, closest=nearest, seconds=time.monotonic() - started,
    )  # fmt: skip
    if best is not None and decided is not None and options.report:
        from autopar.report.block_graph import block_graph

        on_progress("asking what if")
        base = Base(
            best=best, part=part, machinery=lambda c: machinery(c).keeping(best.degrees.offload),
            works_of=works_of_best,
            every=(works_of, partial(labels.works, keeps=True)) if regather is None else (works_of,),
            constraints=constraints, global_batch=result.global_batch,
        )  # fmt: skip
        result = replace(result, what_if=what_if(base), block=block_graph(final, decided))
    if place is not None:
        with study_values(place.where):
            result = replace(result, importance=record(search, place) or result.importance)
        place.keep(RESULT, json.dumps(result.to_dict(), separators=(",", ":"), sort_keys=True))
    return result


def _fixed(fix: Values, word: str) -> Any:
    """The one value that a word must have. None if the search decides."""
    return fix.get(word, (None,))[0]


def labels_for(
    captured: Capture,
    cluster: ClusterSpec,
    options: PlanOptions,
    on_progress: Callable[[str], None],
    folder: Path | None = None,
) -> SearchLabels:
    """The labels of a search, each chosen at its first use and kept in `folder`, unless a user has rules of his own."""
    fix, _ = options.narrowing()
    folder = None if has_rules_of_users() else folder
    deciding = {word: value for word, value in shared_degrees(fix).items() if word in ("optimizer", "precision")}
    return SearchLabels(
        program_for(captured, LABELLED), cluster, _fixed(fix, "sequence_parallel"),
        regather=_fixed(fix, "regather") is not False, loss_chunks=_fixed(fix, "loss_chunks") or 1,
        state=replace(LABELLED, **deciding), folder=folder, on_progress=on_progress, selective=is_selective(fix),
        program_of=lambda batch: program_for(captured, replace(LABELLED, dp_shard=batch)),
        dispatch=_fixed(fix, "dispatch"), context=_fixed(fix, "context"),
    )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class _Space:
    """What the searches of one request share. `how` bounds their exact prices and their time."""

    labels: SearchLabels
    cluster: ClusterSpec
    constraints: Constraints
    asked: PlanOptions
    place: StudyPlace | None
    how: Mapping[str, Any]


def _searched(space: _Space, on_progress: Callable[[str], None], goal: Goal, below: float) -> SearchState:
    """The search under one goal, also of plans with the loss in chunks, and of plans that keep gathered values."""
    labels, constraints, options = space.labels, space.constraints, space.asked
    on = goal.parts[space.cluster.num_devices].on
    is_first = on.machine.engine.offload == constraints.first_offloads[0]
    on_progress("choosing how operators are split")
    search = search_degrees(
        labels.works, space.cluster, constraints, on,
        trials=options.trials if constraints.cuts is None else 0, seed=options.seed,
        place=space.place if is_first else None, on_progress=on_progress, goal=goal, below=below,
        labelled_as=labels.labelled_as, **space.how,
    )  # fmt: skip
    _refuse_without_candidates(search, constraints)
    if search.best is not None and not space.how["should_continue"]():
        return _best_of_priced(search, options.top)
    if "loss_chunks" not in constraints.fix:
        search = with_chunks(search, labels.works, chunks_of(labels.program.sequence), **space.how)
    if "regather" not in constraints.fix:
        search = with_kept(search, partial(labels.works, keeps=True), **space.how)
    return search


def _best_of_priced(search: SearchState, top: int) -> SearchState:
    """The search that ended early, with the best of the plans that are shown, because they are priced anyway."""
    for _ in range(_ROUNDS):
        priced = dict(next_plans(search, top, alike=False))
        exact = [Exact(index=index, value=search.goal.value(p)) for index, p in priced.items()]
        proof = Proof(priced=(*search.proof.priced, *exact), bound=0.0, is_proven=False)
        is_best = search.proof.best == proof.best
        search = replace(search, exact={**search.exact, **priced}, proof=proof)
        if is_best:
            break
    return search


def _closest(space: _Space, machinery: Callable[[ClusterSpec], Machinery], deadline: float) -> Closest | None:
    first = space.constraints.first_offloads[0]
    query = Query(
        works_of=space.labels.works,
        cluster=space.cluster,
        constraints=space.constraints,
        machinery=lambda cluster: machinery(cluster).keeping(first),
        works_in_chunks=space.labels.works,
    )
    until = min(deadline, time.monotonic() + MOST_SECONDS_FOR_HELP)
    return closest(query, lambda: time.monotonic() < until)


def with_shared(degrees: Degrees, shared: Mapping[str, Any]) -> Degrees:
    """The degrees of a priced plan with the words that a request gives to every plan (`shared_degrees`)."""
    without = {word for word, ranks in (("dispatch", degrees.ep), ("context", degrees.cp)) if ranks == 1}
    return replace(degrees, **{word: value for word, value in shared.items() if word not in without})


def plan_as_priced(
    captured: Capture,
    labels: SearchLabels,
    degrees: Degrees,
    stages: PricedStages,
    cluster: ClusterSpec,
    name: str,
    *,
    regather: bool,
) -> tuple[Program, Plan]:
    """The program at a plan's own batch, and the plan with the labels and the cuts that it was priced with."""
    program = program_for(captured, degrees)
    labelled = labels.of(program, degrees)
    return program, label_plan(program, cluster, degrees, name, searched=stages, labelled=labelled, regather=regather)


def _refuse_without_candidates(search: SearchState, constraints: Constraints) -> None:
    if not len(search.candidates):
        batch = constraints.global_batch or constraints.local_batch
        raise PlanError(
            f"no plan splits {batch} sequences over {constraints.num_devices} devices as asked; "
            f"{what_would_be_legal(constraints)}"
        )
    if {*search.candidates.splits()} <= set(search.refused):
        reasons = "; ".join(f"{split}: {why}" for split, why in search.refused.items())
        raise PlanError(f"the model cannot be split as asked: {reasons}")


def _constraints(
    labels: SearchLabels,
    goal: Goal,
    options: PlanOptions,
    narrowing: tuple[Values, Values, tuple[int, ...] | None],
    *,
    singly: bool,
) -> Constraints:
    """The request, checked for the program and the parts of the cluster that the goal allows."""
    fix, forbid, cuts = narrowing
    program, works = labels.program, labels.works(1)
    counts = sorted(goal.parts)
    constraints = Constraints(
        num_devices=counts[-1],
        fewer_devices=tuple(counts[:-1]),
        global_batch=options.global_batch,
        local_batch=options.local_batch,
        most_stages=sum(works.can_be_stage if cuts is None else map(bool, works.calls)),
        tensor_degrees=tensor_degrees(*counts),
        context_degrees=context_degrees(program.sequence, *counts, fixed=fix.get("cp", ())),
        expert_degrees=expert_degrees(labels.num_experts, *counts),
        accumulates=program.mixes_batch is None or bool(shared_degrees(fix).get("per_micro_batch")),
        accumulates_singly=singly,
        devices_per_host=goal.parts[counts[-1]].on.machine.links.devices_per_host,
        fix=fix,
        forbid=forbid,
        cuts=cuts,
    )
    if not constraints.offloads:
        raise PlanError("no value of offload is left: fix and forbid exclude each other; leave one of them out")
    _ = constraints.num_stages  # raises PlanError if cuts and recompute_blocks disagree
    return constraints
