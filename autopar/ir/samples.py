"""Work to measure on a machine, and its measurements: the values between `autopar.runtime`, which measures, and
`autopar.cost_model`, which fits.

    part         name                              numbers                                        amount
    matmul       dtype                             m, n, k                                        FLOP
    products     dtype                             count, m, n, k: batched, as in attention       FLOP
    attention    dtype                             count, m, n, k, is_causal, is_backward         FLOP, forward
    memory       what runs                         -                                              bytes moved
    launch       "device", "host"                  trains                                         operators
    collective   kind                              ranks, hosts                                   bytes of the whole
    overlap      "compute", "communicate", "both"  -                                              1
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WorkPart = Literal["matmul", "products", "attention", "memory", "launch", "collective", "overlap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something to run; `amount` is how much of it there is, for rates and to foresee how long it takes."""

    part: WorkPart
    name: str
    amount: float
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How long a work took, once: the median of several rounds."""

    work: Work
    seconds: float
