"""Belief about the step times of plans after some plans were measured.

    log(seconds) = log(predicted seconds) + error

Errors are normal. An error has a part that all plans share, a part that plans of similar degrees share, and a part of
one plan alone:

    cov(i, j) = COMMON² + ALIKE² · exp(-|x_i - x_j|² / (2 · REACH²)) + OWN² · [i = j]        x: log2 of the degrees

Measured plans condition the others: Gaussian process regression (Rasmussen, Williams 2006, "Gaussian Processes for
Machine Learning", algorithm 2.1). The part of one plan alone cannot be learnt, so an unmeasured plan keeps it. A
common factor never changes the order of plans. It does change how sure the order is.

`worth_measuring` says whether another measurement may pay. ``benchmarks/tune_replay.py`` replays both on published
sweeps, which have a measurement of every layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autopar.ir.arrays import Floats

COMMON, ALIKE, OWN = 0.10, 0.15, 0.13  # deviations of log(measured / predicted), on published sweeps
REACH = 2.0  # doublings of degrees over which errors are alike
NOTABLE = 0.02  # a plan that is faster by less is as good
DOUBT = 0.10  # chance that a plan is left that is notably faster, at which measuring ends
_normal = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """The mean and the deviation of the logarithm of each plan's seconds. `is_measured` marks measured plans."""

    mean: Floats
    deviation: Floats
    is_measured: NDArray[np.bool_]

    @property
    def seconds(self) -> Floats:
        """The median of the belief, in seconds."""
        seconds: Floats = np.exp(self.mean)
        return seconds

    @property
    def best_s(self) -> float:
        """Seconds of the best measured plan; infinite without one."""
        return float(np.min(self.seconds[self.is_measured], initial=np.inf))


def belief(
    predicted_s: Sequence[float], degrees: NDArray[np.float64], measured_s: Mapping[int, float], *, own_s: float = OWN
) -> Belief:
    """What is believed of plans after some measurements."""
    predicted = np.log(np.asarray(predicted_s, dtype=np.float64))
    known = sorted(measured_s)
    apart = np.log2(degrees)[:, None] - np.log2(degrees)[None]
    shared = COMMON**2 + ALIKE**2 * np.exp(-np.sum(apart**2, axis=-1) / (2 * REACH**2))
    mean, variance = predicted.copy(), np.diag(shared) + own_s**2
    is_measured = np.zeros(len(predicted), dtype=np.bool_)
    if known:
        off = np.array([log(measured_s[at]) - predicted[at] for at in known])
        of_known = shared[np.ix_(known, known)] + own_s**2 * np.eye(len(known))
        gain = np.linalg.solve(of_known, shared[known])
        mean, variance = mean + gain.T @ off, variance - np.sum(shared[known] * gain, axis=0)
        mean[known], variance[known], is_measured[known] = predicted[known] + off, 0.0, True
    return Belief(mean=mean, deviation=np.sqrt(variance), is_measured=is_measured)


def chances(beliefs: Belief) -> Floats:
    """For each plan, the chance that it is notably faster than the best measured plan. It is 0 for measured plans."""
    goal = log(beliefs.best_s * (1 - NOTABLE)) if np.isfinite(beliefs.best_s) else np.inf
    each = [
        0.0 if done else _normal.cdf((goal - mean) / deviation)
        for mean, deviation, done in zip(beliefs.mean, beliefs.deviation, beliefs.is_measured, strict=True)
    ]
    return np.array(each)


def expected_gains(beliefs: Belief) -> Floats:
    """For each plan, the expected part of the best measured seconds that measuring it saves (expected improvement).

    Jones, Schonlau, Welch 1998, "Efficient global optimization of expensive black-box functions", for a log-normal
    time. Gains of several plans do not add up, because only one of them will be the best.
    """
    if not np.isfinite(beliefs.best_s):
        return np.where(beliefs.is_measured, 0.0, 1.0)
    gains = np.zeros(len(beliefs.mean))
    for at in np.flatnonzero(~beliefs.is_measured):
        mean, deviation = float(beliefs.mean[at]) - log(beliefs.best_s), float(beliefs.deviation[at])
        below = _normal.cdf(-mean / deviation)
        gains[at] = max(0.0, below - np.exp(mean + deviation**2 / 2) * _normal.cdf(-mean / deviation - deviation))
    return gains


def worth_measuring(beliefs: Belief, left: Sequence[int] | slice = slice(None)) -> bool:
    """Whether some plan left may be notably faster. The sum of the chances bounds the chance of any (Boole)."""
    return float(np.sum(chances(beliefs)[left])) >= DOUBT
