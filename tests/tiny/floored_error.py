"""Errors of gradients for tests without a noise run: relative, but at least to a part of all gradients' size.

Some gradients are zero in exact arithmetic. Their rounding counts as no error.
"""

from collections.abc import Iterable
from math import inf, sqrt

import torch

FLOORS = {torch.float64: 1e-6, torch.float32: 2.5e-3}


def rms(tensors: Iterable[torch.Tensor]) -> float:
    """Root mean square over all elements of all tensors."""
    every = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    return float(every.square().mean().sqrt())


def floored_error(found: torch.Tensor, reference: torch.Tensor, scale: float) -> float:
    """Relative error, where `scale` is the RMS over all gradients. NaN if a value is NaN."""
    if found.shape != reference.shape:
        return inf
    fraction = max(FLOORS.get(t.dtype, FLOORS[torch.float64]) for t in (found, reference))
    base = max(float(reference.double().norm()), fraction * scale * sqrt(reference.numel()))
    apart = float((found.double() - reference.double()).norm())
    return apart / base if base else apart
