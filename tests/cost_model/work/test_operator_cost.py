"""Which operands the backward pass of an operator needs."""

from typing import Any

import pytest
import torch

from autopar.cost_model.work.operator_cost import saved_operands
from autopar.rules.registry import rule_for
from autopar.testing.rule_proof import sample_of

aten = torch.ops.aten
X, MASK = torch.rand(4, 6), torch.ones(4, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("target", "operands", "saved"),
    (
        (aten.add.Tensor, (X, X), ()),
        (aten.mul.Tensor, (X, X), (0, 1)),
        (aten.mul.Tensor, (X, MASK), (1,)),
        (aten.mm.default, (X, X.t()), (0, 1)),
        (aten.gather.default, (X, 1, MASK), (1,)),
        (aten.tanh.default, (X,), (0,)),
        (aten.add.Tensor, (MASK, MASK), ()),
    ),
)
def test_an_operator_that_is_linear_in_its_operands_keeps_the_others(
    target: Any, operands: tuple[Any, ...], saved: tuple[int, ...]
) -> None:
    call = sample_of(target, operands, {}).call
    assert saved_operands(call, rule_for(call)) == saved
