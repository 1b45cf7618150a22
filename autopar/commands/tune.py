"""`autopar.tune`: measure the few plans worth measuring, on the devices that are there.

    plan       search all plans by prediction, and take the best plan of each degrees
    trial      start a world of ranks, build one plan, time steps in turns with the best plan so far
    learn      correct predictions by the measurements, and decide (`autopar.search.measured.tuning`)

The controller is this process. It holds no device and no process group, captures the model once, and sends programs. A
trial has a world of its own, so a failed trial leaves nothing behind. The world of the best plan stays while the memory
suffices for two plans.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cache.store import cache_folder
from autopar.cache.tuned import keep_tuned
from autopar.capture.request import Inputs, LossFunction, Request
from autopar.commands.given import Given
from autopar.commands.trial import CROWDED
from autopar.commands.trial_world import Incumbent, World, beside, is_crowded, measured
from autopar.commands.tune_candidates import COMPUTE, Subject, opened_study, subject_of
from autopar.cost_model.fit.measured_steps import slowed
from autopar.cost_model.interval import usable_bytes
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.errors import AutoparError, InputError, Problem
from autopar.ir.cluster import ClusterSpec
from autopar.planning.options import PlanOptions
from autopar.search.driver.study import RESULT
from autopar.search.measured.belief import chances
from autopar.search.measured.result import Left, PlanTrial, TuneResult
from autopar.search.measured.study import TrialStudy
from autopar.search.measured.tuning import Candidate, Evidence, NextTrial, Outcome, best_of, decide, known_after
from autopar.search.result.format import plan_in_words
from autopar.search.result.result import OBJECTIVES

TRIALS, BUDGET_S, TRIAL_S = 5, 600.0, 300.0
CONSIDERED = 20  # plans among which trials are chosen
_Progress = Callable[[str], None]
_OnTrial = Callable[[PlanTrial], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When measuring ends, and how long one trial may take."""

    trials: int = TRIALS
    budget_s: float = BUDGET_S  # of all trials together
    trial_s: float = TRIAL_S


def tune(
    model: nn.Module,
    cluster: ClusterSpec | str,
    *,
    example_inputs: Inputs,
    global_batch: int,
    loss_fn: LossFunction | None = None,
    objective: str = "time",
    trials: int = TRIALS,
    budget_s: float = BUDGET_S,
    trial_s: float = TRIAL_S,
    fix: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    study: str | Path | None = None,
    profile: DeviceProfile | str | Path | None = None,
    calibrate: bool = True,
    precision: str | None = None,
    seed: int = 0,
    specialise: bool = False,
    name: str = "",
    on_progress: _Progress | None = None,
    on_trial: Callable[[PlanTrial], None] | None = None,
) -> TuneResult:
    """Measure the few plans of a model that are worth measuring, on the devices of this machine.

    Args:
        model: A module, on meta or with weights. Trials train a copy with random weights.
        cluster: The devices that are here: a `ClusterSpec`, or its name or file, such as ``"4xcpu"``.
        example_inputs: A dict or tuple of tensors. Their shapes count, but not their batch.
        global_batch: Sequences of one step on all ranks.
        loss_fn: A function of (output, target), if the model returns no loss.
        objective: "time", "cost", "energy" or "memory".
        trials: The most trials, earlier trials of the study included.
        budget_s: Seconds after which no further trial begins.
        trial_s: Seconds after which a trial is ended as hanging.
        fix: The values that a word of `Plan.degrees` must have, one or several.
        forbid: The values that a word must not have.
        study: A journal (``tune.log``) or database (``tune.db``) of trials. It is continued if it is there.
        profile: A device profile or its file; by default the cluster's.
        calibrate: Whether the devices are measured for 90 seconds first, if nobody measured their profile.
        precision: Of computing, as in `autopar.plan`.
        seed: The seed of weights, data and the search.
        specialise: Whether branches on inputs are captured as the example inputs take them.
        name: The model's name in the result; by default its class.
        on_progress: A function that receives a text before each part of the work.
        on_trial: A function that receives every trial when it has ended.

    Returns:
        The best measured plan, all trials, and what measuring on would gain.

    Raises:
        InputError: An argument cannot be used, or the devices are not here.
        PlanError, InfeasibleError, CaptureError: As `autopar.plan`.

    Example:
        >>> how = {"example_inputs": batch, "loss_fn": loss_fn, "calibrate": False}
        >>> autopar.tune(model, "2xcpu", global_batch=8, trials=1, **how).plan.degrees.world_size
        2
    """
    spec = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    options = PlanOptions(
        global_batch=global_batch, objective=objective, fix=fix or {}, forbid=forbid or {}, seed=seed,
        precision=precision,
    )  # fmt: skip
    given = Given(
        request=Request.of(model, example_inputs, loss_fn, specialise=specialise),
        name=name or type(model).__name__, origin=type(model).__module__,
    )  # fmt: skip
    return tune_asked(
        lambda: given, spec, options, Limits(trials=trials, budget_s=budget_s, trial_s=trial_s), study=study,
        profile=profile, calibrate=calibrate, on_progress=on_progress or (lambda _: None),
        on_trial=on_trial or (lambda _: None),
    )  # fmt: skip


