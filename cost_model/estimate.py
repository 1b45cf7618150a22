"""The cost of one training step of one plan: time, memory, and their parts.

    step       `autopar.cost_model.step.step` over the blocks of the captured program. A plan's own pipeline stages are
               replayed by their action list (`autopar.cost_model.pipeline.stages`).
    MFU        Model FLOP / (step · devices · peak): products and attention forward, twice that backward. Attention
               counts without its mask (Chowdhery et al. 2022, "PaLM", appendix B; Narayanan et al. 2021, "Efficient
               large-scale language model training on GPU clusters", appendix).
    HFU        MFU with the recomputed FLOP too (Korthikanti et al. 2022, section 6.3).
    scaling    Tokens/s of a device over those of the same plan without data parallelism. That plan has the devices of
               one replica, and each device has the same micro-batches.

Nothing here imports torch at module level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.cost_model.interval import TRAINERS, Situation, chance_of_fitting, interval_of, usable_bytes
from autopar.cost_model.machine.cluster import cluster_machine, default_precision, dtype_assumptions
from autopar.cost_model.machine.engine import DEFAULT, NEUTRAL
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.parts import COLLECTIVES, COMPUTE, MEMORY, OTHER
from autopar.cost_model.pricing import Pricing, Question, layout_of, without_data_parallelism
from autopar.cost_model.step.experts import expert_assumptions
from autopar.cost_model.step.offload import host_assumption, host_of
from autopar.cost_model.step.step import StepSeconds
from autopar.errors import InputError, Problem
from autopar.ir.arrays import Floats
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.optimizers import DEFAULT_OPTIMIZER, assumption_of
from autopar.words.numbers import readable_bytes

if TYPE_CHECKING:
    from autopar.cost_model.work.program_costs import ProgramWorks

HOURS_PER_DAY, SECONDS_PER_HOUR = 24.0, 3600.0
HOST_SHARE = 0.82  # of the devices' power, for hosts and their network: NVIDIA DGX H100, 10.2 kW for 8 × 700 W
PUE = 1.56  # power of a site over that of its computers: Uptime Institute, Global Data Center Survey 2024, mean


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSeconds:
    """Seconds of a step in one kind of collective on one mesh dimension. Computing waits for the exposed seconds;
    the hidden seconds run beside it."""

    mesh_dim: str
    what: str
    exposed_s: float
    hidden_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """A whole training run of `tokens`. Money, energy and CO2 are None where the cluster has no figure."""

    tokens: float
    steps: float
    days: float
    device_hours: float
    price_usd: float | None
    energy_kwh: float | None  # of the devices alone
    site_kwh: float | None  # with `HOST_SHARE` and `PUE`
    co2_kg: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The step of one plan, predicted. Seconds, bytes and FLOP/s are SI; parts of a whole are from 0 to 1.

    `compute_s`, `collectives` (their exposed seconds) and `other_s` add up to `step_s`. `memory_bytes` adds up to
    `peak_bytes`, of the fullest pipeline rank. A plan `fits` if `chance_of_fitting` is at least 0.9. Its host
    must have room for the `host_bytes` of a plan with `offload`, for one device. `formula_only` names the parts that
    autopar prices and does not run. `assumptions` names figures that nobody measured.
    In four of five runs, the measured step time is between the two values of `step_interval_s`, and the measured memory
    between those of `peak_interval_bytes` (`autopar.cost_model.interval`).
    """

    model: str
    cluster: str
    engine: str
    profile: str
    precision: str
    num_devices: int
    num_parameters: int
    sequence: int
    global_batch: int
    degrees: Mapping[str, Any] = field(hash=False)
    step_s: float
    step_interval_s: tuple[float, float]
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    mfu: float
    hfu: float
    compute_s: Mapping[str, float] = field(hash=False)
    collectives: tuple[CollectiveSeconds, ...]
    other_s: Mapping[str, float] = field(hash=False)
    peak_bytes: float
    peak_interval_bytes: tuple[float, float]
    device_bytes: float
    chance_of_fitting: float
    fits: bool
    memory_bytes: Mapping[str, float] = field(hash=False)
    scaling_efficiency: float
    least_devices: int
    run: RunCost | None
    formula_only: tuple[str, ...]
    assumptions: tuple[str, ...]
    host_bytes: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def estimate_works(
    works: ProgramWorks,
    question: Question,
    *,
    name: str = "",
    tokens: float | None = None,
    grams_co2_per_kwh: float | None = None,
) -> Estimate:
    """Price a captured and labelled model under a plan."""
    _check(works, question, tokens, grams_co2_per_kwh)
    question = replace(question, engine=question.engine.keeping(question.degrees.offload))
    constants, cluster, degrees = mechanisms(), question.cluster, question.degrees
    precision = question.precision or default_precision(cluster)
    machine = cluster_machine(cluster, question.engine, constants, precision=precision, profile=question.profile)
    layouts = layout_of(works, degrees)
    pricing = Pricing(works, question, machine)
    step, memory = pricing.step(layouts), pricing.memory(layouts)
    seconds = float(step.seconds[0])
    batch = degrees.global_batch
    per_step, devices = float(batch * works.sequence), cluster.num_devices
    used = pricing.utilisation(batch, seconds, devices)
    alone = seconds
    if degrees.dp > 1:
        alone = float(pricing.step(without_data_parallelism(layouts)).seconds[0])
    parts, on_host = _named(MEMORY, memory.parts), pricing.host_bytes(layouts)
    peak = sum(parts.values())
    situation = situation_of(machine, works)
    return Estimate(
        model=name or works.family.name,
        cluster=cluster.name,
        engine=question.engine.name,
        profile=machine.profile.name,
        precision=precision,
        num_devices=devices,
        num_parameters=works.num_parameters,
        sequence=works.sequence,
        global_batch=batch,
        degrees=_degrees(question),
        step_s=seconds,
        step_interval_s=interval_of(seconds, "time", situation),
        tokens_per_s=per_step / seconds,
        tokens_per_s_per_device=per_step / seconds / devices,
        tflops_per_device=used.flops_per_s / 1e12,
        mfu=used.mfu,
        hfu=used.hfu,
        compute_s=_named(COMPUTE, step.parts),
        collectives=_collectives(step),
        other_s=_named(OTHER, step.parts),
        peak_bytes=peak,
        peak_interval_bytes=(room := interval_of(peak, "memory", situation)),
        device_bytes=machine.memory_bytes,
        chance_of_fitting=chance_of_fitting(peak, machine.memory_bytes, room),
        fits=peak <= usable_bytes(machine.memory_bytes, situation=situation)
        and on_host <= host_of(machine).memory_bytes,
        host_bytes=on_host,
        memory_bytes=parts,
        scaling_efficiency=alone / seconds,
        least_devices=devices // degrees.dp,
        run=None if tokens is None else run_cost(cluster, tokens, per_step, seconds, grams_co2_per_kwh),
        formula_only=()
        if question.engine.name == DEFAULT
        else (f"engine {question.engine.name}: priced with that framework's mechanisms, autopar runs its own",),
        assumptions=(
            *machine.assumptions,
            *dtype_assumptions(works.dtype, precision, cluster),
            *expert_assumptions(machine, degrees.ep),
            *filter(None, (host_assumption(machine), optimizer_assumption(works, degrees))),
        ),
    )


