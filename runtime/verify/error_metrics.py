"""The error measure of equivalence (docs/semantics.md, S8).

The error of a tensor is ‖difference‖ / ‖reference‖. A tensor differs if its error is above its limit, the larger of
the tolerance and `NOISE_FACTOR` × its noise. The noise is the tensor's change on one device if only rounding
changes (`autopar.runtime.verify.noise`). Some tensors are zero in exact arithmetic, such as gradients of biases before
a normalisation. Their reference is rounding itself, so they have an error of about 1, and a noise of about 1.

A reference that changes wildly from run to run would hide every difference. Therefore noise explains no error above
`LARGEST_LIMIT`, except in a tensor that is zero in exact arithmetic: its norm and its noise are at most
`ZERO_EPSILONS` × the machine epsilon × the norm of all tensors of its quantity, such as all gradients. In float64 they
are at most `ZERO_PART` × this norm, because a root of nearly zero enlarges rounding. A buffer behind
optimizer steps may also be zero up to the reach of the optimizer. Any other tensor with an error above `LARGEST_LIMIT`
and within its noise cannot be judged, and does not pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import hypot, inf, isfinite, isnan, sqrt
from typing import Any

import torch

from autopar.ir.precision import as_float64

TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 5e-2}
NOISE_FACTOR = 8  # docs/semantics.md has the measured ratios of error to noise
LARGEST_LIMIT = 0.1  # by noise; less than one of eight summands of a gradient
ZERO_PART = 1e-9  # of a quantity in float64: roots of distances that are zero enlarge rounding
ZERO_EPSILONS = 10  # measured: tensors that are zero have at most 0.4 (docs/equivalence.md)
EQUAL, DIFFERENT, UNJUDGED = "equal", "different", "cannot be judged"
FAR = 1e4  # times its limit: more runs do not change the verdict on such an error
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """The error of one tensor, and its noise. Both are relative to the reference."""

    error: float
    noise: float = 0.0
    is_zero: bool = False

    def limit(self, tolerance: float) -> float:
        by_noise = NOISE_FACTOR * self.noise
        return max(tolerance, by_noise if self.is_zero else min(by_noise, LARGEST_LIMIT))

    def passes(self, tolerance: float) -> bool:
        return self.error <= self.limit(tolerance)  # false for NaN

    def outcome(self, tolerance: float) -> str:
        """`EQUAL`, `DIFFERENT`, or `UNJUDGED` if rounding alone makes as large an error on one device."""
        if self.passes(tolerance):
            return EQUAL
        return UNJUDGED if self.error <= NOISE_FACTOR * self.noise else DIFFERENT

    def ratio(self, tolerance: float) -> float:
        """The error divided by its limit. Infinite for NaN."""
        return inf if isnan(self.error) else self.error / self.limit(tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """The worst tensor of one quantity, and how many pass by their noise or cannot be judged."""

    name: str
    max_error: float
    where: str
    tolerance: float
    limit: float
    num_noisy: int = 0
    largest_noise: float = 0.0
    noisiest: str = ""
    num_unjudged: int = 0
    unjudged_noise: float = 0.0

    @property
    def outcome(self) -> str:
        """`EQUAL`, `DIFFERENT` or `UNJUDGED`."""
        return EQUAL if self.passed else UNJUDGED if self.unjudged_noise else DIFFERENT

    @property
    def passed(self) -> bool:
        return self.max_error <= self.limit  # false for NaN

    @property
    def scaled_error(self) -> float:
        """The worst error as a part of the tolerance: an error of half its limit is half of the tolerance."""
        return self.max_error * self.tolerance / self.limit

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self) | {"outcome": self.outcome, "passed": self.passed}
        return {name: value for name, value in content.items() if name not in ("noisiest", "unjudged_noise")}


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference. Equal elements count 0, also if both are infinite or not a number."""
    if value.shape != reference.shape:
        return inf
    a, b = as_float64(value), as_float64(reference)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, torch.zeros_like(a), a - b).norm())