def tune_asked(
    make: Callable[[], Given],
    cluster: ClusterSpec,
    options: PlanOptions,
    limits: Limits,
    *,
    study: str | Path | None,
    profile: DeviceProfile | str | Path | None,
    calibrate: bool,
    on_progress: _Progress,
    on_trial: _OnTrial,
) -> TuneResult:
    """`tune` for the options of a search. `make` builds the model."""
    started = time.monotonic()
    _check(cluster, limits, options.objective)
    wanted = replace(options, top=CONSIDERED - 1)
    wanted.check_search(cluster.num_devices)
    given = make()
    on_progress(f"capturing {given.name}")
    wanted = replace(wanted, precision=wanted.precision or given.precision)
    subject = subject_of(given, cluster, wanted, on_progress)
    on_progress("looking for the plans that may be measured")
    opened, machine, notes = opened_study(subject, study, profile, on_progress, calibrate=calibrate)
    until = time.monotonic() + limits.budget_s
    runner = _Runner(subject=subject, study=opened, machine=machine, limits=limits, report=on_progress)
    try:
        runner.resume(opened.outcomes())
        while True:
            outcomes = opened.outcomes()
            decision = decide(
                opened.candidates,
                outcomes,
                most=limits.trials,
                objective=opened.objective,
                is_late=time.monotonic() > until,
                taken=opened.taken(),
            )
            if decision.next is None:
                break
            claim = opened.claim(decision.next, within_s=limits.trial_s * 2)
            if claim is None:
                continue
            outcome = Outcome(state="failed", reason="interrupted", message="the search was interrupted")
            try:
                outcome = runner.run(claim.candidate, len(outcomes) + 1)
            finally:
                opened.finish(claim, outcome)
            on_trial(PlanTrial(number=claim.number, candidate=opened.candidates[claim.candidate], outcome=outcome))
    finally:
        runner.close()
    subject = replace(subject, notes=(*subject.notes, *notes))
    result = _result(subject, opened, machine, outcomes, decision, time.monotonic() - started)
    if opened.place is not None:
        opened.place.keep(RESULT, json.dumps(result.to_dict()))
    if result.plan is not None:
        about = {"model": subject.given.name, "global_batch": result.global_batch, "objective": result.objective}
        kind = type(subject.given.request.model).__name__
        keep_tuned(cache_folder(), subject.cluster, kind, result.plan, about | {"step_s": result.step_s})
    return result