def situation_of(machine: Machine, works: ProgramWorks) -> Situation:
    """What decides how wide the intervals of a captured model's predictions are."""
    return Situation(
        is_engine_known=machine.engine.name != NEUTRAL,
        is_trainer=machine.engine.name in TRAINERS,
        is_device_known=machine.profile.is_of_device,
        has_experts=works.num_experts > 0,
        has_steps=machine.profile.steps > 0,
    )


def optimizer_assumption(works: ProgramWorks, degrees: Degrees) -> str | None:
    """What is assumed about the plan's optimizer; None for AdamW."""
    name = degrees.optimizer
    if name == DEFAULT_OPTIMIZER or (unknown := assumption_of(name)) is not None:
        return None if name == DEFAULT_OPTIMIZER else unknown
    ranks = degrees.tp * (degrees.shard_ranks if degrees.fsdp_stage else 1)
    part = works.optimizers[name].gathered_part if name in works.optimizers else 0.0
    gathered = part * works.num_parameters / degrees.pp * works.stored_bytes
    said = f"the update of optimizer {name} is priced as AdamW's"
    if not gathered or ranks == 1:
        return said
    received = readable_bytes(gathered * (1 - 1 / ranks))
    return f"{said}; it gathers whole matrices, {received} a rank and step, which no figure contains"


def run_cost(
    cluster: ClusterSpec, tokens: float, tokens_per_step: float, step_s: float, grams_co2_per_kwh: float | None
) -> RunCost:
    """The time and cost of a run of `tokens` at `step_s` a step, without pauses."""
    steps = tokens / tokens_per_step
    hours = steps * step_s / SECONDS_PER_HOUR
    price, power = cluster.price_usd_per_hour, cluster.power_w
    energy = None if power is None else power * hours / 1e3
    return RunCost(
        tokens=float(tokens),
        steps=steps,
        days=hours / HOURS_PER_DAY,
        device_hours=hours * cluster.num_devices,
        price_usd=None if price is None else price * hours,
        energy_kwh=energy,
        site_kwh=None if energy is None else energy * (1 + HOST_SHARE) * PUE,
        co2_kg=None if energy is None or grams_co2_per_kwh is None else energy * grams_co2_per_kwh / 1e3,
    )


def _named(names: Mapping[str, str], parts: Mapping[str, Floats]) -> dict[str, float]:
    return {says: float(np.max(parts[name])) for name, says in names.items()}


def _collectives(step: StepSeconds) -> tuple[CollectiveSeconds, ...]:
    return tuple(
        CollectiveSeconds(
            mesh_dim=dim,
            what=what,
            exposed_s=float(np.max(step.parts[name])),
            hidden_s=float(np.max(step.hidden.get(name, 0.0))),
        )
        for name, (dim, what) in COLLECTIVES.items()
    )


def _degrees(question: Question) -> dict[str, Any]:
    named = {name: value for name, value in asdict(question.degrees).items() if value is not None}
    return named | {"cuts": list(question.cuts)}


def _check(works: ProgramWorks, question: Question, tokens: float | None, grams: float | None) -> None:
    degrees, problems = question.degrees, []
    devices, ranks = question.cluster.num_devices, degrees.world_size
    if ranks != devices:
        rule = f"pp × tp × dp × cp = {ranks} must be the number of devices, {devices}"
        problems.append(Problem(path="degrees", rule=rule))
    if works.sequence % degrees.cp:
        problems.append(
            Problem(path="cp", value=degrees.cp, rule=f"must divide the {works.sequence} tokens of a sequence")
        )
    for name, amount in (("tokens", tokens), ("grams_co2_per_kwh", grams)):
        if amount is not None and not (np.isfinite(amount) and amount > 0):
            problems.append(Problem(path=name, value=amount, rule="must be a number greater than 0"))
    if problems:
        raise InputError("the estimate cannot be made", problems)
