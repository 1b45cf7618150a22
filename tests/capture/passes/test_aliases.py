"""Operators with a second name: a program holds torch's own operator, which has a rule."""

import pytest
import tiny_models
import torch
from one_layer import checked_program, squared

from autopar.capture.passes.aliases import ALIASES
from autopar.rules.registry import registered

BODIES = {
    "multiply": lambda y: torch.multiply(y, y[0]).subtract(1.5).divide(2.0),
    "max": lambda y: torch.max(y, torch.zeros_like(y)) + torch.min(y, y.detach() * 2),
    "concatenate": lambda y: torch.concatenate([y, y * 2], 1),
    "greater": lambda y: torch.where(torch.greater(y, 0.0), y.absolute(), y.negative().clip(0, 1)),
    "zero": lambda y: zeroed(y * 2),
}


def zeroed(y: torch.Tensor) -> torch.Tensor:
    """Writes into views, so that export decomposes the in-place operators."""
    y[:, :2].zero_()
    y[:, 4:].fill_(2.0)
    return y


@pytest.mark.parametrize("body", BODIES)
def test_a_second_name_has_the_rule_of_the_first(body: str) -> None:
    model = tiny_models.randomise(squared(BODIES[body]).double())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    program = checked_program(model, x)
    targets = {n.target for block in program.blocks for n in block.graph.nodes if n.op == "call_function"}
    assert targets <= {*registered()}, targets - {*registered()}


def test_every_name_takes_the_same_arguments() -> None:
    for second, own in ALIASES.items():
        given, wanted = second._schema.arguments, own._schema.arguments
        assert [(a.type, a.kwarg_only) for a in given] == [(a.type, a.kwarg_only) for a in wanted], second
        assert own in registered(), own