def size(reference: torch.Tensor) -> float:
    """The norm of a tensor without its elements that are not finite."""
    value = as_float64(reference)
    return float(torch.where(value.isfinite(), value, torch.zeros_like(value)).norm())


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error of a tensor: NaN if only one is NaN; infinite for other shapes, and to a reference of zeros."""
    return _relative(distance(value, reference), size(reference))


def size_of_all(reference: Tensors) -> float:
    """The norm of all floating-point tensors of a quantity."""
    return hypot(*(size(value) for value in reference.values() if value.dtype.is_floating_point or value.is_complex()))


def size_of_zero(value: torch.Tensor, whole: float, dtype: torch.dtype | None = None, reach: float = 0.0) -> float:
    """The largest norm of a tensor that is zero in exact arithmetic, in a quantity of the norm `whole`."""
    dtype = dtype or (value.dtype if value.is_floating_point() or value.is_complex() else torch.float64)
    part = max(ZERO_EPSILONS * torch.finfo(dtype).eps, ZERO_PART if dtype == torch.float64 else 0.0)
    return part * whole + reach * sqrt(value.numel())


def tensor_errors(
    values: Tensors,
    reference: Tensors,
    moved: Sequence[Tensors],
    *,
    dtype: torch.dtype | None = None,
    reach: float = 0.0,
) -> dict[str, TensorError]:
    """Error and noise of every tensor of one quantity, such as all gradients."""
    whole = size_of_all(reference)
    return {
        name: measured_one(
            values.get(name),
            value,
            [run[name] for run in moved if name in run],
            size_of_zero(value, whole, dtype, reach),
        )
        for name, value in reference.items()
    }


def measured_one(
    value: torch.Tensor | None,
    reference: torch.Tensor,
    moved: Sequence[torch.Tensor],
    zero: float = 0.0,
) -> TensorError:
    """Error and noise of one tensor. A missing tensor has an infinite error. `zero` is the result of `size_of_zero`."""
    if value is None:
        return TensorError(error=inf)
    noise = max((d for d in (distance(m, reference) for m in moved) if isfinite(d)), default=0.0)
    norm = size(reference)
    base = norm or noise  # a reference that is zero by chance
    return TensorError(
        error=_relative(distance(value, reference), base),
        noise=_relative(noise, base),
        is_zero=max(norm, noise) <= zero,
    )


def measured_weights(
    values: Tensors,
    reference: Tensors,
    moved: Sequence[Tensors],
    gradients: Tensors,
    moved_gradients: Sequence[Tensors],
    reach: float,
) -> tuple[dict[str, TensorError], int]:
    """Errors of weights, and how many elements were compared by `reach`, since rounding moves them by that."""
    errors, by_reach, whole = {}, 0, size_of_all(reference)
    for name, value in reference.items():
        mine, runs = values.get(name), [run[name] for run in moved if name in run]
        shifts = [run[name] - gradients[name] for run in moved_gradients if name in run and name in gradients]
        if mine is None or mine.shape != value.shape or not shifts:
            errors[name] = measured_one(mine, value, runs, size_of_zero(value, whole))
            continue
        tiny = noisy_elements(gradients[name], shifts)
        by_reach += int(tiny.sum())
        kept = [torch.where(tiny, value, tensor) for tensor in (mine, *runs)]
        result = measured_one(kept[0], value, kept[1:], size_of_zero(value, whole))
        is_far = bool(((as_float64(mine) - as_float64(value)).abs()[tiny] > reach).any())
        errors[name] = TensorError(error=inf) if is_far else result
    return errors, by_reach


def noisy_elements(gradient: torch.Tensor, shifts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which elements of a gradient are within `NOISE_FACTOR` × their noise, which is at least the mean noise."""
    every = torch.stack([as_float64(shift).abs() for shift in shifts])
    mean = every.square().mean().sqrt()
    return as_float64(gradient).abs() <= NOISE_FACTOR * torch.maximum(every.amax(0), mean)


def is_open(failed: Iterable[tuple[float, float]], num_runs: int) -> bool:
    """Whether another noise run can change the verdict on some failed errors and limits."""
    pairs = list(failed)
    return bool(pairs) and (num_runs < 2 or all(error < FAR * limit for error, limit in pairs))


def may_change(errors: Iterable[TensorError], tolerance: float, num_runs: int) -> bool:
    """Whether another noise run can change the verdict on some tensors. More noise judges no tensor."""
    failed = [m for m in errors if m.outcome(tolerance) == DIFFERENT]
    return is_open([(m.error, m.limit(tolerance)) for m in failed], num_runs)


def _relative(value: float, base: float) -> float:
    return value / base if base else (inf if value else 0.0)


def worst(name: str, errors: Mapping[str, TensorError], tolerance: float) -> Quantity:
    """The entry whose error is the largest part of its limit. NaN counts as worst."""
    if not errors:
        return Quantity(name=name, max_error=0.0, where="", tolerance=tolerance, limit=tolerance)
    outcomes = {name: error.outcome(tolerance) for name, error in errors.items()}
    where = max(errors, key=lambda k: (outcomes[k] == DIFFERENT, errors[k].ratio(tolerance)))
    noisy = {k: m for k, m in errors.items() if m.error > tolerance and m.passes(tolerance)}
    noisiest = max(noisy, key=lambda k: noisy[k].noise, default="")
    return Quantity(
        name=name,
        max_error=errors[where].error,
        where=where,
        tolerance=tolerance,
        limit=errors[where].limit(tolerance),
        num_noisy=len(noisy),
        largest_noise=noisy[noisiest].noise if noisy else 0.0,
        noisiest=noisiest,
        num_unjudged=sum(outcome == UNJUDGED for outcome in outcomes.values()),
        unjudged_noise=errors[where].noise if outcomes[where] == UNJUDGED else 0.0,
    )
