"""Least squares on the logarithm of times, by search over grids: few constants, any formula, no starting point."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from autopar.cost_model.machine.profile import FitError
from autopar.ir.arrays import Floats

# predicts the times of all samples for every value of one constant: (values, 1) -> (values, samples)
Predict = Callable[[Floats], Floats]
_POINTS, COARSE, FINE = 33, 3, 6  # refinements: of 2000 times, to 1.5 % of a step and to a millionth


def log_loss(predicted: ArrayLike, seconds: ArrayLike) -> Floats:
    """Mean square of log(predicted / measured) over the last axis."""
    ratio = np.log(np.asarray(predicted, dtype=np.float64) / np.asarray(seconds, dtype=np.float64))
    return np.asarray(np.mean(ratio**2, axis=-1))


def fit_errors(predicted: ArrayLike, seconds: ArrayLike) -> FitError:
    """The relative errors of predictions."""
    off = np.abs(np.asarray(predicted, dtype=np.float64) / np.asarray(seconds, dtype=np.float64) - 1)
    return FitError(
        median=rounded(float(np.median(off))), p90=rounded(float(np.quantile(off, 0.9))), num_points=int(off.size)
    )


def best_constant(predict: Predict, seconds: ArrayLike, low: float, high: float, *, rounds: int = FINE) -> float:
    """The constant above 0 that predicts best, by a logarithmic grid that is refined `rounds` times around its best."""
    best = low
    lowest, highest = np.log(low), np.log(high)
    left, right = lowest, highest
    for _ in range(rounds):
        values = np.exp(np.linspace(left, right, _POINTS))
        best = float(values[int(np.argmin(log_loss(predict(values[:, None]), seconds)))])
        step = (right - left) / (_POINTS - 1)
        left, right = max(lowest, np.log(best) - 2 * step), min(highest, np.log(best) + 2 * step)
    return best


def rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


def rounded_s(seconds: float) -> float:
    """Seconds rounded to four digits of microseconds, as files write them."""
    return rounded(seconds * 1e6) / 1e6
