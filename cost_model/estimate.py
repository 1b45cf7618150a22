"""What one training step of one plan costs: time, memory, and what makes them up.

    step       `autopar.cost_model.step` over the blocks of the captured program; a plan's own pipeline stages by their
               action list (`autopar.cost_model.staged`)
    MFU        model FLOP / (step · devices · peak): products and attention forward, twice that backward, attention
               counted without its mask (Chowdhery et al. 2022, "PaLM", appendix B; Narayanan et al. 2021, "Efficient
               large-scale language model training on GPU clusters", appendix)
    HFU        the same with what recomputation runs again (Korthikanti et al. 2022, section 6.3)
    scaling    tokens/s of a device over those of the same plan without data parallelism, on as many devices as one
               replica has and with the same micro-batches each

Nothing here imports torch at module level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.cluster_machine import ClusterMachine, cluster_machine, default_precision
from autopar.cost_model.engine import Engine
from autopar.cost_model.expert_parallel import with_experts
from autopar.cost_model.expressions import VARIANTS, Family, evaluate
from autopar.cost_model.layout import Layouts, Shape
from autopar.cost_model.mechanisms import Mechanisms, mechanisms
from autopar.cost_model.row_estimate import FULL
from autopar.cost_model.staged import Stages, pipeline_of, staged_memory, stages_at
from autopar.cost_model.step import StepSeconds, step_seconds
from autopar.cost_model.step_memory import StepMemory, step_memory
from autopar.errors import InputError, Problem
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees

if TYPE_CHECKING:
    from autopar.cost_model.device_profile import DeviceProfile
    from autopar.cost_model.program_works import ProgramWorks

Floats = NDArray[Any]
PASSES = 3  # a product forward, for its input's gradient, for its weight's
HOURS_PER_DAY, SECONDS_PER_HOUR = 24.0, 3600.0

COMPUTE = {
    "products": "matrix products",
    "attention": "attention",
    "memory-bound": "memory-bound operators",
    "host": "waiting for the host",
    "recomputation": "recomputation",
    "embedding, head, loss": "embedding, head and loss",
}
COLLECTIVES = {
    "tensor collectives": ("tp", "activations and their gradients"),
    "context collectives": ("cp", "keys and values"),
    "expert collectives": ("ep", "tokens to their experts and back"),
    "shard collectives": ("dp", "weights and gradients of blocks (ZeRO 2, 3)"),
    "data collectives": ("dp", "gradients and updated parameters"),
    "messages": ("pp", "activations and gradients between stages"),
}
OTHER = {
    "bubble": "bubble of the pipeline",
    "optimizer": "optimizer",
    "fixed": "fixed costs of a step",
    "stragglers": "waiting for the slowest rank",
}
MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "gathered": "gathered weights (ZeRO 3)",
    "activations": "activations in flight",
    "logits": "logits",
    "workspace": "workspace of recomputation",
    "reserve": "reserve of the framework",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSeconds:
    """Seconds of a step in one kind of collective on one mesh dimension: those that computing waits for, and those
    that run beside it."""

    mesh_dim: str
    what: str
    exposed_s: float
    hidden_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """A whole training run of `tokens`. Money, energy and CO2 are None where the cluster does not say what they take.

    `energy_kwh` is of the devices alone; hosts, switches and cooling come on top.
    """

    tokens: float
    steps: float
    days: float
    device_hours: float
    price_usd: float | None
    energy_kwh: float | None
    co2_kg: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The step of one plan, predicted. Seconds, bytes and FLOP/s are SI; parts of a whole are from 0 to 1.

    `compute_s`, `collectives` (their exposed seconds) and `other_s` add up to `step_s`; `memory_bytes` add up to
    `peak_bytes`, of the pipeline rank that has most. `fits` allows for what allocators lose of `device_bytes`.
    `formula_only` says what of the question autopar prices and does not run, `assumptions` what nobody measured.
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
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    mfu: float
    hfu: float
    compute_s: Mapping[str, float] = field(hash=False)
    collectives: tuple[CollectiveSeconds, ...]
    other_s: Mapping[str, float] = field(hash=False)
    peak_bytes: float
    device_bytes: float
    fits: bool
    memory_bytes: Mapping[str, float] = field(hash=False)
    scaling_efficiency: float
    least_devices: int
    run: RunCost | None
    formula_only: tuple[str, ...]
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a captured model beside the model: everything but the tokens of a run.

    `cuts` are the calls before which pipeline stages begin (none: equal stages and the closed form of 1F1B); `cp` and
    `ep` the degrees of context and expert parallelism, which no plan runs yet.
    """

    cluster: ClusterSpec
    degrees: Degrees
    engine: Engine
    precision: str | None = None
    profile: DeviceProfile | None = None
    cuts: tuple[int, ...] = ()
    cp: int = 1
    ep: int = 1


