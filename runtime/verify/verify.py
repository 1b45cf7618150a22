"""`verify`: the same seeded steps on one device and in parallel, compared tensor by tensor.

A plan with a precision has a bound: its parallel step is as near to float32 as the step on one device.

Three runs make the same steps on the same float32 weights:

    exact     one device, in float32 (the program with every cast to 16 bits replaced by a cast to float32)
    single    one device, in the precision: master weights in float32, blocks in 16 bits
    parallel  the ranks of the plan

The error of a tensor is ‖parallel - exact‖ / ‖exact‖. Weights whose gradient is rounding are compared by the reach of
AdamW, as in any verification. Its limit is `FACTOR` times the largest of three numbers: the
error of the single run in this tensor, the error of the single run in the whole quantity (such as all gradients), and
the machine epsilon of the precision. A limit is at most `LARGEST_LIMIT`, except for a tensor that is zero in exact
arithmetic (`autopar.runtime.verify.error_metrics`). Products of eight bits move single gradients by a tenth, so there
the limit of a whole quantity may be `LARGEST_OF_EIGHT_BITS`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import hypot
from typing import Any

import torch

from autopar.errors import InputError, VerificationError
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.precision import EIGHT_BITS, compute_dtype, is_low
from autopar.ir.program import Program
from autopar.runtime.model.inputs import split_micro_batches
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.parameters.packed import by_model_parameter
from autopar.runtime.parameters.shown_tensor import whole_of
from autopar.runtime.verify.error_metrics import (
    DIFFERENT,
    LARGEST_LIMIT,
    NOISE_FACTOR,
    TOLERANCES,
    UNJUDGED,
    Quantity,
    TensorError,
    Tensors,
    is_open,
    measured_weights,
    size,
    size_of_all,
    tensor_errors,
    worst,
)
from autopar.runtime.verify.float64_program import promoted, without_attention_dropout
from autopar.runtime.verify.noise import Noise
from autopar.runtime.verify.reference import (
    EXAMPLE,
    LEARNING_RATE,
    MAX_NORM,
    Batch,
    Case,
    Steps,
    decides_alone,
    scaler_of,
    step_with,
)
from autopar.runtime.verify.shared_draws import SharedDraws

FACTOR = 2.0  # docs/precision.md has the measured ratios of the two errors
LARGEST_OF_EIGHT_BITS = 0.3

# of models that draw random numbers: their parallel step is compared with the single run
DIRECT_TOLERANCES = {"bf16": 5e-2, "fp16": 1e-2, "fp8": 0.2, "mxfp8": 0.2}
HOW_TO_JUDGE = "use float64, a larger batch, larger inputs, or fewer steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The compared quantities with their worst errors, and whether all are within tolerance."""

    plan: Plan
    quantities: tuple[Quantity, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(q.passed for q in self.quantities)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "world_size": self.plan.degrees.world_size,
            "plan": self.plan.to_dict(),
            "quantities": [q.to_dict() for q in self.quantities],
            "notes": list(self.notes),
        }


def this_ranks_part(
    program: Program, batch: Mapping[str, torch.Tensor], degrees: Any, coordinate: int
) -> dict[str, torch.Tensor]:
    """One data-parallel rank's part of a global batch: its chunk of every micro-batch, in micro-batch order."""
    pieces = split_micro_batches(program, batch, degrees.num_micro_batches)
    dims = {info.name: info.batch_dim for info in program.inputs if info.batch_dim is not None}
    mine = {n: torch.cat([p[n].chunk(degrees.dp, d)[coordinate] for p in pieces], d) for n, d in dims.items()}
    return {info.name: batch[info.name] for info in program.inputs} | mine


