"""Step time and peak memory of published runs, predicted from all their columns except the results.

The architecture picks a family of captured blocks (``cost_model/work/families``), which is evaluated at the row's
sizes. The machine picks a device preset and its profile, the framework an engine. Rows of one family, machine and
engine are priced together as arrays.

Rules fill unstated columns, and no rule looks at a result. The micro-batch is 1. The ZeRO stage is the framework's
default. Sequence parallelism is on if the framework has it and tp > 1. Recomputation is the framework's default, or the
least that fits the device. Near the limit it is not known which level fits: there the prediction is their mean.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.interval import FILLED, TRAINERS, Situation
from autopar.cost_model.machine.engine import NEUTRAL, Engine
from autopar.cost_model.machine.fitted_constants import Mechanisms, mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.cost_model.memory.formula import BESIDE_TENSORS, StepMemory, step_memory
from autopar.cost_model.pricing import step_between
from autopar.cost_model.published.adapters import with_adapters
from autopar.cost_model.published.families import (
    family_name,
    family_of,
    in_precision,
    numbers_at,
    shape_of_rows,
    sizes_of_row,
    with_expert_ranks,
    with_head,
)
from autopar.cost_model.published.machine import engine_of, row_machine
from autopar.cost_model.published.row import NoEstimate, Row, RowEstimate
from autopar.cost_model.step.context import Basis
from autopar.cost_model.step.experts import with_experts
from autopar.cost_model.step.layouts import RECOMPUTE_MODES, Layouts, Shape, layouts_from
from autopar.cost_model.step.offload import host_assumption
from autopar.cost_model.step.step import StepSeconds, step_seconds
from autopar.cost_model.work.block_work import Family, evaluate
from autopar.errors import ClusterError
from autopar.ir.arrays import Floats
from autopar.ir.device_presets import device_preset
from autopar.ir.trained import trained_from

# A run without a stated recomputation is as likely to recompute as not if it would otherwise need this multiple of the
# device's memory. A smaller excess may be an error of the memory model.
EVEN = 1.2
SPREAD = 0.1  # of the logarithm of that multiple
_ODDS = 0.02  # a level with a smaller weight is left out
_normal = np.vectorize(NormalDist().cdf, otypes=[float])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A row, settled."""

    row: Row
    machine: Machine
    family: str
    global_batch: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of one family, machine and engine, ready to be priced: `indices` are their places among all rows."""

    indices: tuple[int, ...]
    cases: tuple[_Case, ...]
    family: Family[Any]
    shape: Shape
    layouts: Layouts
    memory: StepMemory
    weights: tuple[Floats, ...]  # of the levels of recomputation of each row; they add up to 1

    @property
    def machine(self) -> Machine:
        return self.cases[0].machine

    @property
    def profile(self) -> DeviceProfile:
        return self.machine.profile

    def step(self, constants: Mechanisms, profile: DeviceProfile) -> StepSeconds:
        """Price the rows with the numbers of a profile and of mechanisms."""
        first = self.cases[0]
        family = with_experts(self.family, self.layouts, constants)
        machine = row_machine(first.row, self.machine.engine, constants, profile=profile)
        shares, steps = list[Floats](), list[StepSeconds]()
        for level, weight in enumerate(self.weights):
            if np.any(weight > 0):
                layouts = replace(self.layouts, recompute=np.full(len(weight), float(level)))
                shares.append(weight)
                steps.append(step_seconds(family, Basis(shape=self.shape, machine=machine), layouts))
        return step_between(shares, steps)


def estimate_rows(rows: Sequence[Row]) -> list[RowEstimate | NoEstimate]:
    """One estimate, or the reason why there is none, for every row, in their order."""
    groups, unmodelled = prepare(rows)
    estimates: dict[int, RowEstimate | NoEstimate] = dict(unmodelled)
    for group in groups:
        estimates |= dict(zip(group.indices, _estimates(group), strict=True))
    return [estimates[index] for index in range(len(rows))]


def prepare(rows: Sequence[Row]) -> tuple[list[RowGroup], dict[int, NoEstimate]]:
    """The rows by group, and the rows that cannot be modelled."""
    unmodelled: dict[int, NoEstimate] = {}
    groups: dict[Any, list[tuple[int, _Case]]] = {}
    for index, row in enumerate(rows):
        case = _case(row)
        if isinstance(case, NoEstimate):
            unmodelled[index] = case
            continue
        machine = case.machine
        key = (
            *(machine.device.name, machine.engine.model_dump_json()),
            *(machine.links.inter_host_bytes_per_s, machine.links.devices_per_host),
            *(case.family, row.precision, row.gpu_mem_gb, _variant(case), _is_over_data(case)),
            *(row.trains, row.stored, row.optimizer_state, row.gated_mlp, row.head),
        )
        groups.setdefault(key, []).append((index, case))
    return [_prepare(members) for members in groups.values()], unmodelled


def _case(row: Row) -> _Case | NoEstimate:
    missing = [name for name in row.not_stated() if name not in ("micro_batch", "global_batch", "precision")]
    if missing:
        return NoEstimate(id=row.id, reason=f"does not state {', '.join(missing)}")
    engine, warnings = engine_of(row), list[str]()
    if row.recompute_modules and row.recompute is None:
        row = replace(row, recompute="selective")
    elif row.recompute_modules and row.recompute != "selective":
        warnings.append(f"recompute_modules are not used, because recompute is {row.recompute}")
    if row.recompute is None and engine.unstated_recompute == "full":
        row = replace(row, recompute="full")
        warnings.append("recompute is not stated; it is full by default in this framework")
    if row.inter_gb_per_s is None and re.search(r"\d", row.inter_link or ""):
        warnings.append(f"inter_link {row.inter_link!r} is text, inter_gb_per_s is empty; the preset's is used")
    if engine.name == NEUTRAL:
        warnings.append("no engine is stated; the neutral engine is used")
    elif row.engine_basis == "guessed":
        warnings.append(f"the framework is only like engine {engine.name}; the interval is that of a guessed engine")
    try:
        if row.precision is None:
            usual = "fp16" if device_preset(row.gpu_type or "").peak_tflops.bfloat16 is None else "bf16"
            row = replace(row, precision=usual)
            warnings.append(f"precision is not stated; {usual} is assumed")
        machine = row_machine(row, engine, mechanisms())
    except ClusterError as error:
        return NoEstimate(id=row.id, reason=str(error))
    batch = row.global_batch or int(_dp(row) * (row.micro_batch or 1) * (row.grad_accum or 1) * _default_count(row))
    return _Case(
        row=row,
        machine=machine,
        family=family_name(row),
        global_batch=batch,
        warnings=(*warnings, *filter(None, (host_assumption(machine),))),
    )


def _is_over_data(case: _Case) -> bool:
    return case.machine.engine.data_ranks == "joint" and _dp(case.row) > 1


def _is_sequence_parallel(case: _Case) -> bool:
    row, usual = case.row, case.machine.engine.unstated_sequence_parallel
    return row.sp if row.sp is not None else usual and (row.tp or 1) > 1


def _variant(case: _Case) -> Literal["one", "tp", "sp"]:
    return "one" if (case.row.tp or 1) == 1 else "sp" if _is_sequence_parallel(case) else "tp"


def _default_count(row: Row) -> int:
    return 1 if row.grad_accum else max(1, row.pp or 1) * (1 if (row.pp or 1) == 1 else 4)


def _dp(row: Row) -> float:
    others = (row.tp or 1) * (row.pp or 1) * (row.cp or 1)
    return max(1.0, float(row.dp or (row.num_gpus or 1) / others))


def _prepare(members: Sequence[tuple[int, _Case]]) -> RowGroup:
    cases = tuple(case for _, case in members)
    first = cases[0]
    engine, machine = first.machine.engine, first.machine
    shape, layouts = shape_of_rows([case.row for case in cases]), _layouts(cases, engine)
    each = [sizes_of_row(case.row) for case in cases]
    numbers = {name: np.array([case[name] for case in each]) for name in each[0]}
    works = family_of(first.family, _variant(first), over_data=_is_over_data(first))
    family = evaluate(works, numbers_at(numbers, layouts))
    if np.any(layouts.etp < layouts.tp):
        at_etp = evaluate(works, numbers_at(numbers, replace(layouts, tp=layouts.etp)))
        shares = np.array([bool(case.row.moe_shared_ffn) for case in cases])  # tensor ranks split the shared experts
        family = with_expert_ranks(family, at_etp, layouts, np.where(shares | (layouts.etp == layouts.tp), 1.0, 0.5))
    trained = trained_from(first.row.trains or "all")
    family = with_adapters(family, trained, numbers, layouts, is_gated=bool(first.row.gated_mlp))
    family = in_precision(with_head(family, first.row), first.row)
    unstated = np.array([case.row.recompute is None for case in cases])
    basis = Basis(shape=shape, machine=machine)
    memory, layouts, weights = _recomputing(family, layouts, basis, machine.memory_bytes, unstated)
    return RowGroup(
        indices=tuple(index for index, _ in members),
        cases=cases,
        family=family,
        shape=shape,
        layouts=layouts,
        memory=memory,
        weights=weights,
    )


def _recomputing(
    family: Family[Any], layouts: Layouts, basis: Basis, memory_bytes: float, unstated: NDArray[np.bool_]
) -> tuple[StepMemory, Layouts, tuple[Floats, ...]]:
    """Memory, layouts with the likeliest level of recomputation, and the weight of each level."""
    stated = np.broadcast_to(layouts.recompute, unstated.shape)
    left, weights = np.ones(len(unstated)), []
    for level in range(len(RECOMPUTE_MODES)):
        held = step_memory(family, replace(layouts, recompute=np.full(len(unstated), float(level))), basis).peak_bytes
        is_last = level == len(RECOMPUTE_MODES) - 1
        fits = np.ones(len(unstated)) if is_last else _normal(np.log(EVEN * memory_bytes / held) / SPREAD)
        weights.append(np.where(unstated, left * fits, stated == level))
        left = left * (1 - fits)
    every = np.stack(np.broadcast_arrays(*weights))
    every = np.where(every < _ODDS, 0.0, every)
    every = every / every.sum(axis=0)
    layouts = replace(layouts, recompute=np.argmax(every, axis=0).astype(float))
    return step_memory(family, layouts, basis), layouts, tuple(every)


def _estimates(group: RowGroup) -> list[RowEstimate]:
    step, memory, count = group.step(mechanisms(), group.profile), group.memory, len(group.cases)
    needed = memory.peak_bytes - memory.parts["cache"]  # the allocator gives its cache back before it fails
    held = np.maximum(needed, np.minimum(memory.peak_bytes, group.machine.memory_bytes))
    tensors = sum(part for name, part in memory.parts.items() if name not in BESIDE_TENSORS)
    is_tensors = np.array([case.row.memory_basis == "allocated" for case in group.cases])
    held = np.where(is_tensors, tensors, held)
    seconds, needed, peak = (np.broadcast_to(column, (count,)) for column in (step.seconds, needed, held))
    parts = {name: np.broadcast_to(part, (count,)) for name, part in step.parts.items()}
    return [
        RowEstimate(
            id=case.row.id,
            seconds=float(seconds[i]),
            peak_bytes=float(peak[i]),
            fits=bool(needed[i] <= FILLED * group.machine.memory_bytes),
            parts={name: float(part[i]) for name, part in parts.items()},
            global_batch=None if case.row.global_batch else case.global_batch,
            situation=Situation(
                is_engine_known=case.machine.engine.name != NEUTRAL and case.row.engine_basis != "guessed",
                is_trainer=case.machine.engine.name in TRAINERS,
                is_device_known=case.machine.profile.is_of_device,
                has_experts=bool(case.row.moe_experts),
            ),
            warnings=(*case.warnings, *_on_recomputing(case.row, [weight[i] for weight in group.weights])),
        )
        for i, case in enumerate(group.cases)
    ]


def _on_recomputing(row: Row, weights: Sequence[float]) -> list[str]:
    """A warning for a row without a stated recomputation, unless it surely has none."""
    if row.recompute is not None or weights[0] > 1 - _ODDS:
        return []
    levels = ", ".join(
        f"{word} with {weight:.0%}" for word, weight in zip(RECOMPUTE_MODES, weights, strict=True) if weight
    )
    return [f"recompute is not stated, and the memory is near its limit or past it: {levels} of the weight"]


def _array(cases: Sequence[_Case], value: Callable[[Row], Any]) -> Floats:
    return np.array([float(value(case.row)) for case in cases])


def _layouts(cases: Sequence[_Case], engine: Engine) -> Layouts:
    def virtual(row: Row) -> float:
        pp = row.pp or 1
        if row.vpp is not None or pp == 1 or engine.unstated_virtual == "one":
            return row.vpp or 1
        return (row.layers or 1) // pp if (row.layers or 1) % pp == 0 else 1

    def recompute(row: Row) -> int:
        return RECOMPUTE_MODES.index(row.recompute) if row.recompute in RECOMPUTE_MODES else 0

    dp, cp = np.array([_dp(case.row) for case in cases]), _array(cases, lambda row: row.cp or 1)
    micro_batch = _array(cases, lambda row: row.micro_batch or 1)
    batch = np.array([float(case.global_batch) for case in cases])
    return layouts_from(  # in Megatron's order of ranks; no column states it
        tp=_array(cases, lambda row: row.tp or 1),
        sequence_parallel=np.array([float(_is_sequence_parallel(case)) for case in cases]),
        pp=_array(cases, lambda row: row.pp or 1),
        virtual=_array(cases, virtual),
        cp=cp,
        ep=_array(cases, lambda row: row.ep or 1),
        etp=_array(cases, _etp),
        dp=dp,
        shard=np.minimum(dp * cp, _array(cases, lambda row: row.shard_ranks or math.inf)),
        zero=_array(cases, lambda row: engine.unstated_zero if row.zero is None else row.zero),
        micro_batch=micro_batch,
        micro_batches=np.maximum(batch / (dp * micro_batch), 1.0),
        recompute=_array(cases, recompute),
    )


def _etp(row: Row) -> int:
    """Tensor ranks that split each expert: one unless stated. A dense model has no experts."""
    return min(row.etp or 1, row.tp or 1) if row.moe_experts else row.tp or 1
