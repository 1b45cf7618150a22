"""The bound of a plan with a precision: the parallel step is as near to float32 as the step on one device.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import hypot

import torch

from autopar.ir.degrees import Degrees
from autopar.ir.precision import EIGHT_BITS, compute_dtype, is_low
from autopar.runtime.verify.error_metrics import (
    LARGEST_LIMIT,
    NOISE_FACTOR,
    Measured,
    Quantity,
    Tensors,
    measured,
    measured_weights,
    size,
    size_of_all,
    worst,
)
from autopar.runtime.verify.reference import EXAMPLE, LEARNING_RATE, Steps

FACTOR = 2.0  # docs/precision.md has the measured ratios of the two errors
LARGEST_OF_EIGHT_BITS = 0.3

# of models that draw random numbers: their parallel step is compared with the single run
DIRECT_TOLERANCES = {"bf16": 5e-2, "fp16": 1e-2, "fp8": 0.2, "mxfp8": 0.2}


def note_on_bound(precision: str, by_reach: int) -> tuple[str, ...]:
    """What the limits of the comparison mean."""
    notes: tuple[str, ...] = (
        f"the errors are those of {precision} against float32, and a limit is {FACTOR:g} × the error of one device in "
        f"{precision}",
    )
    if by_reach:
        notes += (f"{by_reach:,} weights have a gradient that is only rounding, and were compared by lr·steps",)
    return notes


def is_bounded(degrees: Degrees) -> bool:
    """Whether a plan computes in 16 bits beside float32 weights, so that its error has this bound."""
    return degrees.precision is not None and is_low(compute_dtype(degrees.precision))


def compare_with_float32(
    exact: Steps, single: Steps, found: Steps, precision: str
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """The quantities of a verification by the bound, and notes."""
    dtype = compute_dtype(precision)
    reach = 2 * LEARNING_RATE * len(exact.losses)

    def compared(name: str, values: Callable[[Steps], Tensors], reach: float = 0.0) -> Quantity:
        errors = measured(values(found), values(exact), [values(single)], dtype=dtype, reach=reach)
        return _bounded(name, errors, values(exact), precision)

    weights, by_reach = measured_weights(
        found.weights, exact.weights, [single.weights], exact.gradients, [single.gradients], reach=reach
    )
    quantities = [
        compared("loss", lambda steps: _numbered(steps.losses)),
        compared("outputs", lambda steps: steps.outputs),
        compared("gradients", lambda steps: steps.gradients),
        compared("clip norm", lambda steps: _numbered(steps.norms)),
        _bounded("parameters after AdamW", weights, exact.weights, precision),
        compared(EXAMPLE, lambda steps: steps.example),
    ]
    if found.buffers:
        held = found.buffers.keys()
        changed = lambda steps: {n: v for n, v in steps.buffers.items() if n in held}  # noqa: E731
        quantities.append(compared("buffers changed in forward", changed, reach))
    return tuple(quantities), note_on_bound(precision, by_reach)


def _bounded(name: str, errors: Mapping[str, Measured], exact: Tensors, precision: str) -> Quantity:
    """The worst tensor of a quantity. The noise of a tensor is the error of the single run."""
    whole = size_of_all(exact)
    apart = hypot(*(e.noise * size(exact[n]) for n, e in errors.items() if exact[n].is_floating_point()))
    common = max(apart / whole if whole else 0.0, torch.finfo(compute_dtype(precision)).eps)
    largest = LARGEST_OF_EIGHT_BITS if precision in EIGHT_BITS else LARGEST_LIMIT
    # `Measured` multiplies the noise by a factor of its own
    scaled = {n: replace(e, noise=e.noise * FACTOR / NOISE_FACTOR) for n, e in errors.items()}
    return worst(name, scaled, min(FACTOR * common, largest))


def _numbered(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"step {i}": value for i, value in enumerate(values)}
