"""What a plan says about itself: the counts and names that `Plan.explain` prints, and the predicted step.

They are written into the plan when it is made, and decide nothing. A plan without a summary, written by hand, runs too.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The figures of a plan's `Estimate` that a run is compared with. MFU is a part of 1."""

    step_s: float
    step_interval_s: tuple[float, float]
    samples_per_s: float
    tokens_per_s: float | None  # None for a model without a sequence dimension
    mfu: float
    peak_bytes: float
    peak_interval_bytes: tuple[float, float]
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one mesh dimension in one pass of a block's call, with the bytes that a rank sends."""

    mesh_dim: str
    when: str  # "forward" or "backward"
    collective: str
    count: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSummary:
    """Selective recomputation of one call of a block for a micro-batch, on one rank."""

    num_operators: int
    saved_bytes: float  # for the backward pass, without recomputation
    saved_selectively: float
    flops: float  # of the block, forward and backward
    more_flops: float  # of the recomputed operators

    @property
    def freed(self) -> float:
        """The freed part of the saved bytes."""
        return 1 - self.saved_selectively / self.saved_bytes if self.saved_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSummary:
    """A distinct block: its number of calls, its collectives per call, the types of its results, its recomputation."""

    name: str
    num_calls: int
    num_operators: int
    traffic: tuple[Traffic, ...]
    results: tuple[str, ...]
    selective: SelectiveSummary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSummary:
    """Parameters with the same split: a name with ``*`` for layer numbers, their number, the split per dimension."""

    name: str
    num_copies: int
    shape: tuple[int, ...]
    split: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutRule:
    """An operator that has no rule for its call. Every rank computes it whole."""

    operator: str
    where: str
    num_calls: int
    seconds: float  # of one rank in a step, forward and backward
    kept_bytes: int  # saved by one rank for the backward pass of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """A pipeline stage."""

    rank: int
    first: str  # its first block call
    last: str
    num_calls: int
    seconds: float  # of one rank and micro-batch, forward and backward
    num_parameters: int
    sent_bytes: int  # to the next stage, by one rank for a micro-batch
    recomputed: tuple[str, ...]  # values of earlier stages that this stage computes again


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that `Plan.explain` says beyond the plan itself."""

    without_rule: tuple[WithoutRule, ...]
    parameters: tuple[ParameterSummary, ...]
    blocks: tuple[BlockSummary, ...]
    once_a_step: tuple[str, ...]
    stages: tuple[StageSummary, ...] = ()
