"""The start of a measured search: the captured model, the plans that may be measured, and the study of trials."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from autopar.capture.record.captured import Capture
from autopar.capture.record.file import to_bytes
from autopar.commands.calibrate import calibrate_cluster
from autopar.commands.given import Given
from autopar.commands.trial import TrialJob
from autopar.cost_model.fit.profile_comparison import tiers_of
from autopar.cost_model.interval import usable_bytes
from autopar.cost_model.machine.cluster import precision_of
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.machine.profile_io import profile_from_dict, profile_to_dict
from autopar.cost_model.parts import COLLECTIVES
from autopar.cost_model.work.program_costs import dtype_of
from autopar.errors import InfeasibleError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import degrees_from
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planning.captured_search import labels_for, plan_as_priced, search_captured, with_shared
from autopar.planning.fixed import PricedStages, program_for
from autopar.planning.labels import LABELLED, SearchLabels
from autopar.planning.machine import machine_of
from autopar.planning.measured import profile_for
from autopar.planning.options import PlanOptions
from autopar.planning.search import captured_as_asked
from autopar.planning.study_question import question_about
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.verify.random_batches import values_that_decide
from autopar.search.driver.study import study_place, study_values
from autopar.search.measured.study import TrialStudy
from autopar.search.measured.tuning import Candidate
from autopar.search.result.format import nothing_fits
from autopar.search.result.result import Contender
from autopar.search.space.dimensions import shared_degrees
from autopar.search.space.subcluster import part_of

CALIBRATION_MINUTES = 1.5
PARTS_OF_MEMORY = (0.75, 0.5)  # usable by a plan that is tried if larger ones run out of memory
COMPUTE, REST = "compute", ("fixed", "host copies")
PROFILE = "profile"  # the attribute of a study
_Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """The captured model of a search, the request for plans in its precision, and what trials need of it."""

    given: Given
    captured: Capture
    cluster: ClusterSpec
    options: PlanOptions
    labels: SearchLabels
    source: Callable[[str], torch.Tensor]
    notes: tuple[str, ...]  # for the user

    @property
    def program(self) -> Program:
        """The program at the size that labels are chosen at."""
        return program_for(self.captured, LABELLED)

    def job(self, candidate: Candidate) -> TrialJob:
        """What every rank of a trial of a candidate needs."""
        plan = self.plan_of(candidate)
        program = program_for(self.captured, plan.degrees)
        return TrialJob(
            plan=plan,
            program=to_bytes(program),
            buffers={name: self.source(name) for name in program.buffers},
            given=values_that_decide(program, self.given.request.named_inputs),
            origin=self.given.origin,
            device_type=self.cluster.device_type,
            predicted_bytes=candidate.predicted_bytes,
            seed=self.options.seed,
        )

    def plan_of(self, candidate: Candidate) -> Plan:
        """The plan of a candidate, as it was priced."""
        said = dict(candidate.degrees)
        cuts, regather = PricedStages(tuple(said.pop("cuts", ()))), said.pop("regather", True)
        shared = shared_degrees(self.options.narrowing()[0])  # the words that the request gives to every plan
        degrees, part = with_shared(degrees_from(said), shared), part_of(self.cluster, candidate.num_devices)
        return plan_as_priced(self.captured, self.labels, degrees, cuts, part, self.given.name, regather=regather)[1]


def subject_of(given: Given, cluster: ClusterSpec, options: PlanOptions, report: _Progress) -> Subject:
    """A model captured in its precision."""
    captured, options, notes = captured_as_asked(given.request, cluster, options)
    return Subject(
        given=given,
        captured=captured,
        cluster=cluster,
        options=options,
        labels=labels_for(captured, cluster, options, report),
        source=parameter_source(given.request.model, state=None, seed=options.seed, dtype=None),
        notes=(*given.notes, *notes),
    )


# ---- candidates ----


def opened_study(
    subject: Subject,
    where: str | Path | None,
    profile: DeviceProfile | str | Path | None,
    report: _Progress,
    *,
    calibrate: bool,
) -> tuple[TrialStudy, Machine, tuple[str, ...]]:
    """The study with its candidates, the machine that they were priced on, and notes.

    The candidates are the ones that the study was made with, or the best plans by prediction.
    """
    program, cluster, options = subject.program, subject.cluster, subject.options
    precision = options.precision or precision_of(dtype_of(program), cluster)
    given = profile_for(profile, None, cluster, precision)
    place = None
    if where is not None:
        about = question_about(options, cluster, machine_of(cluster, given, precision), subject.given.name)
        named = {name: value for name, value in about.items() if not name.startswith(PROFILE)}
        place = study_place(where, {**named, "trials": "measured", "fingerprint": program.fingerprint})
    kept = None if place is None else place.attribute(PROFILE)
    notes: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    if kept is not None:
        with study_values(str(where)):
            machine = machine_of(cluster, profile_from_dict(json.loads(kept), f"the profile in {where}"), precision)
    else:
        machine = machine_of(cluster, given, precision)
        if calibrate and profile is None and _is_unmeasured(cluster, machine):
            machine = machine_of(cluster, _calibrated(cluster, report), precision)
            notes = ("these devices were calibrated first; `autopar calibrate --out FILE` keeps a profile",)
        candidates = candidates_of(subject, machine, report)
    tokens = (options.global_batch or 0) * (program.sequence or 1)
    study = TrialStudy(candidates, place, objective=options.objective, tokens=tokens)
    if place is not None and kept is None:
        place.keep(PROFILE, json.dumps(profile_to_dict(machine.profile)))
    return study, machine, notes


def _is_unmeasured(cluster: ClusterSpec, machine: Machine) -> bool:
    """Whether nobody measured these devices. Shipped profiles of GPUs are fitted on published runs of them."""
    is_named = cluster.profile is not None and Path(cluster.profile).is_file()
    if is_named or machine.profile.measured is not None:
        return False
    return cluster.device_type == "cpu" or not machine.profile.is_of_device


def _calibrated(cluster: ClusterSpec, report: _Progress) -> DeviceProfile:
    """The profile that ranks on all devices measure. This process holds no device."""
    report("calibrating: nobody measured the profile of these devices")
    return calibrate_cluster(
        cluster,
        CALIBRATION_MINUTES,
        lambda done, total, text: report(f"calibrating, {done} of {total}: {text}"),
    ).profile


def candidates_of(subject: Subject, machine: Machine, report: _Progress) -> tuple[Candidate, ...]:
    """The best plans by prediction, in the order of their price."""
    find = partial(
        search_captured, subject.captured, subject.cluster, name=subject.given.name, on_progress=report,
        labels=subject.labels,
    )  # fmt: skip
    options, usable = replace(subject.options, profile=machine.profile), usable_bytes(machine.memory_bytes)
    result = find(options, alike=True)
    if result.best is None:
        raise InfeasibleError(nothing_fits(result))
    plans = [p for p in (result.best, *result.others) if p.fits]
    for part in PARTS_OF_MEMORY:
        held_back = int((1 - part) * usable)
        if all(p.peak_bytes + held_back > usable for p in plans):
            profile = replace(machine.profile, reserve_bytes=machine.profile.reserve_bytes + held_back)
            best = find(replace(options, profile=profile, top=0)).best
            if best is not None:
                plans.append(replace(best, peak_bytes=best.peak_bytes - held_back))
    return tuple(_candidate(p, subject.cluster) for p in plans)


def _candidate(plan: Contender, cluster: ClusterSpec) -> Candidate:
    tiers = tiers_of(part_of(cluster, plan.num_devices), plan.degrees)
    terms: dict[str, float] = {}
    for part, seconds in plan.parts.items():
        dim = COLLECTIVES[part][0] if part in COLLECTIVES else None
        term = COMPUTE if dim is None else tiers.get("point-to-point" if dim == "pp" else dim, "in_host")
        if part not in REST:
            terms[term] = terms.get(term, 0.0) + seconds
    return Candidate(
        degrees=plan.degrees,
        predicted_s=plan.step_s,
        predicted_bytes=plan.peak_bytes,
        terms=terms,
        num_devices=plan.num_devices,
        per_second=plan.value / plan.step_s,
    )