def parallel_steps(case: Case, plan: Plan, structured: Callable[[Batch], Any]) -> Steps:
    """The same steps under a plan on the ranks of the initialised world. Every rank gets whole tensors."""
    streams = lambda mesh: SharedDraws(plan.mesh, mesh.dims)  # noqa: E731
    program, example = case.program, case.example
    model = ParallelModel(program, plan, case.source, torch.device("cpu"), streams=streams)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    coordinate = model.rank_mesh.sample_ranks.coordinate
    steps, scaler = Steps(), scaler_of(plan.degrees)
    if example is not None:
        mine = this_ranks_part(program, example, plan.degrees, coordinate)
        steps.example = {"the loss": model.forward_backward(structured(mine)), **model.whole_gradients()}
        optimizer.zero_grad()
    for step, batch in enumerate(case.data):
        mine = this_ranks_part(program, batch, plan.degrees, coordinate)
        if step == 0 and decides_alone(program, plan.degrees):
            micro = split_micro_batches(program, mine, plan.degrees.num_micro_batches)[-1]
            out = model.evaluate(structured(micro))
            steps.outputs = {k: whole_of(v).detach() for k, v in out.items() if k != "loss"}
        steps.losses.append(model.forward_backward(structured(mine), scaler=scaler))
        if scaler is not None:
            scaler.unscale_(optimizer)
        if step == 0:
            steps.gradients = model.whole_gradients()
        steps.norms.append(model.clip_grad_norm_(MAX_NORM))
        step_with(scaler, optimizer)
    state = {n: whole_of(v).detach() for n, v in model.state_dict().items()}
    steps.weights = {n: state[n] for n, _ in by_model_parameter(program) if n in state}
    steps.buffers = {n: v for n, v in state.items() if n in program.updates}
    return steps


def merge_stages(parts: Sequence[Steps]) -> Steps:
    """The results of all ranks of a pipeline, together. Raises `VerificationError` if two ranks differ."""
    merged = parts[0]
    for part in parts[1:]:
        for kind in ("gradients", "outputs", "weights", "buffers", "example"):
            kept, other = getattr(merged, kind), getattr(part, kind)
            for name, value in other.items():
                if not torch.equal(kept.setdefault(name, value), value):
                    raise VerificationError(f"pipeline ranks hold different {kind} of {name!r}")
        for kind in ("losses", "norms"):
            if not all(torch.equal(a, b) for a, b in zip(getattr(merged, kind), getattr(part, kind), strict=True)):
                raise VerificationError(f"pipeline ranks have different {kind}")
    return merged


def quantities_of(
    reference: Steps,
    steps: Steps,
    moved: Sequence[Steps],
    judge: Callable[[str, Mapping[str, TensorError], Tensors], Quantity],
    dtype: torch.dtype | None = None,
) -> tuple[tuple[Quantity, ...], int]:
    """All quantities, and how many elements of weights were compared by the reach of AdamW."""
    reach = 2 * LEARNING_RATE * len(reference.losses)

    def compared(name: str, values: Callable[[Steps], Tensors], reach: float = 0.0) -> Quantity:
        exact, runs = values(reference), [values(run) for run in moved]
        return judge(name, tensor_errors(values(steps), exact, runs, dtype=dtype, reach=reach), exact)

    weights, by_reach = measured_weights(
        steps.weights,
        reference.weights,
        [run.weights for run in moved],
        reference.gradients,
        [run.gradients for run in moved],
        reach=reach,
    )
    quantities = [
        compared("loss", lambda steps: _numbered(steps.losses)),
        compared("outputs", lambda steps: steps.outputs),
        compared("gradients", lambda steps: steps.gradients),
        compared("clip norm", lambda steps: _numbered(steps.norms)),
        judge("parameters after AdamW", weights, reference.weights),
        compared(EXAMPLE, lambda steps: steps.example),
    ]
    if steps.buffers:  # buffers of the state dict
        held = steps.buffers.keys()
        changed = lambda steps: {name: value for name, value in steps.buffers.items() if name in held}  # noqa: E731
        quantities.append(compared("buffers changed in forward", changed, reach))
    return tuple(quantities), by_reach


