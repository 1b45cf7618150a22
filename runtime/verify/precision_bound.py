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

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
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
    size,
    size_of_all,
    worst,
)
from autopar.runtime.verify.reference import Steps
from autopar.runtime.verify.verify import note_on_reach, quantities_of

FACTOR = 2.0  # docs/precision.md has the measured ratios of the two errors
LARGEST_OF_EIGHT_BITS = 0.3

# of models that draw random numbers: their parallel step is compared with the single run
DIRECT_TOLERANCES = {"bf16": 5e-2, "fp16": 1e-2, "fp8": 0.2, "mxfp8": 0.2}


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


def _bounded(precision: str, name: str, errors: Mapping[str, Measured], exact: Tensors) -> Quantity:
    """The worst tensor of a quantity. The noise of a tensor is the error of the single run."""
    whole = size_of_all(exact)
    apart = hypot(*(e.noise * size(exact[n]) for n, e in errors.items() if exact[n].is_floating_point()))
    common = max(apart / whole if whole else 0.0, torch.finfo(compute_dtype(precision)).eps)
    largest = LARGEST_OF_EIGHT_BITS if precision in EIGHT_BITS else LARGEST_LIMIT
    # `Measured` multiplies the noise by a factor of its own
    scaled = {n: replace(e, noise=e.noise * FACTOR / NOISE_FACTOR) for n, e in errors.items()}
    return worst(name, scaled, min(FACTOR * common, largest))
