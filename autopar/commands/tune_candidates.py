"""What a measured search starts from: the captured model, the plans that may be measured, and the study of trials."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from autopar._torch import private
from autopar.capture.any_size import capture
from autopar.capture.export.export import Inputs, LossFunction, input_names
from autopar.capture.record.captured import Capture
from autopar.capture.record.pickled import to_bytes
from autopar.commands.calibrate import calibrate as measure_device
from autopar.commands.hosts import Hosts
from autopar.commands.trial import TrialJob
from autopar.cost_model.fit.profile_comparison import tiers_of
from autopar.cost_model.machine.cluster import precision_of
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.machine.profile_io import load_profile, profile_from_dict, profile_to_dict
from autopar.cost_model.parts import COLLECTIVES
from autopar.cost_model.work.program_costs import dtype_of
from autopar.errors import InfeasibleError, InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import degrees_from
from autopar.ir.plan import Plan
from autopar.planning.fixed import label_plan, program_for
from autopar.planning.labels import LABELLED, LABELLED_DP
from autopar.planning.machine import machine_of
from autopar.planning.measured import profile_for
from autopar.planning.options import PlanOptions
from autopar.planning.search import search_captured
from autopar.planning.study_question import question_about
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.verify.random_batches import values_that_decide
from autopar.search.driver.study import StudyPlace, study_place
from autopar.search.measured.study import TrialStudy
from autopar.search.measured.tuning import Candidate
from autopar.search.result.format import nothing_fits
from autopar.search.result.result import Contender
from autopar.search.space.subcluster import part_of

CALIBRATION_MINUTES = 1.5
COMPUTE, REST = "compute", ("fixed", "host copies")
PROFILE = "profile"  # the attribute of a study
_Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Given:
    """The model of a search, the inputs to capture it with, and messages for the user."""

    model: nn.Module
    example_inputs: Inputs
    loss_fn: LossFunction | None
    name: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """The captured model of a search, and what its trials need of it."""

    captured: Capture
    source: Callable[[str], torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    name: str
    kind: str  # the class of the model
    origin: str
    seed: int

    def job(self, plan: Plan, device_type: str) -> TrialJob:
        """What every rank of a trial of a plan needs."""
        program = program_for(self.captured, plan.degrees)
        return TrialJob(
            plan=plan,
            program=to_bytes(program),
            buffers={name: self.source(name) for name in program.buffers},
            given=values_that_decide(program, self.inputs),
            origin=self.origin,
            device_type=device_type,
            seed=self.seed,
        )

    def plan_of(self, candidate: Candidate, cluster: ClusterSpec) -> Plan:
        """The plan of a candidate, as it runs."""
        said = dict(candidate.degrees)
        regather = said.pop("regather", True)
        said.pop("cuts", None)  # the labeller cuts as the search does
        degrees, part = degrees_from(said), part_of(cluster, candidate.num_devices)
        return label_plan(program_for(self.captured, degrees), part, degrees, self.name, regather=regather)


def subject_of(given: Given, asked: PlanOptions, *, specialise: bool, origin: str) -> Subject:
    """A model captured in the precision that is asked for. `origin` may register operators of its own."""
    model = private.uncompiled(given.model)
    captured = capture(
        model, given.example_inputs, batch=LABELLED_DP, loss_fn=given.loss_fn, specialise=specialise,
        precision=asked.wish().get("precision"),
    )  # fmt: skip
    return Subject(
        captured=captured,
        source=parameter_source(model, state=None, seed=asked.seed, dtype=None),
        inputs=input_names(model, given.example_inputs, given.loss_fn),
        name=given.name,
        kind=type(model).__name__,
        origin=origin,
        seed=asked.seed,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenProfile:
    """The profile that was given, and whether CPU ranks are measured first if nobody measured it."""

    of: DeviceProfile | str | Path | None
    calibrate: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class OpenedStudy:
    """A study with its candidates, and the machine that they were priced on."""

    study: TrialStudy
    machine: Machine
    cluster: ClusterSpec
    asked: PlanOptions
    sequence: int
    notes: tuple[str, ...]
    place: StudyPlace | None
    hosts: Hosts | None = None  # of a job; without one ranks start on this host


# ---- candidates ----


def opened_study(
    subject: Subject,
    cluster: ClusterSpec,
    asked: PlanOptions,
    where: str | Path | None,
    profile: GivenProfile,
    report: _Progress,
) -> OpenedStudy:
    """The study with its candidates: the ones that it was made with, or the best plans by prediction."""
    program = program_for(subject.captured, LABELLED)
    precision = asked.precision or precision_of(dtype_of(program), cluster)
    given = profile_for(profile.of, None, cluster, precision)
    place = None
    if where is not None:
        about = question_about(asked, cluster, machine_of(cluster, given, precision), subject.name)
        named = {name: value for name, value in about.items() if not name.startswith(PROFILE)}
        place = study_place(where, {**named, "trials": "measured", "fingerprint": program.fingerprint})
    kept = None if place is None else place.attribute(PROFILE)
    notes: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    if kept is not None:
        machine = machine_of(cluster, profile_from_dict(json.loads(kept), f"the profile in {where}"), precision)
    else:
        machine = machine_of(cluster, given, precision)
        if profile.calibrate and _is_unmeasured(cluster, profile, machine):
            machine = machine_of(cluster, _calibrated(cluster, report), precision)
            notes = ("this machine was calibrated first; `autopar calibrate --out FILE` keeps a profile",)
        candidates = _candidates(subject, cluster, replace(asked, profile=machine.profile), report)
    tokens = (asked.global_batch or 0) * (program.sequence or 1)
    study = TrialStudy(candidates, place, objective=asked.objective, tokens=tokens)
    if place is not None and kept is None:
        place.keep(PROFILE, json.dumps(profile_to_dict(machine.profile)))
    return OpenedStudy(
        study=study,
        machine=machine,
        cluster=cluster,
        asked=asked,
        sequence=program.sequence or 1,
        notes=notes,
        place=place,
    )


def _is_unmeasured(cluster: ClusterSpec, profile: GivenProfile, machine: Machine) -> bool:
    """Whether nobody measured these devices. Shipped profiles of GPUs are fitted on published runs of them."""
    named = profile.of is not None or (cluster.profile is not None and Path(cluster.profile).is_file())
    if named or machine.profile.measured is not None:
        return False
    return cluster.device_type == "cpu" or not machine.profile.is_of_device


def _calibrated(cluster: ClusterSpec, report: _Progress) -> DeviceProfile:
    """The measured profile of CPU ranks, or of a GPU, which a process of its own measures: this one holds no device."""
    report("calibrating: nobody measured the profile of these devices")
    if cluster.device_type == "cpu":
        return measure_device(
            ranks=cluster.num_devices,
            minutes=CALIBRATION_MINUTES,
            on_progress=lambda done, total, text: report(f"calibrating, {done} of {total}: {text}"),
        ).profile
    with TemporaryDirectory() as folder:
        path = Path(folder) / "device.yaml"
        asked = ["calibrate", "--minutes", str(CALIBRATION_MINUTES), "--out", str(path)]
        done = subprocess.run([sys.executable, "-m", "autopar", *asked], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InputError(f"`autopar {' '.join(asked)}` failed; give a profile: {done.stderr.strip()[-500:]}")
        return load_profile(path)


def _candidates(subject: Subject, cluster: ClusterSpec, asked: PlanOptions, report: _Progress) -> tuple[Candidate, ...]:
    """The best plans of all degrees by prediction, in the order of their price."""
    found = search_captured(subject.captured, cluster, asked, name=subject.name, on_progress=report)
    if found.best is None:
        raise InfeasibleError(nothing_fits(found))
    plans = [one for one in (found.best, *found.others) if one.fits and not one.formula_only]
    return tuple(_candidate(one, cluster) for one in plans)


def _candidate(one: Contender, cluster: ClusterSpec) -> Candidate:
    tiers = tiers_of(part_of(cluster, one.num_devices), one.degrees)
    terms: dict[str, float] = {}
    for part, seconds in one.parts.items():
        dim = COLLECTIVES[part][0] if part in COLLECTIVES else None
        term = COMPUTE if dim is None else tiers.get("point-to-point" if dim == "pp" else dim, "in_host")
        if part not in REST:
            terms[term] = terms.get(term, 0.0) + seconds
    return Candidate(
        degrees=one.degrees,
        predicted_s=one.step_s,
        needed_bytes=one.needed_bytes,
        terms=terms,
        num_devices=one.num_devices,
        per_second=one.value / one.step_s,
    )
