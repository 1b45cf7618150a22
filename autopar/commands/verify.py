"""`verify`: start ranks, run the same seeded steps on one device and in parallel, compare everything.

The command line's `autopar verify` and tests call `verify`; steps and comparison are in
`autopar.runtime.verify.verify`.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from autopar._torch.private import convert_tensors
from autopar.capture.export.export import Inputs, input_names, inputs_of_values, outputs_of
from autopar.capture.program import batch_and_sequence
from autopar.capture.record.pickled import from_bytes, to_bytes
from autopar.errors import CaptureError, InputError, PlanError, VerificationError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.plan import Plan
from autopar.ir.precision import as_float64, like_kind
from autopar.ir.program import Program
from autopar.models.load import ResolvedModel, in_storage, is_factory, resolve_model
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for, check_plan, label_plan
from autopar.runtime.codegen.passes.attention_dropout import without_attention_dropout
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.model.inputs import split_micro_batches
from autopar.runtime.parameters.materialise import parameter_source, seeded
from autopar.runtime.verify.error_metrics import (
    TOLERANCES,
    Measured,
    Quantity,
    Tensors,
    may_change,
    measured,
    worst,
)
from autopar.runtime.verify.float64_program import casts_lower, promoted
from autopar.runtime.verify.noise import Change, Noise, samples_of
from autopar.runtime.verify.precision_bound import (
    DIRECT_TOLERANCES,
    compare_with_float32,
    is_bounded,
)
from autopar.runtime.verify.random_batches import notes_on_inputs, random_batches, values_that_decide
from autopar.runtime.verify.reference import Batch, Source, Steps, check_reference, constants_of, reference_steps
from autopar.runtime.verify.shared_draws import draws_anything
from autopar.runtime.verify.verify import (
    Report,
    check_dtype,
    compare_with_noise,
    in_dtype,
    merge_stages,
    notes_on_noise,
    parallel_steps,
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
    dtype: str
    steps: int = 1
    seed: int = 0
    specialise: bool = False
    precision: str | None = None  # the plan's


def resolve(job: Job) -> ResolvedModel:
    """The model, with the same random weights in every process where a factory draws them.

    A check in float64 takes float32 weights, except of a factory whose weights are float64.
    """
    storage = "float32" if job.dtype == "float64" else job.dtype
    made = partial(resolve_model, job.spec, layers=job.layers, hidden=job.hidden, seq_len=job.seq_len, batch=job.batch)
    with seeded(job.seed):
        if not is_factory(job.spec):
            return made(dtype=storage)
        found = made()
        if job.precision is not None:
            return found
        own = {p.dtype for p in found.model.parameters() if p.is_floating_point()}
        if job.dtype == "float64" and own == {torch.float64}:
            return found
        cast = in_storage(found, getattr(torch, storage))
        names = sorted(str(dtype).removeprefix("torch.") for dtype in own)
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
    layers: int | None = None,
    hidden: int | None = None,
    seq_len: int | None = None,
    batch: int | None = None,
    dtype: str = "float64",
    steps: int = 3,
    seed: int = 0,
    specialise: bool = False,
    on_progress: _Progress = lambda text: None,
    ranks: Ranks | None = None,
) -> Report:
    """Verify a model under degrees, or a plan file, on `world_size` gloo ranks of this machine.

    `batch` is the sequences of one data-parallel rank in one step. `ranks` reuses a world. With `specialise`, branches
    on inputs are captured as the example inputs take them, and the inputs that decide keep their values.

    Raises `InputError` or `PlanError` on bad input before any rank starts, and `RankError` where a rank fails.
    """
    started = time.monotonic()
    precision = _precision_of(degrees, plan)
    dtype = _dtype_beside(precision, dtype)
    job = Job(
        spec=spec,
        layers=layers,
        hidden=hidden,
        seq_len=seq_len,
        batch=batch,
        dtype=dtype,
        steps=steps,
        seed=seed,
        specialise=specialise,
        precision=precision,
    )
    model, program, decided = decide(job, world_size, degrees, plan, on_progress)
    on_progress("single-device steps")
    checked = in_dtype(program, dtype)
    source = parameter_source(model.model, state=None, seed=seed, dtype=None)
    given = values_that_decide(checked, tensors_of(model))
    constants = constants_of(checked, source)
    data = random_batches(checked, decided.degrees, steps, seed, given, constants)
    reference = reference_steps(checked, source, data, decided.degrees)
    check_reference(reference)
    exact = in_float32(checked, source, data, decided.degrees) if is_bounded(decided.degrees) else reference
    _, was_quietened = without_attention_dropout(program)
    draws = draws_anything(program)
    captured: tuple[Quantity, ...] = ()
    captured_notes: tuple[str, ...] = ()
    count = decided.degrees.num_micro_batches
    if not draws and (count == 1 or decided.degrees.per_micro_batch):
        micro_batches = split_micro_batches(program, data[0], count)
        captured, captured_notes = against_model(model, program, source, micro_batches, exact)
    on_progress(f"the same steps on {world_size} ranks")
    with nullcontext(ranks) if ranks is not None else Ranks(world_size) as world:
        describe = partial(rank_name, decided.degrees)
        target, arguments = "autopar.commands.verify:rank_steps", (job, decided, to_bytes(program), given)
        parts: list[Steps | None] = world.run(target, *arguments, describe=describe)
    found = merge_stages([part for part in parts if part is not None])
    if precision is not None and is_bounded(decided.degrees) and not draws:
        quantities, notes = compare_with_float32(exact, reference, found, precision)
    else:  # random numbers of 16 bits are other numbers than those of float32
        tolerance = TOLERANCES[dtype] if not is_bounded(decided.degrees) else DIRECT_TOLERANCES[precision or ""]
        noise = noise_of(checked, source, data, decided.degrees, reference)
        quantities, notes = compare_with_noise(reference, found, tolerance, noise)
    notes += captured_notes + notes_on_inputs(checked, constants)
    if draws:
        notes += ("both sides drew the same random numbers, and the unmodified model was not compared",)
    if was_quietened:
        notes += ("the dropout of scaled_dot_product_attention was off on both sides",)
    return Report(
        plan=decided,
        quantities=(*quantities, *captured),
        notes=notes,
        seconds=time.monotonic() - started,
    )


def _precision_of(degrees: Mapping[str, Any] | None, plan: Path | str | None) -> str | None:
    """The precision that the plan file or the degrees name."""
    named = Plan.load(plan).degrees if plan is not None else degrees_from(degrees_from_wish(degrees), "options")
    return named.precision


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


def in_float32(program: Program, source: Source, data: Sequence[Batch], degrees: Degrees) -> Steps:
    """The steps of a program on one device if every 16-bit value is float32."""
    wide = [{n: t.float() if t.is_floating_point() else t for n, t in batch.items()} for batch in data]
    plain = replace(degrees, precision=None, reduce_dtype=None)
    return reference_steps(promoted(program, torch.float32), source, wide, plain)


def decide(
    job: Job,
    world_size: int,
    degrees: Mapping[str, Any] | None,
    plan: Path | str | None,
    on_progress: _Progress,
) -> tuple[ResolvedModel, Program, Plan]:
    """The model of a job, its program, and the plan of a file or of degrees. Raises `PlanError` if it does not fit."""
    on_progress("capturing the model")
    model = resolve(job)
    capture = partial(capture_for, model.model, model.example_inputs, loss_fn=model.loss_fn, specialise=job.specialise)
    local_batch, _ = batch_and_sequence(tensors_of(model))
    if plan is not None:
        decided = Plan.load(plan)
        try:
            program = capture(decided.degrees)
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
    wanted = resolve_degrees(degrees_from_wish(degrees), world_size, local_batch)
    program = capture(wanted)
    on_progress("choosing labels")
    return model, program, label_plan(program, ClusterSpec.preset(f"{world_size}xcpu"), wanted, model.name)


def tensors_of(model: ResolvedModel) -> dict[str, torch.Tensor]:
    """The tensors of the example inputs by name."""
    return input_names(model.model, model.example_inputs, model.loss_fn)


def structured(model: ResolvedModel, batch: Batch) -> Inputs:
    """A batch of tensors by name, in the structure of the example inputs and with their values that are no tensors."""
    return inputs_of_values(model.model, model.example_inputs, batch, model.loss_fn)


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
    return resolve(job)


def built_on_rank(job: Job, plan: Plan, program: bytes) -> tuple[ResolvedModel, Program]:
    """The model of a job on meta and its captured program, on one rank."""
    model = _resolved(job)  # first: it may register operators that the program has
    captured = from_bytes(program)
    check_plan(plan, captured, plan.degrees.world_size)
    return model, captured


def rank_steps(rank: int, job: Job, plan: Plan, program_bytes: bytes, given: Tensors) -> Steps | None:
    """The work of one rank: build the model on meta and run the steps. One rank of each stage returns them."""
    model, program = built_on_rank(job, plan, program_bytes)
    checked = in_dtype(program, job.dtype)
    source = parameter_source(model.model, state=None, seed=job.seed, dtype=None)
    data = random_batches(checked, plan.degrees, job.steps, job.seed, given, constants_of(checked, source))
    found = parallel_steps(checked, plan, source, data, partial(structured, model))
    is_first = not any(plan.degrees.coordinate(name, rank) for name in ("dp", "tp"))
    return found if is_first else None


def noise_of(program: Program, source: Source, data: Sequence[Batch], degrees: Degrees, reference: Steps) -> Noise:
    """The noise of the reference's steps."""
    dtype = torch.float64 if any(p.dtype is torch.float64 for p in program.every_parameter.values()) else None
    count = degrees.num_micro_batches

    def run(change: Change) -> Steps:
        changed = [change.batch(program, batch, count) for batch in data]
        return reference_steps(program, change.source(source, dtype), changed, degrees)

    return Noise(run, reference, 0 if draws_anything(program) else samples_of(program, data[0], count))


