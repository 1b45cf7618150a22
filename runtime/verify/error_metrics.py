"""The error measure of equivalence (docs/semantics.md, S8).

The error of a tensor is ‖difference‖ / ‖reference‖. A tensor differs if its error is above its limit, the larger of
the tolerance and `NOISE_FACTOR` × its noise. The noise is the tensor's change on one device if only rounding
changes (`autopar.runtime.verify.noise`). Some tensors are zero in exact arithmetic, such as gradients of biases before
a normalisation. Their reference is rounding itself, so they have an error of about 1, and a noise of about 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Any

import torch

TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 5e-2}
NOISE_FACTOR = 8  # docs/semantics.md has the measured ratios of error to noise
FAR = 1e4  # times its limit: more runs do not change the verdict on such an error
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The error of one tensor, and its noise. Both are relative to the reference."""

    error: float
    noise: float = 0.0

    def limit(self, tolerance: float) -> float:
        return max(tolerance, NOISE_FACTOR * self.noise)

    def passes(self, tolerance: float) -> bool:
        return self.error <= self.limit(tolerance)  # false for NaN

    def ratio(self, tolerance: float) -> float:
        """The error divided by its limit. Infinite for NaN."""
        return inf if isnan(self.error) else self.error / self.limit(tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """The worst tensor of one quantity: the one whose error is the largest part of its own limit.

    `num_noisy` tensors are above the tolerance and pass because of their noise. `largest_noise` is the largest noise
    of these tensors, and `noisiest` is its place.
    """

    name: str
    max_error: float
    where: str
    tolerance: float
    limit: float
    num_noisy: int = 0
    largest_noise: float = 0.0
    noisiest: str = ""

    @property
    def passed(self) -> bool:
        return self.max_error <= self.limit  # false for NaN

    @property
    def scaled_error(self) -> float:
        """The worst error as a part of the tolerance: an error of half its limit is half of the tolerance."""
        return self.max_error * self.tolerance / self.limit

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "max_error": self.max_error,
            "where": self.where,
            "tolerance": self.tolerance,
            "limit": self.limit,
            "num_noisy": self.num_noisy,
            "largest_noise": self.largest_noise,
            "passed": self.passed,
        }


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference. Equal elements count 0, also if both are infinite or not a number."""
    if found.shape != reference.shape:
        return inf
    a, b = found.detach().double(), reference.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, torch.zeros_like(a), a - b).norm())


def size(reference: torch.Tensor) -> float:
    """The norm of a tensor without its elements that are not finite."""
    value = reference.detach().double()
    return float(torch.where(value.isfinite(), value, torch.zeros_like(value)).norm())


def error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error of a tensor: NaN if one value is NaN and the other is not.

    It is infinite if shapes differ, and if the reference is zero and the found tensor is not.
    """
    return _relative(distance(found, reference), size(reference))


def measured(found: Tensors, reference: Tensors, moved: Sequence[Tensors]) -> dict[str, Measured]:
    """Error and noise of every tensor of the reference. `moved` are runs in which only rounding is different."""
    return {
        name: measured_one(found.get(name), value, [run[name] for run in moved if name in run])
        for name, value in reference.items()
    }


def measured_one(found: torch.Tensor | None, reference: torch.Tensor, moved: Sequence[torch.Tensor]) -> Measured:
    """Error and noise of one tensor. A missing tensor has an infinite error."""
    if found is None:
        return Measured(error=inf)
    noise = max((d for d in (distance(m, reference) for m in moved) if isfinite(d)), default=0.0)
    base = size(reference) or noise  # a reference that is zero by chance
    return Measured(error=_relative(distance(found, reference), base), noise=_relative(noise, base))


def measured_weights(
    found: Tensors,
    reference: Tensors,
    moved: Sequence[Tensors],
    gradients: Tensors,
    moved_gradients: Sequence[Tensors],
    reach: float,
) -> tuple[dict[str, Measured], int]:
    """Errors of weights after optimizer steps, and how many elements were compared by reach.

    AdamW divides by the gradient's own size, so rounding alone moves elements whose gradient is rounding. They may
    differ by the distance that the optimizer can cover, `reach` = 2 · lr · steps. Other elements are compared by value.
    """
    errors, by_reach = {}, 0
    for name, value in reference.items():
        own, runs = found.get(name), [run[name] for run in moved if name in run]
        shifts = [run[name] - gradients[name] for run in moved_gradients if name in run and name in gradients]
        if own is None or own.shape != value.shape or not shifts:
            errors[name] = measured_one(own, value, runs)
            continue
        tiny = noisy_elements(gradients[name], shifts)
        by_reach += int(tiny.sum())
        kept = [torch.where(tiny, value, tensor) for tensor in (own, *runs)]
        one = measured_one(kept[0], value, kept[1:])
        is_far = bool(((own.double() - value.double()).abs()[tiny] > reach).any())
        errors[name] = Measured(error=inf) if is_far else one
    return errors, by_reach


def noisy_elements(gradient: torch.Tensor, shifts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which elements of a gradient are within `NOISE_FACTOR` × their noise. `shifts` are its changes by rounding.

    One shift may be small by chance, so the noise of an element is at least the mean noise of the tensor.
    """
    every = torch.stack([shift.double().abs() for shift in shifts])
    mean = every.square().mean().sqrt()
    return gradient.double().abs() <= NOISE_FACTOR * torch.maximum(every.amax(0), mean)


def is_open(failed: Iterable[tuple[float, float]], num_runs: int) -> bool:
    """Whether another noise run can change the verdict on some failed errors and limits.

    Two runs are enough to see that an error is far above its limit.
    """
    pairs = list(failed)
    return bool(pairs) and (num_runs < 2 or all(error < FAR * limit for error, limit in pairs))


def _relative(value: float, base: float) -> float:
    return value / base if base else (inf if value else 0.0)


def worst(name: str, errors: Mapping[str, Measured], tolerance: float) -> Quantity:
    """The entry whose error is the largest part of its limit. NaN counts as worst."""
    if not errors:
        return Quantity(name=name, max_error=0.0, where="", tolerance=tolerance, limit=tolerance)
    where = max(errors, key=lambda k: errors[k].ratio(tolerance))
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
    )
