"""`verify`: start ranks, run the same seeded steps on one device and in parallel, compare everything.

`trace_model` starts the same ranks, runs a few steps of a model under a plan, and keeps one of them as a trace.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from autopar.capture.record.file import from_bytes, to_bytes
from autopar.commands.unmodified import against_module, module_steps, request_of, structured, tensors_of
from autopar.errors import CaptureError, InputError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.models.load import ResolvedModel, in_storage, is_factory, resolve_model
from autopar.planning.fixed import capture_for, check_plan, label_plan, wished_program
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.parameters.materialise import parameter_source, seeded
from autopar.runtime.parameters.state_loading import model_tensors
from autopar.runtime.profile.chrome_trace import TrackTime, check_writable, track_times
from autopar.runtime.verify.error_metrics import TOLERANCES, Quantity
from autopar.runtime.verify.float64_program import default_dtype, promoted, without_attention_dropout
from autopar.runtime.verify.noise import Change, Noise, samples_of
from autopar.runtime.verify.random_batches import notes_on_inputs, random_batches, values_that_decide
from autopar.runtime.verify.reference import (
    EXAMPLE,
    Batch,
    Case,
    Source,
    Steps,
    check_reference,
    constants_of,
    decides_alone,
    reference_steps,
)
from autopar.runtime.verify.shared_draws import draws_anything
from autopar.runtime.verify.verify import (
    DIRECT_TOLERANCES,
    Report,
    check_dtype,
    compare_with_float32,
    compare_with_noise,
    in_dtype,
    is_bounded,
    merge_stages,
    parallel_steps,
    this_ranks_part,
)

_Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank needs to build the same model and plan; plain data."""

    spec: str
    layers: int | None = None
    hidden: int | None = None
    seq_len: int | None = None
    batch: int | None = None  # sequences of one data-parallel rank in one step
    dtype: str = "float64"
    steps: int = 3  # of a verification
    seed: int = 0
    specialise: bool = False
    precision: str | None = None  # the plan's
    trains: str = "all"  # the parameters to train (`autopar.ir.trained`)


def resolve_job(job: Job) -> ResolvedModel:
    """The model, with equal random weights in every process. A check in float64 takes float32 weights."""
    storage = "float32" if job.dtype == "float64" else job.dtype
    sizes: dict[str, Any] = {name: getattr(job, name) for name in ("layers", "hidden", "seq_len", "batch")}
    build = partial(resolve_model, job.spec, **sizes, trains=job.trains)
    with seeded(job.seed):
        if not is_factory(job.spec):
            return build(dtype=storage)
        resolved = build()
        if job.precision is not None:
            return resolved
        dtypes = {p.dtype for p in resolved.model.parameters() if p.is_floating_point()}
        if job.dtype == "float64" and dtypes == {torch.float64}:
            return resolved
        cast = in_storage(resolved, getattr(torch, storage))
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return cast if names in ([], [storage]) else replace(cast, notes=(_note_on_cast(names, storage),))


def _note_on_cast(names: Sequence[str], storage: str) -> str:
    remedy = f"give the dtype {names[0]}, as the plan has it" if names[0] in TOLERANCES else f"plan a {storage} model"
    return f"the factory makes {' and '.join(names)} weights, and this check takes {storage} ones: {remedy}"


