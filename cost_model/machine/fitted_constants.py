"""What each mechanism of an engine costs, the same for every engine that has it: few numbers with sources.

The numbers stand in ``mechanisms.yaml``; those that are "fitted" were set by ``tools/fit_cost_model.py`` on published
training runs, those that are "assumed" by hand, with the same runs in view. This module does not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

from autopar.errors import InputError
from autopar.files.atomic import write_text
from autopar.files.strict_yaml import read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """Seconds, or parts between 0 and 1 unless said.

    first_attention      speed of a FlashAttention-1 kernel, as part of a FlashAttention-2 kernel's
    native_attention     speed of kernels written for Hopper and later devices over FlashAttention 2's there (≥ 1)
    misaligned           seconds of products of heads whose width is no multiple of 8, over aligned ones (≥ 1)
    lean_dispatch        host seconds of a kernel started by compiled code, as part of an eager operator's
    graph_dispatch       the same in a recorded graph
    async_hidden         part of backward tensor collectives hidden by "async" overlap
    pipelined_hidden     part of tensor collectives hidden by "pipelined" overlap
    message_exposed      part of messages between stages that "overlapped" ones still cost
    gradient_window      part of one backward pass that can hide gradient sums made "during" it
    broadcast_s          seconds of one rank's broadcast of its updated parameters
    straggler            deviation of one rank's step time: n ranks wait for the slowest, sqrt(2 ln n) deviations
    step_s               seconds of a step beside everything else: data, clipping, logging
    allocator_cache      memory that the framework's allocator holds beside what is in use, as part of it
    expert_imbalance     tokens of the busiest expert rank over the mean (≥ 1)
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
    """The numbers of ``mechanisms.yaml``. Raises InputError when the file is malformed."""
    with resources.as_file(resources.files("autopar.cost_model.machine") / "fitted_constants.yaml") as path:
        content, problems = read_yaml(path)
    names = [field.name for field in fields(Mechanisms)]
    if problems or not isinstance(content, dict) or sorted(content) != sorted(names):
        raise InputError("mechanisms.yaml must have a value and a source for each of " + ", ".join(names), problems)
    return Mechanisms(**{name: float(content[name]["value"]) for name in names})


def dump_mechanisms(found: Mechanisms, sources: Mapping[str, str], path: Path) -> None:
    """Write ``mechanisms.yaml`` again; a number that `sources` does not name keeps the source that it has."""
    content, _ = read_yaml(path)
    assert isinstance(content, dict)
    lines = [
        f'{name}: {{value: {getattr(found, name):g}, source: "{sources.get(name, content[name]["source"])}"}}'
        for name in (field.name for field in fields(Mechanisms))
    ]
    write_text(path, "\n".join(lines) + "\n")
