"""The bound of a plan with a precision: the parallel step is as near to float32 as the step on one device.

Three runs make the same steps on the same float32 weights:

    exact     one device, in float32 (the program with every cast to 16 bits replaced by a cast to float32)
    single    one device, in the precision: master weights in float32, blocks in 16 bits
    parallel  the ranks of the plan

The error of a tensor is ‖parallel - exact‖ / ‖exact‖. Its limit is `FACTOR` times the largest of three numbers: the
error of the single run in this tensor, the error of the single run in the whole quantity (such as all gradients), and
the machine epsilon of the precision. A limit is at most `LARGEST_LIMIT`, except for a tensor that is zero in exact
arithmetic (`autopar.runtime.verify.error_metrics`).
"""

from collections.abc import Callable, Sequence
from math import hypot

import torch

from autopar.ir.degrees import Degrees
from autopar.ir.precision import compute_dtype, is_low
from autopar.runtime.verify.error_metrics import (
    LARGEST_LIMIT,
    NOISE_FACTOR,
    Measured,
    Quantity,
    Tensors,
    distance,
    error,
    size,
    size_of_all,
    size_of_zero,
    worst,
)
from autopar.runtime.verify.reference import LEARNING_RATE, Steps

FACTOR = 2.0  # docs/precision.md has the measured ratios of the two errors


# of models that draw random numbers: their parallel step is compared with the single run
DIRECT_TOLERANCES = {"bf16": 5e-2, "fp16": 1e-2}


def note_on_bound(precision: str) -> str:
    """What the limits of the comparison mean."""
    return (
        f"the errors are those of {precision} against float32, and a limit is {FACTOR:g} × the error of one device in "
        f"{precision}"
    )


def is_bounded(degrees: Degrees) -> bool:
    """Whether a plan computes in 16 bits beside float32 weights, so that its error has this bound."""
    return degrees.precision is not None and is_low(compute_dtype(degrees.precision))


def compare_with_float32(exact: Steps, single: Steps, found: Steps, precision: str) -> tuple[Quantity, ...]:
    """The quantities of a verification by the bound."""
    dtype = compute_dtype(precision)
    reach = 2 * LEARNING_RATE * len(exact.losses)

    def compared(name: str, values: Callable[[Steps], Tensors], reach: float = 0.0) -> Quantity:
        return _compared(name, values(exact), values(single), values(found), dtype, reach)

    quantities = [
        compared("loss", lambda steps: _numbered(steps.losses)),
        compared("outputs", lambda steps: steps.outputs),
        compared("gradients", lambda steps: steps.gradients),
        compared("clip norm", lambda steps: _numbered(steps.norms)),
        compared("parameters after AdamW", lambda steps: steps.weights, reach),
    ]
    if found.buffers:
        held = found.buffers.keys()
        changed = lambda steps: {n: v for n, v in steps.buffers.items() if n in held}  # noqa: E731
        quantities.append(compared("buffers changed in forward", changed, reach))
    return tuple(quantities)


def _compared(
    name: str, exact: Tensors, single: Tensors, found: Tensors, dtype: torch.dtype, reach: float
) -> Quantity:
    whole = size_of_all(exact)
    floats = {n: v for n, v in exact.items() if v.is_floating_point()}
    apart = hypot(*(distance(single[n], v) for n, v in floats.items())) if floats else 0.0
    common = max(apart / whole if whole else 0.0, torch.finfo(dtype).eps)
    errors = {}
    for key, value in exact.items():
        own = error(single[key], value)
        is_zero = size(value) + distance(single[key], value) <= size_of_zero(value, whole, dtype, reach)
        # `Measured` multiplies the noise by a factor of its own
        noise = own * FACTOR / NOISE_FACTOR
        given = error(found[key], value) if key in found else float("inf")
        errors[key] = Measured(error=given, noise=noise, is_zero=is_zero)
    return worst(name, errors, min(FACTOR * common, LARGEST_LIMIT))


def _numbered(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"step {i}": value for i, value in enumerate(values)}