def estimate_works(
    works: ProgramWorks,
    question: Question,
    *,
    name: str = "",
    tokens: float | None = None,
    grams_co2_per_kwh: float | None = None,
) -> Estimate:
    """Price a captured and labelled model under a plan.

    Raises InputError or ClusterError, with every problem, for degrees that do not fit, a precision that the device does
    not have, or a profile of another device.
    """
    _check(works, question, tokens, grams_co2_per_kwh)
    constants, cluster, degrees = mechanisms(), question.cluster, question.degrees
    precision = question.precision or default_precision(cluster)
    machine = cluster_machine(cluster, question.engine, constants, precision=precision, profile=question.profile)
    layouts = layouts_of(works, question)
    pricing = _Pricing(works, question, machine, constants, precision)
    step, memory = pricing.step(layouts), pricing.memory(layouts)
    seconds = float(step.seconds[0])
    batch = (degrees.micro_batch or 1) * degrees.num_micro_batches * degrees.dp
    per_step, devices = float(batch * works.sequence), cluster.num_devices
    model_flops, again_flops = pricing.flops(batch)
    reached = model_flops / (seconds * devices)
    alone = seconds
    if degrees.dp > 1:
        alone = float(pricing.step(_without_data_parallelism(layouts)).seconds[0])
    peak = float(memory.peak_bytes[0])
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
        tokens_per_s=per_step / seconds,
        tokens_per_s_per_device=per_step / seconds / devices,
        tflops_per_device=reached / 1e12,
        mfu=reached / machine.peak_flops_per_s,
        hfu=reached / machine.peak_flops_per_s * (1 + again_flops / model_flops if model_flops else 1.0),
        compute_s=_named(COMPUTE, step.parts),
        collectives=_collectives(step),
        other_s=_named(OTHER, step.parts),
        peak_bytes=peak,
        device_bytes=machine.memory_bytes,
        fits=peak <= FULL * machine.memory_bytes,
        memory_bytes=_named(MEMORY, memory.parts),
        scaling_efficiency=alone / seconds,
        least_devices=devices // degrees.dp,
        run=None if tokens is None else run_cost(cluster, tokens, per_step, seconds, grams_co2_per_kwh),
        formula_only=formula_only(question, precision),
        assumptions=machine.assumptions,
    )


def layouts_of(works: ProgramWorks, question: Question) -> Layouts:
    """The one layout of a question."""
    degrees = question.degrees
    values = {
        "tp": degrees.tp,
        "sequence_parallel": works.sequence_parallel,
        "pp": degrees.pp,
        "virtual": degrees.virtual_stages,
        "cp": question.cp,
        "ep": question.ep,
        "dp": degrees.dp,
        "shard": degrees.dp_shard * question.cp,
        "zero": degrees.zero,
        "micro_batch": degrees.micro_batch or 1,
        "micro_batches": degrees.num_micro_batches,
        "recompute": 2 if degrees.recompute == "full" else 0,
    }
    return Layouts(**{name: np.array([float(value)]) for name, value in values.items()})


def family_of_layout(works: ProgramWorks, question: Question) -> Family[Any]:
    """The numbers of a captured model's blocks for one micro-batch of a question's layout."""
    return _family(works, layouts_of(works, question), mechanisms())


def run_cost(
    cluster: ClusterSpec, tokens: float, tokens_per_step: float, step_s: float, grams_co2_per_kwh: float | None
) -> RunCost:
    """What a run of `tokens` takes at `step_s` a step, without pauses."""
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
        co2_kg=None if energy is None or grams_co2_per_kwh is None else energy * grams_co2_per_kwh / 1e3,
    )