def _check(cluster: ClusterSpec, limits: Limits, objective: str) -> None:
    """Raise `InputError` in a job of several processes, if the devices are not here, or if a limit cannot be used."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(name, "1") != "1":
            raise InputError(
                f"tune starts its own ranks, and this is one of {os.environ[name]} processes ({name}); start it as one "
                "process, without torchrun, or by srun --ntasks 1"
            )
    problems = [
        Problem(path=name, value=value, rule="must be above 0")
        for name, value in (("trials", limits.trials), ("budget_s", limits.budget_s), ("trial_s", limits.trial_s))
        if not 0 < value < float("inf")
    ]
    if objective not in OBJECTIVES:
        problems.append(Problem(path="objective", value=objective, rule=f"must be one of {', '.join(OBJECTIVES)}"))
    wanted, here = cluster.groups[0].devices_per_host, torch.cuda.device_count()
    if cluster.device_type == "cuda" and here < wanted:
        rule = f"has {wanted} GPUs a host, and {here or 'none'} are here"
        remedy = "search without devices by `autopar plan`, or run this where the GPUs are"
        problems.append(Problem(path="cluster", value=cluster.name, rule=rule, suggestion=remedy))
    if not problems and cluster.num_hosts != 1:
        rule = f"has {cluster.num_hosts} hosts, and plans are measured on one"
        remedy = "name the devices of this host, such as -c 8xh100, or search without devices by `autopar plan`"
        problems.append(Problem(path="cluster", value=cluster.name, rule=rule, suggestion=remedy))
    if problems:
        raise InputError("the plans cannot be measured", problems)


# ---- trials ----


@dataclass(eq=False, kw_only=True)
class _Runner:
    """Runs trials one after the other, and keeps the ranks of the best plan while the memory suffices."""

    subject: Subject
    study: TrialStudy
    machine: Machine
    limits: Limits
    report: _Progress
    best: Incumbent | None = None
    best_bytes: float = 0.0

    def run(self, at: int, number: int) -> Outcome:
        """The trial of a candidate. Raises `InputError` if other processes hold the memory that it needs."""
        candidate = self.study.candidates[at]
        self.report(f"trial {number}: {plan_in_words(candidate.degrees)}")
        try:
            start = self._starter(candidate)
        except AutoparError as error:
            return Outcome(state="failed", reason="error", message=str(error))
        if self.best is not None:
            fits_beside = candidate.predicted_bytes + self.best_bytes < self.machine.memory_bytes
            (self.best.wake if fits_beside else self.best.close)()
        outcome, world = measured(start, self.best)
        if self.best is not None and self.best.world is not None and is_crowded(outcome):
            self.best.close()  # both plans together need more than was predicted
            outcome, world = measured(start, self.best)
        if CROWDED in outcome.message:  # no fault of the plan: a later run may try it
            raise InputError(f"the plans cannot be measured now: {outcome.message}")
        if outcome.seconds is None or world is None:
            return outcome
        seconds = outcome.seconds
        if self.best is not None and self.best.world is None:  # the plans could not step in turns
            world.close()
            seconds = beside(seconds, self.best)
        if self.best is None or seconds.median < self.best.seconds:
            self.close()
            self.best = Incumbent(seconds=seconds.median, start=start, world=world if world.is_open else None)
            self.best_bytes = self._held_bytes(candidate, outcome.peak_bytes)
        else:
            world.close()
        return replace(outcome, seconds=seconds)

    def resume(self, outcomes: Mapping[int, Outcome]) -> None:
        """Compare the next trials with the best plan of earlier ones, if there are any."""
        at, study = best_of(self.study.candidates, outcomes), self.study
        if at is None or (seconds := outcomes[at].seconds) is None:
            return
        candidate = study.candidates[at]
        self.best = Incumbent(seconds=seconds.median, start=lambda: self._starter(candidate)(), world=None)
        self.best_bytes = self._held_bytes(candidate, outcomes[at].peak_bytes)

    def _starter(self, candidate: Candidate) -> Callable[[], World]:
        """A function that starts the ranks of a candidate. Raises the errors of the labeller."""
        return partial(World, self.subject.job(candidate), candidate.num_devices, within_s=self.limits.trial_s)

    def _held_bytes(self, candidate: Candidate, measured: float | None) -> float:
        """What a rank of a plan holds: as predicted, or more if more was measured."""
        return max(candidate.predicted_bytes, (measured or 0.0) + self.machine.profile.reserve_bytes)

    def close(self) -> None:
        """End all ranks."""
        if self.best is not None:
            self.best.close()


def _result(
    subject: Subject,
    study: TrialStudy,
    machine: Machine,
    outcomes: Mapping[int, Outcome],
    decision: NextTrial,
    seconds: float,
) -> TuneResult:
    candidates = study.candidates
    known, best = known_after(candidates, outcomes), best_of(candidates, outcomes, study.objective)
    numbers = study.numbers()
    order = sorted(outcomes, key=lambda at: numbers[at])
    left = [at for at in range(len(candidates)) if at not in outcomes]
    chance, secs = chances(known.belief), known.belief.seconds
    return TuneResult(
        model=subject.given.name,
        cluster=subject.cluster.name,
        objective=study.objective,
        global_batch=subject.options.global_batch or 0,
        sequence=subject.program.sequence or 1,
        tried=tuple(PlanTrial(number=numbers[at], candidate=candidates[at], outcome=outcomes[at]) for at in order),
        left=tuple(
            Left(candidate=candidates[at], believed_s=float(secs[at]), chance=float(chance[at]),
                 why=known.ruled_out.get(at, ""))
            for at in left
        ),
        best=None if best is None else order.index(best),
        is_settled=decision.is_settled,
        why=decision.why,
        chance_left=known.chance_left,
        gain_left=known.gain_left,
        factors=known.factors,
        seconds=seconds,
        notes=subject.notes,
        plan=None if best is None else subject.plan_of(candidates[best]),
        profile=_learnt(machine, known, {candidates[at]: o for at, o in outcomes.items()}),
    )  # fmt: skip


def _learnt(machine: Machine, known: Evidence, tried: Mapping[Candidate, Outcome]) -> DeviceProfile | None:
    """The profile corrected by the trials, if there are any. A plan that ran out of memory raises the reserve."""
    missing = [usable_bytes(machine.memory_bytes) - p.predicted_bytes for p, o in tried.items() if o.reason == "oom"]
    if not missing and not known.belief.is_measured.any():
        return None
    usual = machine.profile.at_power_of(machine.device)
    terms = {name: factor for name, factor in known.factors.items() if name == COMPUTE or name in usual.links}
    why = f"{len(tried)} plans measured by autopar tune"
    slower = slowed(usual, terms, why)
    more = max(0.0, *missing, 0.0)
    if more:
        sources = {**slower.sources, "reserve_gb": f"raised by {more / 1e9:.3g} GB: a plan ran out of memory; {why}"}
        slower = replace(slower, reserve_bytes=int(slower.reserve_bytes + more), sources=sources)
    return replace(slower, steps=len(tried))