def note_on_reach(by_reach: int, prefix: str = "") -> tuple[str, ...]:
    """A sentence about weights that were compared by the reach of AdamW."""
    what = f"{by_reach:,} {prefix}weights have a gradient that is only rounding, and were compared by lr·steps"
    return (what,) if by_reach else ()


def is_bounded(degrees: Degrees) -> bool:
    """Whether a plan computes in 16 bits beside float32 weights, so that its error has this bound."""
    return degrees.precision is not None and is_low(compute_dtype(degrees.precision))


def compare_with_float32(
    exact: Steps, single: Steps, steps: Steps, precision: str
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """The quantities of a verification by the bound, and notes."""
    bounded = partial(_bounded, precision)
    quantities, by_reach = quantities_of(exact, steps, [single], bounded, compute_dtype(precision))
    note = (
        f"the errors are those of {precision} against float32, and a limit is {FACTOR:g} × the error of one device in "
        f"{precision}"
    )
    return quantities, (note, *note_on_reach(by_reach))


def _bounded(precision: str, name: str, errors: Mapping[str, TensorError], exact: Tensors) -> Quantity:
    """The worst tensor of a quantity. The noise of a tensor is the error of the single run."""
    whole = size_of_all(exact)
    apart = hypot(*(e.noise * size(exact[n]) for n, e in errors.items() if exact[n].is_floating_point()))
    common = max(apart / whole if whole else 0.0, torch.finfo(compute_dtype(precision)).eps)
    largest = LARGEST_OF_EIGHT_BITS if precision in EIGHT_BITS else LARGEST_LIMIT
    # `Measured` multiplies the noise by a factor of its own
    scaled = {n: replace(e, noise=e.noise * FACTOR / NOISE_FACTOR) for n, e in errors.items()}
    return worst(name, scaled, min(FACTOR * common, largest))


def compare_with_noise(
    reference: Steps, steps: Steps, tolerance: float, noise: Noise, *, prefix: str = ""
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """Quantities by the error measure, and notes. Noise is measured only if a tensor is above the tolerance."""
    quantities, by_reach = noise.verdict(
        lambda moved: quantities_of(
            reference, steps, moved, lambda name, errors, _: worst(f"{prefix}{name}", errors, tolerance)
        ),
        lambda judged, num_runs: is_open(
            [(q.max_error, q.limit) for q in judged[0] if q.outcome == DIFFERENT], num_runs
        ),
    )
    return quantities, (*notes_on_noise(quantities), *note_on_reach(by_reach, prefix))


def notes_on_noise(quantities: Iterable[Quantity]) -> Iterator[str]:
    """One sentence for each quantity with tensors that passed because of their noise, or that cannot be judged."""
    for q in quantities:
        if q.outcome == UNJUDGED:
            yield (
                f"{q.name}: {q.num_unjudged} cannot be judged, because rounding alone changes them on one device (by "
                f"{q.unjudged_noise:.0%} of {q.where}); {HOW_TO_JUDGE}"
            )
        if q.num_noisy:
            yield (
                f"{q.name}: {q.num_noisy} above the tolerance, within {NOISE_FACTOR} × their measured noise on one "
                f"device (largest {q.largest_noise:.1e}, of {q.noisiest})"
            )


def _numbered(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"step {i}": value for i, value in enumerate(values)}


def check_dtype(dtype: str) -> torch.dtype:
    """The dtype of a verification. Raises `InputError` naming the choices."""
    if dtype not in TOLERANCES:
        raise InputError(f"dtype {dtype!r}: verification knows {sorted(TOLERANCES)}")
    kind: torch.dtype = getattr(torch, dtype)
    return kind


def in_dtype(program: Program, dtype: str) -> Program:
    """The program to verify: promoted for float64, as captured otherwise; dropout of attention is off."""
    quiet = without_attention_dropout(program)
    return promoted(quiet) if dtype == "float64" else quiet