def formula_only(question: Question, precision: str) -> tuple[str, ...]:
    """What of a question autopar prices and does not run."""
    found = []
    if question.cp > 1:
        found.append(f"context parallelism {question.cp}: priced as ring attention, autopar does not run it yet")
    if question.ep > 1:
        found.append(f"expert parallelism {question.ep}: priced as two all-to-alls a pass, autopar does not run it yet")
    if question.engine.name != "autopar":
        found.append(f"engine {question.engine.name}: priced with that framework's mechanisms, autopar runs its own")
    if precision == "fp8":
        found.append("fp8: priced as products in float8, autopar does not cast to it")
    return tuple(found)


class _Pricing:
    """One question on one machine; holds what several layouts of it share."""

    def __init__(
        self,
        works: ProgramWorks,
        question: Question,
        machine: ClusterMachine,
        constants: Mechanisms,
        precision: str,
    ) -> None:
        self.works, self.question, self.machine = works, question, machine
        self.constants, self.precision = constants, precision
        self.fused = question.engine.attention == "fused"
        self.families: dict[float, Family[Any]] = {}
        self.shape = _shape(works)

    def family(self, layouts: Layouts) -> Family[Any]:
        """The numbers of a layout of the question, which has its own data-parallel degree or none."""
        degree = float(layouts.dp[0])
        if degree not in self.families:
            self.families[degree] = _family(self.works, layouts, self.constants)
        return self.families[degree]

    def stages(self) -> Stages | None:
        degrees, cuts = self.question.degrees, self.question.cuts
        if not cuts:
            return None
        return stages_at(
            self.works.calls,
            cuts,
            schedule=degrees.schedule,
            pp=degrees.pp,
            virtual=degrees.virtual_stages,
            micro_batches=degrees.micro_batches,
            runs=degrees.accumulate,
        )

    def step(self, layouts: Layouts) -> StepSeconds:
        """With recomputation in some blocks only, as much between none and all of it."""
        share = self._recomputed_share()
        found = [self._step(one) for one in self._with_and_without(layouts)]
        return StepSeconds(
            seconds=_between(share, [one.seconds for one in found]),
            parts={name: _between(share, [one.parts[name] for one in found]) for name in found[0].parts},
            hidden={name: _between(share, [one.hidden[name] for one in found]) for name in found[0].hidden},
        )

    def memory(self, layouts: Layouts) -> StepMemory:
        share = self._recomputed_share()
        found = [self._memory(one) for one in self._with_and_without(layouts)]
        parts = {name: _between(share, [one.parts[name] for one in found]) for name in found[0].parts}
        parts["workspace"] = found[-1].parts["workspace"]
        return StepMemory(peak_bytes=np.asarray(sum(parts.values())), parts=parts)

    def flops(self, sequences: float) -> tuple[float, float]:
        """FLOP of a step over all devices: the model's, and what is computed again."""
        ones = dict.fromkeys((*self.works.mesh.names, "b", "t", "d"), 1.0)
        tokens = float(self.works.sequence)
        roles = self.works.family.roles
        products = tuple(tuple(one.flops for one in self.works.family.block(role, "tp").products) for role in roles)
        found = evaluate(products, {**ones, "s": tokens, "S": tokens})
        forward = {role: sum(flops) for role, flops in zip(roles, found, strict=True)}
        repeated = sum(count * forward[role] for role, count in self.works.counts)
        whole = repeated + forward["first"] + forward["last"]
        again = repeated * self._recomputed_share() if self.question.degrees.recompute == "full" else 0.0
        return PASSES * float(whole) * sequences, float(again) * sequences

    def _step(self, layouts: Layouts) -> StepSeconds:
        engine, stages = self.question.engine, self.stages()
        return step_seconds(
            self.family(layouts),
            self.shape,
            layouts,
            self.machine.machine,
            engine,
            self.constants,
            in_float8=self.precision == "fp8",
            fused=self.fused,
            pipeline=None if stages is None else pipeline_of(stages, engine, self.constants.message_exposed),
        )

    def _memory(self, layouts: Layouts) -> StepMemory:
        family, stages, reserve = self.family(layouts), self.stages(), self.machine.profile.reserve_bytes
        shape, engine = self.shape, self.question.engine
        if stages is None:
            return step_memory(family, shape, layouts, engine, reserve_bytes=reserve, fused=self.fused)
        return staged_memory(stages, family, shape, layouts, engine, reserve_bytes=reserve, fused=self.fused)

    def _recomputed_share(self) -> float:
        """The part of the repeated blocks that computes again, where anything does."""
        degrees = self.question.degrees
        if degrees.recompute_blocks is None:
            return 1.0
        blocks = sum(count for _, count in self.works.counts)
        return min(1.0, degrees.recompute_blocks * degrees.num_stages / blocks)

    def _with_and_without(self, layouts: Layouts) -> list[Layouts]:
        if self._recomputed_share() == 1.0:
            return [layouts]
        return [replace(layouts, recompute=np.zeros(1)), layouts]


