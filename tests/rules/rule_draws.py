"""The drawn sample calls of every operator, the same in every run."""

import random
import zlib
from typing import Any

import pytest
import rule_samples_compute  # noqa: F401  registers samples
import rule_samples_pieces  # noqa: F401
import rule_samples_places  # noqa: F401
import rule_samples_pointwise  # noqa: F401
import rule_samples_shapes  # noqa: F401
import torch
from rule_samples import SAMPLES, Draw

from autopar.testing.rule_proof import OperatorSample, sample_of

# of the pointwise operators, which all have one rule
FEW_POINTWISE = {"add", "mul", "where", "masked_fill", "gelu", "to", "div", "sub", "pow", "maximum", "clamp", "eq"}


def draw_sample(target: Any, number: int) -> tuple[OperatorSample, random.Random]:
    """Sample number `number` of an operator, and the generator for what else is drawn."""
    if target not in SAMPLES:
        pytest.fail(f"add a sample for {target} in tests/rules/rule_samples_*.py")
    seed = zlib.crc32(f"{target}/{number}".encode())
    torch.manual_seed(seed)
    arguments = SAMPLES[target](Draw(seed))
    if len(arguments) == 2 and isinstance(arguments[1], dict):
        args, kwargs = arguments
    else:
        args, kwargs = arguments, {}
    return sample_of(target, args, kwargs), random.Random(seed)
