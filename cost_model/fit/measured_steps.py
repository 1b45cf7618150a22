"""Measured steps correct a profile by terms: computing, and the links of each tier.

A step's logarithm of measured over predicted time is split among the terms by the part that each of them has in the
step's time (elasticities). Least squares over all steps with a penalty on the corrections (ridge regression: Hoerl,
Kennard 1970) shrinks them: one step that is all computing corrects computing by its ratio to the power of `SHRINKAGE`.
More steps are believed more. A term that no step spends time on stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.fit.predicted_vs_measured import scaled_term
from autopar.cost_model.interval import SHRINKAGE
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.ir.arrays import Floats

_STEP = 1.05  # factor on a term for the difference quotient: constants of a profile are rounded to four digits
PENALTY = (1 - SHRINKAGE) / SHRINKAGE


def profile_terms(profile: DeviceProfile) -> tuple[str, ...]:
    """The terms of a profile: ``compute``, and its tiers."""
    return ("compute", *profile.links)


def elasticities(price: Callable[[DeviceProfile], Floats], profile: DeviceProfile) -> NDArray[np.float64]:
    """The part of each term (column) in the time of each step (row), as the change of its logarithm."""
    usual = np.asarray(price(profile), dtype=np.float64).reshape(-1)
    slower = [
        np.broadcast_to(price(scaled_term(profile, term, _STEP, "")), usual.shape) for term in profile_terms(profile)
    ]
    slopes: NDArray[np.float64] = np.log(np.stack(slower, axis=1) / usual[:, None]) / np.log(_STEP)
    return slopes


def term_factors(ratios: Sequence[float], parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factor on the time of each term."""
    penalty = PENALTY * np.eye(parts.shape[1])
    factors: NDArray[np.float64] = np.exp(np.linalg.solve(parts.T @ parts + penalty, parts.T @ np.log(ratios)))
    return factors


def slowed(profile: DeviceProfile, factors: Mapping[str, float], why: str) -> DeviceProfile:
    """`profile` with the constants of each term scaled, so that they take `factors` times as long."""
    slower = profile
    for term, factor in factors.items():
        slower = scaled_term(slower, term, factor, why)
    return slower
