"""The error measure of equivalence (design section 5).

The error of a tensor is ‖difference‖ / max(‖reference‖, floor), with floor = f × RMS over all gradients × √numel. Some
gradients are zero in exact arithmetic, such as gradients of attention key biases. The floor keeps their rounding from
counting as error.

In float64 f is 1e-6. Rounding of some machine epsilons must stay below tolerance × floor. This makes f about 4.5 ·
epsilon / tolerance in every dtype.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 5e-2}
FLOORS = {torch.float64: 1e-6, torch.float32: 2.5e-3, torch.bfloat16: 0.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """The worst error of one quantity, its place, and the allowed error."""

    name: str
    max_error: float
    where: str
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.max_error <= self.tolerance  # false for NaN

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "max_error": self.max_error,
            "where": self.where,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }


def rms(tensors: Iterable[torch.Tensor]) -> float:
    """Root mean square over all elements of all tensors."""
    total, count = 0.0, 0
    for tensor in tensors:
        total += float(tensor.detach().double().square().sum())
        count += tensor.numel()
    return sqrt(total / count) if count else 0.0


def floor_fraction(*tensors: torch.Tensor) -> float:
    """The part of the RMS over all gradients below which a number counts as zero, by the coarsest dtype."""
    return max(FLOORS.get(t.dtype, FLOORS[torch.float64]) for t in tensors)


def error(found: torch.Tensor, reference: torch.Tensor, scale: float) -> float:
    """Relative error of a tensor. It is infinite if shapes differ, and NaN if a value is NaN."""
    if found.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    difference = (found.double() - reference.double()).norm()
    floor = floor_fraction(found, reference) * scale * sqrt(reference.numel())
    base = max(float(reference.double().norm()), floor)
    return float(difference) / base if base else float(difference)


def weight_error(
    found: torch.Tensor, reference: torch.Tensor, gradient: torch.Tensor | None, scale: float, reach: float
) -> tuple[float, int]:
    """Error of a weight after optimizer steps, and how many elements were compared by reach.

    AdamW divides by the gradient's own size, so rounding alone moves elements whose reference gradient is below the
    floor. They may differ by the distance that the optimizer can cover, `reach` = 2 · lr · steps.
    """
    if gradient is None:
        return error(found, reference, 0.0), 0
    tiny = gradient.abs() < floor_fraction(found, reference) * scale
    difference = (found.double() - reference.double()).abs()
    if bool((difference[tiny] > reach).any()):
        return float("inf"), int(tiny.sum())
    kept = torch.where(tiny, torch.zeros_like(difference), difference)
    base = float(reference.double().norm())
    return float(kept.norm()) / base if base else float(kept.norm()), int(tiny.sum())


def worst(name: str, errors: Mapping[str, float], tolerance: float) -> Quantity:
    """The worst entry of a mapping from place to error. NaN counts as worst."""
    if not errors:
        return Quantity(name=name, max_error=0.0, where="", tolerance=tolerance)
    where = max(errors, key=lambda k: (errors[k] != errors[k], errors[k]))
    return Quantity(name=name, max_error=errors[where], where=where, tolerance=tolerance)
