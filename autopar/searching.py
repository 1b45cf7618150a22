"""`autopar.plan`: from a model and a cluster to the best plan and why it is the best.

The model is captured once without memory. Its blocks are labelled for every tensor degree that could be the best, all
degrees are searched (`autopar.search.plan_search`), and what wins is labelled at its own micro-batch, as it will run.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from autopar.cost_model.cluster_machine import cluster_machine, default_precision
from autopar.cost_model.device_profile import DeviceProfile
from autopar.cost_model.engine import engine_named
from autopar.cost_model.mechanisms import mechanisms
from autopar.cost_model.pricing import ranks_per_core
from autopar.cost_model.profile_file import load_profile
from autopar.cost_model.program_works import ProgramWorks, program_works
from autopar.errors import InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees
from autopar.ir.program import Program
from autopar.planning import choose_labels, label_plan, program_for
from autopar.search.exact import Priced, priced
from autopar.search.plan_search import Searched, search_degrees
from autopar.search.result import Closest, Contender, Counted, SearchResult, degrees_in_plain, why_slower
from autopar.search.screen import Machinery
from autopar.search.space import Limits, divisors, wishes
from autopar.trace.any_size import capture
from autopar.trace.capture import Inputs, LossFunction

ENGINE = "autopar"
LABELLED_DP = 2  # data-parallel ranks of the capture that is searched with: labels are the same for any number above 1
MOST_PRICED = 400
TOP = 5
TRIALS = 40  # of Optuna, where a pipeline is among the best
MOST_TENSOR_RANKS = 64


def plan(
    model: nn.Module,
    cluster: ClusterSpec | str,
    *,
    example_inputs: Inputs,
    global_batch: int,
    loss_fn: LossFunction | None = None,
    fix: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    top: int = TOP,
    trials: int = TRIALS,
    seed: int = 0,
    timeout_s: float | None = None,
    profile: DeviceProfile | str | Path | None = None,
    precision: str | None = None,
    name: str = "",
    say: Callable[[str], None] | None = None,
) -> SearchResult:
    """Search the fastest plan for steps of `global_batch` sequences that fits the cluster's devices.

    A module may be on meta; of `example_inputs` the shapes count, not the batch. `fix` gives words of a plan's degrees
    the values that they must have, one or several (``{"tp": (4, 8)}``), `forbid` those that they must not have. `top`
    is how many other plans are explained; `trials` how many variations of stage cuts Optuna may try, seeded with
    `seed`, where a pipeline is among the best. With `timeout_s` the search ends then with what it has, and a gap. `say`
    is told what is being done.

    Raises `InputError`, `PlanError` where no plan is legal, `ClusterError` or `CaptureError`. Where nothing fits,
    `SearchResult.plan` is None.
    """
    tell = say or (lambda _: None)
    spec = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    wanted = wishes(fix, forbid)
    own = load_profile(profile) if isinstance(profile, (str, Path)) else profile
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise InputError(f"global_batch is {global_batch!r}; it must be a whole number of at least 1")
    tell("capturing")
    captured = capture(model, example_inputs, batch=LABELLED_DP, loss_fn=loss_fn)
    program = program_for(captured, Degrees(dp_shard=LABELLED_DP, micro_batch=1))
    started = time.monotonic()
    works_of = _works(program, spec)
    on = _machinery(works_of(1), spec, own, precision)
    deadline = np.inf if timeout_s is None else started + timeout_s
    found = search_degrees(
        works_of,
        spec,
        _limits(program, works_of(1), spec, global_batch),
        wanted,
        on,
        most_exact=MOST_PRICED,
        trials=trials,
        seed=seed,
        goes_on=lambda: time.monotonic() < deadline,
        say=tell,
    )
    _refuse_without_candidates(found, spec, global_batch)
    best = found.best
    decided = None
    if best is not None:
        tell("labelling the best plan")
        final = program_for(captured, best.degrees)
        decided = label_plan(final, spec, best.degrees, name or type(model).__name__, cuts=best.cuts)
    return replace(
        _result(found, works_of, spec, on, program, global_batch, top),
        model=name or type(model).__name__,
        plan=decided,
        seconds=time.monotonic() - started,
    )


def _refuse_without_candidates(found: Searched, cluster: ClusterSpec, global_batch: int) -> None:
    if not len(found.candidates):
        raise PlanError(
            f"no plan splits {global_batch} sequences over {cluster.num_devices} devices as asked; use a global_batch "
            f"that data-parallel degrees of {cluster.num_devices} devices divide, or fix and forbid less"
        )
    if {int(tp) for tp in found.candidates.tp} <= set(found.refused):
        reasons = "; ".join(f"tensor degree {tp}: {why}" for tp, why in found.refused.items())
        raise PlanError(f"the model cannot be split as asked: {reasons}")


def _works(program: Program, cluster: ClusterSpec) -> Callable[[int], ProgramWorks]:
    """What blocks cost under the labels for a tensor degree, each found once."""
    known: dict[int, ProgramWorks] = {}

    def works_of(tp: int) -> ProgramWorks:
        if tp not in known:
            degrees, analysis, found = choose_labels(
                program, cluster, Degrees(tp=tp, dp_shard=LABELLED_DP, micro_batch=1)
            )
            known[tp] = program_works(program, analysis, found.blocks, degrees.mesh)
        return known[tp]

    return works_of


def _machinery(
    works: ProgramWorks, cluster: ClusterSpec, profile: DeviceProfile | None, precision: str | None
) -> Machinery:
    engine, constants = engine_named(ENGINE), mechanisms()
    of_dtype = {"bfloat16": "bf16", "float16": "fp16"}
    wanted = precision or of_dtype.get(works.dtype) or default_precision(cluster)
    machine = cluster_machine(cluster, engine, constants, precision=wanted, profile=profile)
    sharing = ranks_per_core(machine, cluster)
    return Machinery(machine=machine, engine=engine, mechanisms=constants, precision=wanted, ranks_per_core=sharing)


def _limits(program: Program, works: ProgramWorks, cluster: ClusterSpec, global_batch: int) -> Limits:
    return Limits(
        num_devices=cluster.num_devices,
        global_batch=global_batch,
        most_stages=sum(1 for role in works.calls if role),
        tensor_degrees=tuple(tp for tp in divisors(cluster.num_devices) if tp <= MOST_TENSOR_RANKS),
        accumulates=program.mixes_batch is None,
    )


def _result(
    found: Searched,
    works_of: Callable[[int], ProgramWorks],
    cluster: ClusterSpec,
    on: Machinery,
    program: Program,
    global_batch: int,
    top: int,
) -> SearchResult:
    best, screened = found.best, found.screened
    names = {one.index: one.name for one in found.baselines}
    capacity = on.capacity_bytes

    def contender(index: int, one: Priced) -> Contender:
        slower = 0.0 if best is None else one.seconds / best.seconds - 1
        parts = {part: float(np.max(value)) for part, value in one.step.parts.items()}
        reason = ""
        if not one.fits:
            reason = f"does not fit: {(one.needed_bytes - capacity) / 1e9:.1f} GB too much"
        elif best is not None and one is not best:
            reason = why_slower({part: float(np.max(value)) for part, value in best.step.parts.items()}, parts)
        return Contender(
            degrees=degrees_in_plain(one.degrees, one.cuts),
            step_s=one.seconds,
            needed_bytes=one.needed_bytes,
            fits=one.fits,
            slower=slower,
            reason=reason,
            parts=parts,
            name=names.get(index, ""),
        )

    def price(index: int) -> Priced | None:
        tp = int(found.candidates.tp[index])
        if index in found.exact:
            return found.exact[index]
        if tp in found.refused:
            return None
        return priced(works_of(tp), found.candidates.degrees(index), cluster, on)

    baselines = [(one.index, price(one.index)) for one in found.baselines]
    without_room = ~screened.fits
    for_state = without_room & (screened.state_bytes > capacity)
    return SearchResult(
        model="",
        cluster=cluster.name,
        engine=on.engine.name,
        profile=on.machine.profile.name,
        precision=on.precision,
        num_devices=cluster.num_devices,
        sequence=program.sequence or 1,
        global_batch=global_batch,
        device_bytes=on.machine.memory_bytes,
        best=None if found.proof.best is None or best is None else contender(found.proof.best.index, best),
        refined=len(found.refined),
        others=tuple(contender(i, found.exact[i]) for i in _next_best(found, top)),
        baselines=tuple(contender(i, one) for i, one in baselines if one is not None),
        bound_s=None if best is None else found.proof.bound,
        gap=found.proof.gap,
        is_proven=found.proof.is_proven,
        counted=Counted(
            candidates=len(found.candidates),
            no_room_for_state=int(np.sum(for_state)),
            no_room_for_activations=int(np.sum(without_room & ~for_state)),
            priced=len(found.exact),
            refused=found.refused,
        ),
        closest=None if best is not None else _closest(found, on),
        seconds=0.0,
        notes=program.notes,
        assumptions=on.machine.assumptions,
    )


def _next_best(found: Searched, top: int) -> list[int]:
    """The fastest exact price of each combination of stages, tensor degree and ZeRO stage, but the best one's."""
    chosen: dict[tuple[int, ...], int] = {}
    order = sorted((i for i, one in found.exact.items() if one.fits), key=lambda i: found.exact[i].seconds)
    for index in order:
        degrees = found.exact[index].degrees
        chosen.setdefault((degrees.pp, degrees.tp, degrees.zero), index)
    return list(chosen.values())[1 : top + 1]


def _closest(found: Searched, on: Machinery) -> Closest:
    """The candidate that needs least memory, and how many times the devices would do."""
    needed = np.minimum(found.screened.without_bytes, found.screened.recomputed_bytes)
    index = int(np.argmin(needed))
    missing = float(needed[index]) - on.capacity_bytes
    degrees = found.candidates.degrees(index, recompute=True)
    times = int(np.ceil(float(needed[index]) / on.capacity_bytes))
    remedy = f"about {times} times as many devices with the state sharded over all of them, or shorter sequences"
    return Closest(
        degrees=degrees_in_plain(degrees, ()), needed_bytes=float(needed[index]), missing_bytes=missing, remedy=remedy
    )
