"""The error measure of equivalence: ‖difference‖ / max(‖reference‖, floor).

The floor is 1e-6 × RMS over all references × √(number of elements): gradients that are zero in exact arithmetic, such
as those of attention key biases, are rounding noise on one device already.
"""

from collections.abc import Mapping

import torch

FLOOR = 1e-6


def floors(reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The norm below which a tensor counts as zero, per tensor."""
    squares = sum(float(t.double().square().sum()) for t in reference.values())
    elements = sum(t.numel() for t in reference.values())
    rms = (squares / max(elements, 1)) ** 0.5
    return {name: FLOOR * rms * t.numel() ** 0.5 for name, t in reference.items()}


def relative_errors(found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The error of every reference tensor; a tensor that is missing, misshapen or not finite has an infinite one."""
    errors: dict[str, float] = {}
    for name, floor in floors(reference).items():
        wanted, got = reference[name].double(), found.get(name)
        if got is None or got.shape != wanted.shape:
            errors[name] = float("inf")
            continue
        difference = float((got.double() - wanted).norm())
        scale = max(float(wanted.norm()), floor)
        error = 0.0 if difference == 0.0 else difference / scale if scale else float("inf")
        errors[name] = error if error == error else float("inf")
    return errors
