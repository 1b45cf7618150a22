"""Every registered rule, proved by running its operator whole and in shards on drawn calls."""

import random
import zlib
from typing import Any

import pytest
import rule_samples_compute  # noqa: F401  registers samples
import rule_samples_pointwise  # noqa: F401
import rule_samples_shapes  # noqa: F401
import torch
from rule_proof import Sample, prove, sample_of
from rule_samples import SAMPLES, Draw

from autopar.rules.families.pointwise import OPERATORS
from autopar.rules.registry import registered, rule_of

aten = torch.ops.aten
TARGETS = sorted(registered(), key=str)
NUM_DRAWS = 16
NUM_POINTWISE_DRAWS = 5
# values depend on position, or a partial result means nothing: nothing is ever split
NEVER_SPLIT = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default,
    aten.eye.m, aten.scalar_tensor.default, aten.max.default, aten.min.default, aten.any.default, aten.all.default,
    aten.prod.default,
}  # fmt: skip


def draw_sample(target: Any, number: int) -> tuple[Sample, random.Random]:
    """The sample number `number` of an operator, the same in every run."""
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


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_rule_holds_in_shards(target: Any) -> None:
    pointwise = str(target).split(".")[1] in OPERATORS
    proved = known = 0
    for number in range(NUM_POINTWISE_DRAWS if pointwise else NUM_DRAWS):
        sample, rng = draw_sample(target, number)
        rule = rule_of(sample.call)
        known += rule.known
        proved += prove(sample, rule, rng)
    assert known, f"no drawn call of {target} has a rule"
    assert (proved > 0) != (target in NEVER_SPLIT), f"{proved} shardings proved for {target}"