def verify(
    spec: str,
    *,
    world_size: int,
    degrees: Mapping[str, Any] | None = None,
    plan: Path | str | None = None,
    on_progress: _Progress = lambda text: None,
    ranks: Ranks | None = None,
    **options: Any,
) -> Report:
    """Verify a model under degrees, or a plan file, on gloo ranks, or on `ranks`. `options` are fields of `Job`."""
    started = time.monotonic()
    named = Plan.load(plan).degrees if plan is not None else degrees_from(degrees_from_wish(degrees), "options")
    precision = named.precision
    job = Job(spec=spec, precision=precision, **options)
    dtype = _dtype_beside(precision, job.dtype)
    job = replace(job, dtype=dtype)
    model, program, decided = decide_plan(job, world_size, degrees, plan, on_progress)
    on_progress("single-device steps")
    checked = in_dtype(program, dtype)
    source = parameter_source(model.model, seed=job.seed)
    given = values_that_decide(checked, tensors_of(model))
    constants = constants_of(checked, source)
    data = random_batches(checked, decided.degrees, job.steps, job.seed, given, constants)
    example = example_batch(model, checked, decided.degrees, constants)
    was_quietened = without_attention_dropout(program) is not program
    case = Case(program, source, data, decided.degrees, example)
    draws = draws_anything(program)
    captured: tuple[Quantity, ...] = ()
    captured_notes: tuple[str, ...] = ()
    with default_dtype(torch.float64 if dtype == "float64" else None):
        try:
            reference = reference_steps(replace(case, program=checked))
        except Exception:
            module_steps(model, case)  # an error is the unmodified module's, if that fails too
            raise
        check_reference(reference)
        if not all(bool(value.isfinite().all()) for value in reference.example.values()):
            case, reference.example = replace(case, example=None), {}
            captured_notes = ("the example inputs give no finite gradients on one device, and are left out",)
    checked_case = replace(case, program=checked)
    exact = in_float32(checked_case) if is_bounded(decided.degrees) else reference
    if not draws:
        captured, more = against_module(model, case, exact)
        captured_notes += more
    on_progress(f"the same steps on {world_size} ranks")
    ran = on_ranks(job, decided, case, weights_of(model.model, source), ranks)
    if precision is not None and is_bounded(decided.degrees) and not draws:
        quantities, notes = compare_with_float32(exact, reference, ran, precision)
    else:  # random numbers of 16 bits are other numbers than those of float32
        tolerance = TOLERANCES[dtype] if not is_bounded(decided.degrees) else DIRECT_TOLERANCES[precision or ""]
        quantities, notes = compare_with_noise(reference, ran, tolerance, noise_of(checked_case, reference))
    notes += captured_notes + notes_on_inputs(checked, constants)
    if checked.outputs and not decides_alone(checked, decided.degrees):
        notes += ("outputs were not compared, because one micro-batch alone may take another branch than its step",)
    if draws:
        notes += ("both sides drew the same random numbers, and the unmodified model was not compared",)
    if was_quietened:
        notes += ("the dropout of scaled_dot_product_attention was off on both sides",)
    return Report(
        plan=decided,
        quantities=(*(q for q in quantities if q.name != EXAMPLE or q.where), *captured),
        notes=notes,
        seconds=time.monotonic() - started,
    )


def on_ranks(job: Job, plan: Plan, case: Case, weights: bytes, ranks: Ranks | None) -> Steps:
    """The steps on ranks: on `ranks`, or on a world that ends here."""
    with nullcontext(ranks) if ranks is not None else Ranks(plan.degrees.world_size) as world:
        arguments = (job, plan, to_bytes(case.program), case.data, case.example, weights)
        describe = partial(rank_name, plan.degrees)
        parts: list[Steps | None] = world.run("autopar.commands.verify:rank_steps", *arguments, describe=describe)
    return merge_stages([part for part in parts if part is not None])


def _dtype_beside(precision: str | None, dtype: str) -> str:
    """The dtype of the weights of a check. A plan with a precision has float32 weights."""
    check_dtype(dtype)
    if precision is None:
        return dtype
    if dtype not in ("float64", "float32"):
        raise InputError(
            f"dtype {dtype!r} beside precision {precision!r}: the precision decides the dtypes; leave one of them out"
        )
    return "float32"


def in_float32(case: Case) -> Steps:
    """The steps of a program on one device if every 16-bit value is float32."""

    def wide(batch: Batch) -> Batch:
        return {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}

    plain = replace(case.degrees, precision=None, reduce_dtype=None)
    program = promoted(case.program, torch.float32)
    return reference_steps(replace(case.with_batches(wide), program=program, degrees=plain))


def example_batch(
    model: ResolvedModel, program: Program, degrees: Degrees, constants: Mapping[str, torch.Tensor]
) -> Batch | None:
    """The global batch that repeats the rows of a factory's example inputs. None if they have no values."""
    given = tensors_of(model)
    if model.kind != "factory" or any(value.is_meta for value in given.values()):
        return None
    (batch,) = random_batches(program, degrees, 1, 0, given, constants)
    return batch


def decide_plan(
    job: Job,
    world_size: int,
    degrees: Mapping[str, Any] | None,
    plan: Path | str | None,
    on_progress: _Progress,
) -> tuple[ResolvedModel, Program, Plan]:
    """The model of a job, its program, and the plan of a file or of degrees. Raises `PlanError` if it does not fit."""
    on_progress("capturing the model")
    model = resolve_job(job)
    request = request_of(model, specialise=job.specialise)
    local_batch, _ = request.sizes
    if plan is not None:
        decided = Plan.load(plan)
        try:
            program = capture_for(request, decided.degrees)
            check_plan(decided, program, world_size, None if job.batch is None else local_batch)
        except CaptureError as error:
            if error.option != "specialise":
                raise
            more = "a plan file does not hold this option, so give it again if the plan was made with it"
            raise CaptureError(f"{error}; {more}", option=error.option) from error
        except PlanError as error:
            if not (model.notes and is_factory(job.spec)):
                raise
            raise PlanError("; ".join([str(error), *model.notes])) from error
        return model, program, decided
    wanted, program = wished_program(request, degrees_from_wish(degrees), world_size, local_batch)
    on_progress("choosing labels")
    return model, program, label_plan(program, ClusterSpec.preset(f"{world_size}xcpu"), wanted, model.name)


def degrees_from_wish(wish: Mapping[str, Any] | None) -> dict[str, Any]:
    """Degrees that were asked for, without the ones left open."""
    given = {k: v for k, v in dict(wish or {}).items() if v is not None}
    degrees_from(given, "options")
    return given