def _family(works: ProgramWorks, layouts: Layouts, constants: Mechanisms) -> Family[Any]:
    tokens = float(works.sequence)
    sizes = dict(zip(works.mesh.names, works.mesh.degrees, strict=True))
    numbers = {name: np.array([float(n)]) for name, n in sizes.items()}
    numbers |= {"b": layouts.micro_batch, "t": layouts.tp, "d": layouts.dp}
    numbers |= {"s": tokens / layouts.cp, "S": np.array([tokens])}
    roles = works.family.roles
    found = evaluate(tuple(works.family.block(role, "tp") for role in roles), numbers)  # both variants are one
    blocks = tuple((role, tuple((v, work) for v in VARIANTS)) for role, work in zip(roles, found, strict=True))
    return with_experts(replace(works.family, blocks=blocks), layouts, constants)


def _between(share: float, values: list[Floats]) -> Floats:
    return values[0] if len(values) == 1 else (1 - share) * values[0] + share * values[1]


def _shape(works: ProgramWorks) -> Shape:
    mesh, dims = works.mesh, []
    tensor = [(name, n) for name, n in zip(mesh.names, mesh.degrees, strict=True) if name not in ("dp", "tp")]
    for i, (name, n) in enumerate(tensor):
        dims.append((name, n, int(np.prod([m for _, m in tensor[i + 1 :]], initial=1))))
    return Shape(
        counts=tuple((role, np.array([float(count)])) for role, count in works.counts),
        hidden=np.array([float(works.hidden)]),
        sequence=np.array([float(works.sequence)]),
        experts_per_token=np.array([works.experts_per_token]),
        is_tied=np.array([works.is_tied]),
        element_bytes=float(works.element_bytes),
        tensor_dims=tuple(dims),
    )


def _without_data_parallelism(layouts: Layouts) -> Layouts:
    return replace(layouts, dp=np.ones(1), shard=layouts.cp, ep=np.minimum(layouts.ep, layouts.cp))


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
    found = {name: value for name, value in asdict(question.degrees).items() if value is not None}
    return found | {"cp": question.cp, "ep": question.ep, "cuts": list(question.cuts)}


def _check(works: ProgramWorks, question: Question, tokens: float | None, grams: float | None) -> None:
    degrees, problems = question.degrees, []
    for name, value in (("cp", question.cp), ("ep", question.ep)):
        if value < 1:
            problems.append(Problem(path=name, value=value, rule="must be at least 1"))
    if problems:
        raise InputError("the estimate cannot be made", problems)
    devices, asked = question.cluster.num_devices, degrees.world_size * question.cp
    if asked != devices:
        rule = f"pp × tp × dp × cp = {asked} must be the number of devices, {devices}"
        problems.append(Problem(path="degrees", rule=rule))
    if works.sequence % question.cp:
        problems.append(
            Problem(path="cp", value=question.cp, rule=f"must divide the {works.sequence} tokens of a sequence")
        )
    ranks, experts = degrees.dp * question.cp, works.num_experts
    if question.ep > 1 and not experts:
        problems.append(
            Problem(path="ep", value=question.ep, rule="the model has no experts", suggestion="leave it out")
        )
    elif ranks % question.ep or (experts and experts % question.ep):
        rule = f"must divide the {ranks} ranks of dp × cp and the {experts} experts"
        problems.append(Problem(path="ep", value=question.ep, rule=rule))
    for name, amount in (("tokens", tokens), ("grams_co2_per_kwh", grams)):
        if amount is not None and not (np.isfinite(amount) and amount > 0):
            problems.append(Problem(path=name, value=amount, rule="must be a number greater than 0"))
    if problems:
        raise InputError("the estimate cannot be made", problems)
