"""The costs of engine mechanisms. A mechanism costs the same in every engine that has it.

The numbers and their sources stand in ``fitted_constants.yaml``. ``tools/fit_cost_model.py`` set the "fitted" numbers
on published training runs. The "assumed" numbers were set by hand, with the same runs in view. This module does not
import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from autopar.errors import InputError
from autopar.files.strict_yaml import read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """Names in `_s` are seconds. The others are parts between 0 and 1, or factors marked (≥ 1).

    first_attention      speed of a FlashAttention-1 kernel, as part of a FlashAttention-2 kernel's speed
    native_attention     speed of a kernel written for Hopper or later, over a FlashAttention-2 kernel's speed (≥ 1)
    misaligned           seconds of products whose head width is no multiple of 8, over aligned products (≥ 1)
    lean_dispatch        host seconds of a kernel started by compiled code, as part of an eager operator's host seconds
    graph_dispatch       host seconds of a kernel in a recorded graph, as part of an eager operator's host seconds
    async_hidden         part of backward tensor collectives hidden by "async" overlap
    pipelined_hidden     part of tensor collectives hidden by "pipelined" overlap
    message_exposed      part of the time of "overlapped" messages between stages that ranks still wait
    gradient_window      part of one micro-batch's block seconds that can hide gradient sums made "during" it
    broadcast_s          seconds of one rank's broadcast of its updated parameters
    straggler            deviation of one rank's step time: n ranks wait for the slowest, sqrt(2 ln n) deviations
    step_s               fixed seconds of a step: data, clipping, logging
    allocator_cache      unused memory that the framework's allocator holds, as part of the memory in use
    expert_imbalance     tokens of the busiest expert rank over the mean (≥ 1), unless the device profile states it
    """

    first_attention: float
    native_attention: float
    misaligned: float
    lean_dispatch: float
    graph_dispatch: float
    async_hidden: float
    pipelined_hidden: float
    message_exposed: float
    gradient_window: float
    broadcast_s: float
    straggler: float
    step_s: float
    allocator_cache: float
    expert_imbalance: float


@functools.cache
def mechanisms() -> Mechanisms:
    """The numbers of ``fitted_constants.yaml``. Raises InputError if the file is malformed."""
    return Mechanisms(**{name: float(entry["value"]) for name, entry in _entries().items()})


def source_of(name: str) -> str:
    """The source of one number of ``fitted_constants.yaml``. Raises InputError if the file is malformed."""
    return str(_entries()[name]["source"])


@functools.cache
def _entries() -> Mapping[str, Any]:
    with resources.as_file(resources.files("autopar.cost_model.machine") / "fitted_constants.yaml") as path:
        content, problems = read_yaml(path)
    names = [field.name for field in fields(Mechanisms)]
    if problems or not isinstance(content, dict) or sorted(content) != sorted(names):
        raise InputError(
            "fitted_constants.yaml must have a value and a source for each of " + ", ".join(names), problems
        )
    return content