def rank_name(degrees: Degrees, rank: int) -> str:
    """A rank and the pipeline stages that it holds: ``rank 3 (pipeline stages 1 and 2)``."""
    at = degrees.coordinate("pp", rank)
    held = [str(stage) for stage in range(degrees.num_stages) if degrees.rank_of_stage(stage) == at]
    stages = f" (pipeline stage{'s' * (len(held) > 1)} {' and '.join(held)})" if degrees.pp > 1 else ""
    return f"rank {rank}{stages}"


@lru_cache(maxsize=4)
def _resolved(job: Job) -> ResolvedModel:
    """A rank's model; a world that verifies many plans of one model builds it once."""
    return resolve_job(job)


def built_on_rank(job: Job, plan: Plan, program: bytes) -> tuple[ResolvedModel, Program]:
    """The model of a job on meta and its captured program, on one rank."""
    model = _resolved(job)  # first: it may register operators that the program has
    captured = from_bytes(program)
    check_plan(plan, captured, plan.degrees.world_size)
    return model, captured


def rank_steps(
    rank: int,
    job: Job,
    plan: Plan,
    program_bytes: bytes,
    data: list[dict[str, torch.Tensor]],
    example: Batch | None,
    weights: bytes,
) -> Steps | None:
    """The work of one rank: build the model's structure and run the steps. One rank of each stage returns them."""
    model, program = built_on_rank(job, plan, program_bytes)
    source = source_of_weights(model.model, weights)
    with default_dtype(torch.float64 if job.dtype == "float64" else None):
        case = Case(in_dtype(program, job.dtype), source, data, plan.degrees, example)
        steps = parallel_steps(case, plan, partial(structured, model))
    is_first = not any(plan.degrees.coordinate(name, rank) for name in ("dp", "tp"))
    return steps if is_first else None


def weights_of(model: torch.nn.Module, source: Source) -> bytes:
    """The weights and buffers of this process, for all ranks: another process may compute other last bits."""
    values = {name: source(name).contiguous() for name in model_tensors(model)}
    packed: bytes = save({name: torch.view_as_real(v) if v.is_complex() else v.clone() for name, v in values.items()})
    return packed


def source_of_weights(model: torch.nn.Module, weights: bytes) -> Source:
    """The values of `weights_of`, by any name of a tensor in the model."""
    values, slots = load(weights), {name: slot for slot in model_tensors(model).values() for name in slot.names}

    def source(name: str) -> torch.Tensor:
        value = values[slots[name].name]
        return torch.view_as_complex(value) if slots[name].tensor.is_complex() else value

    return source


def noise_of(case: Case, reference: Steps) -> Noise:
    """The noise of the reference's steps."""
    program, count = case.program, case.degrees.num_micro_batches
    dtype = torch.float64 if any(p.dtype is torch.float64 for p in program.every_parameter.values()) else None

    def run(change: Change) -> Steps:
        changed = case.with_batches(lambda batch: change.batch(program, batch, count))
        with default_dtype(dtype):
            return reference_steps(replace(changed, source=change.source(case.source, dtype)))

    return Noise(run, reference, 0 if draws_anything(program) else samples_of(program, case.data[0], count))


# ---- a trace of one step ----


def trace_model(
    job: Job,
    path: str | os.PathLike[str],
    *,
    world_size: int,
    degrees: Mapping[str, Any] | None = None,
    plan: Path | str | None = None,
    on_progress: _Progress = lambda text: None,
) -> tuple[Plan, list[TrackTime]]:
    """Write a trace of one step on `world_size` gloo ranks of this machine; returns the plan and the trace's tracks."""
    check_writable(path)
    check_dtype(job.dtype)
    model, program, decided = decide_plan(job, world_size, degrees, plan, on_progress)
    on_progress(f"three steps on {world_size} ranks")
    with Ranks(world_size, checked=False) as world:
        target, given = "autopar.commands.verify:traced_on_rank", values_that_decide(program, tensors_of(model))
        world.run(target, job, decided, to_bytes(program), given, str(Path(path).absolute()))
    return decided, track_times(json.loads(Path(path).read_text()))


def traced_on_rank(
    rank: int, job: Job, plan: Plan, program_bytes: bytes, given: Mapping[str, torch.Tensor], path: str
) -> None:
    """The work of one rank."""
    model, program = built_on_rank(job, plan, program_bytes)
    source = parameter_source(model.model, seed=job.seed)
    parallel = ParallelModel(program, plan, source, torch.device("cpu"), seed=job.seed)
    (batch,) = random_batches(program, plan.degrees, 1, job.seed, given, constants_of(program, source))
    inputs = this_ranks_part(program, batch, plan.degrees, parallel.rank_mesh.sample_ranks.coordinate)
    parallel.trace(path, structured(model, inputs))