def against_model(
    model: ResolvedModel, program: Program, source: Source, micro_batches: Sequence[Batch], reference: Steps
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """The promoted reference against the unmodified model, once: mean loss and gradients, and notes.

    The unmodified model runs in its own dtype, and the noise is measured on it. A float64 model may compute norms and
    rotary tables in float32, as `program` shows. The promoted reference does not, so the tolerance is float32's then.
    If a tensor cannot be judged there, or differs, the model runs in float64 for this tensor, unless the model fails in
    float64. At a kink of a function, such as a sample that lies exactly on a pixel, two dtypes have different
    gradients.
    """
    own = _dtype_of(model.model)
    coarsest = torch.float32 if own is torch.float64 and casts_lower(program) else own
    tolerance = TOLERANCES[str(coarsest).removeprefix("torch.")]
    errors_in = partial(_errors_of_model, model, source, micro_batches, reference, tolerance)
    losses, gradients = errors_in(in_float64=False)
    notes: tuple[str, ...] = ()
    doubtful = {n for errors in (losses, gradients) for n, m in errors.items() if not m.passes(tolerance)}
    if doubtful and own is not torch.float64:
        with contextlib.suppress(Exception):  # code of the user that may need its own dtype
            more = errors_in(in_float64=True)
            losses, gradients = (
                {name: again[name] if name in doubtful else one for name, one in errors.items()}
                for errors, again in zip((losses, gradients), more, strict=True)
            )
            notes = (f"{len(doubtful)} values of the unmodified model are compared in float64: {own} is too coarse",)
    quantities = worst("captured loss", losses, tolerance), worst("captured gradients", gradients, tolerance)
    return quantities, (*notes_on_noise(quantities), *notes)


def _errors_of_model(
    model: ResolvedModel,
    source: Source,
    micro_batches: Sequence[Batch],
    reference: Steps,
    tolerance: float,
    *,
    in_float64: bool,
) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Errors of loss and gradients of the unmodified model in its own dtype or in float64."""
    plain = step_of_model(model, source, micro_batches, in_float64=in_float64)
    missing = set(reference.gradients) ^ set(plain.gradients)
    if missing:
        raise VerificationError(
            f"the captured program and the model disagree on which gradients exist: {sorted(missing)}"
        )
    dtype = plain.losses[0].dtype

    def compare(moved: Sequence[Steps]) -> tuple[dict[str, Measured], dict[str, Measured]]:
        losses = _against(reference, plain, moved, lambda steps: {"loss": steps.losses[0]}, dtype)
        return losses, _against(reference, plain, moved, lambda steps: steps.gradients, dtype)

    run = partial(step_of_model, model, source, micro_batches, in_float64=in_float64)
    noise = Noise(run, plain, samples=0)
    return noise.verdict(
        compare, lambda errors, num_runs: may_change([*errors[0].values(), *errors[1].values()], tolerance, num_runs)
    )


def _against(
    reference: Steps, plain: Steps, moved: Sequence[Steps], values: Callable[[Steps], Tensors], dtype: torch.dtype
) -> dict[str, Measured]:
    """Errors of the unmodified model. Its runs are moved to the reference, because noise is a change."""
    exact, own = values(reference), values(plain)
    shifted = [
        {n: as_float64(exact[n]) + as_float64(v) - as_float64(own[n]) for n, v in values(run).items()} for run in moved
    ]
    return measured(own, exact, shifted, dtype=dtype)


def step_of_model(
    model: ResolvedModel,
    source: Source,
    micro_batches: Sequence[Batch],
    change: Change | None = None,
    *,
    in_float64: bool = False,
) -> Steps:
    """Loss and gradients of the unmodified model in its own dtype or in float64, perhaps with other rounding."""
    wanted = torch.float64 if in_float64 else None
    plain = materialised(model.model, source if change is None else change.source(source, wanted))
    plain = convert_tensors(plain, lambda t: t.to(like_kind(t.dtype, torch.float64))) if in_float64 else plain
    dtype = _dtype_of(plain)
    loss = torch.zeros((), dtype=dtype)
    for batch in micro_batches:
        typed = {k: v.to(like_kind(v.dtype, dtype)) for k, v in batch.items()}
        if change is not None:
            typed = {k: change.of(k, v) for k, v in typed.items()}
        loss = loss + _loss_of_copy(plain, model, typed) / len(micro_batches)
    loss.backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return Steps(losses=[loss.detach()], gradients=gradients)


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The dtype of a model's first parameter without imaginary parts."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _loss_of_copy(copied: torch.nn.Module, model: ResolvedModel, batch: Batch) -> torch.Tensor:
    """The loss of a copy of the model. Raises `InputError` if the copy fails: the model itself has been captured."""
    try:
        return outputs_of(copied, structured(model, batch), model.loss_fn)["loss"]
    except Exception as error:
        raise InputError(
            f"a deep copy of the model fails on one device: {type(error).__name__}: {error}; a function that the model "
            "keeps may hold the model itself, such as a lambda with `self`; make it a method"
        ) from error


def materialised(model: torch.nn.Module, source: Callable[[str], torch.Tensor]) -> torch.nn.Module:
    """A CPU copy of a meta model that holds the weights and buffers of `source`; tied parameters stay tied."""
    plain = copy.deepcopy(model)
    made: dict[int, torch.nn.Parameter] = {}
    for path, module in plain.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                value = source(prefix + name).detach().clone()
                made[id(parameter)] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, _ in module.named_buffers(recurse=False):
            module._buffers[name] = source(prefix + name).clone()
    return plain.train()
