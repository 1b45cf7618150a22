"""Intervals of predictions: in four of five runs, the measured value lies inside.

The intervals follow from published runs that were predicted without any run of their framework. The ratio of measured
and predicted values varies between frameworks, and between the runs of one. Both together give a lower and an upper
bound in each situation (``prediction_intervals.yaml``):

    known engine       a profile describes the framework
    trainer            the same, of a framework that runs a user's loop (`TRAINERS`): padding, logging, a loader
    guessed engine     the framework is not known, and the neutral profile is used
    measured step      a step of the same device, precision and engine corrected the profile
    default device     no profile describes the device; this comes on top, as the root of the sum of squared logarithms

Mixtures of experts have bounds of their own. The ratio of two plans for the same work is known better than each plan:
`likely_slower` says from which predicted difference on a measurement would agree about the faster plan.
``tools/prediction_intervals.py`` writes the file. This module does not import torch.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from statistics import NormalDist
from typing import Literal, NamedTuple

from autopar.errors import InputError
from autopar.files.strict_yaml import read_yaml

SHRINKAGE = 0.7  # power of the ratio by which measured steps correct predictions of other steps
COVERED = 0.8  # the part of runs whose measured value is inside
FIGURES = ("time", "memory")
DEFAULT_CHANCE, LEAST_CHANCE, MOST_CHANCE = 0.9, 0.5, 0.999  # of a plan to fit
FILLED = 0.96  # part of a device that a run fills before it fails
PLAN_ORDER = "order"  # of two plans for the same work: the bounds of the measured ratio over the predicted one
SITUATIONS = (
    *("known engine", "known engine, experts", "guessed engine", "guessed engine, experts"),
    *("trainer", "trainer, experts"),
    *("measured step", "measured step, experts", "default device"),
)
TRAINERS = ("accelerate", "deepspeed")  # engines
FigureKind = Literal["time", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of a run: an engine profile of its framework, a profile of its device, and if it has experts."""

    is_engine_known: bool = True
    is_trainer: bool = False  # a known engine of `TRAINERS`
    is_device_known: bool = True
    has_experts: bool = False
    has_steps: bool = False  # measured steps corrected the profile

    @property
    def name(self) -> str:
        """One of `SITUATIONS`."""
        known = "trainer" if self.is_trainer else "known engine"
        basis = "measured step" if self.has_steps else known if self.is_engine_known else "guessed engine"
        return f"{basis}, experts" if self.has_experts else basis


class Interval(NamedTuple):
    """The bounds of a value, in its unit. `COVERED` of the measured values lie between them."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a measured value is inside."""
        return self.low <= value <= self.high


def interval_of(value: float, figure: FigureKind, situation: Situation) -> Interval:
    """The interval of a predicted value."""
    bounds = _bounds()[figure]
    low, high = bounds[situation.name]
    if not situation.is_device_known and not situation.has_steps:
        more = bounds["default device"]
        low, high = -math.hypot(low, more[0]), math.hypot(high, more[1])
    return Interval(low=value * math.exp(low), high=value * math.exp(high))


def usable_bytes(
    memory_bytes: float,
    chance: float = DEFAULT_CHANCE,
    situation: Situation = Situation(),
) -> float:
    """The largest predicted peak of a plan that fits a device with this probability."""
    peak = _log_peak(situation)
    return memory_bytes * (FILLED * math.exp(-peak.mean - NormalDist().inv_cdf(chance) * peak.stdev))


def chance_of_fitting(peak_bytes: float, memory_bytes: float, interval: tuple[float, float]) -> float:
    """The probability that a plan fits a device, from its predicted peak and the interval of this peak."""
    low, high = (math.log(bound / peak_bytes) for bound in interval)
    return _normal(low, high).cdf(math.log(FILLED * memory_bytes / peak_bytes))


def _log_peak(situation: Situation) -> NormalDist:
    """The logarithm of measured over predicted peak memory."""
    return _normal(*map(math.log, interval_of(1.0, "memory", situation)))


def _normal(low: float, high: float) -> NormalDist:
    """The normal distribution with `COVERED` of its values between two bounds, and as many below as above them."""
    return NormalDist((low + high) / 2, (high - low) / 2 / NormalDist().inv_cdf((1 + COVERED) / 2))


def likely_slower() -> float:
    """The predicted difference of two plans, as a part of the faster one, that nine of ten measurements confirm."""
    return math.exp(-_bounds()[PLAN_ORDER][PLAN_ORDER][0]) - 1


@functools.cache
def _bounds() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """The logarithms of the bounds, by figure and situation."""
    with resources.as_file(resources.files("autopar.cost_model") / "prediction_intervals.yaml") as path:
        content, problems = read_yaml(path)
    figures = (*FIGURES, PLAN_ORDER)
    if problems or not isinstance(content, dict) or set(content) != set(figures):
        raise InputError(f"prediction_intervals.yaml must have exactly {', '.join(figures)}", problems)
    return {
        figure: {name: (math.log(entry["low"]), math.log(entry["high"])) for name, entry in entries.items()}
        for figure, entries in content.items()
    }
